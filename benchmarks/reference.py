"""Writes docs/reference.md from docstrings: ``python -m benchmarks.reference``."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer

import hostweights
from hostweights.cli import app
from hostweights.settings.catalog import FIELDS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
_HEAD = """# Reference

From the docstrings; `python -m benchmarks.reference` writes this page.

"""


def reference() -> str:
    """The page."""
    lines = ["## Names of `hostweights`", ""]
    for name in sorted(hostweights.__all__, key=str.lower):
        if name != "__version__":
            lines += _entry(name, getattr(hostweights, name))
    lines += ["## Commands", ""]
    for name, command in sorted(typer.main.get_command(app).commands.items()):  # type: ignore[attr-defined]  # a group
        lines += [f"### hostweights {name}", "", _text(command.help), ""]
        lines += [f"- `{_usage(each)}` {each.help or ''}".rstrip() for each in command.params if each.name != "help"]
        lines.append("")
    lines += ["## Settings", "", "| name | default |", "|---|---|"]
    for field in FIELDS.values():
        shown = "none" if field.default is msgspec.NODEFAULT else msgspec.json.encode(field.default).decode()
        lines.append(f"| `{field.name}` | `{shown}` |")
    return _HEAD + "\n".join(lines) + "\n"


def _entry(name: str, value: Any) -> Iterator[str]:  # noqa: ANN401 - whatever is public
    if inspect.isclass(value):
        yield from (f"### {name}", "", _text(value.__doc__), "")
        if issubclass(value, msgspec.Struct):
            yield from (f"- `{each.name}`" for each in msgspec.structs.fields(value))
            yield ""
        for member, each in vars(value).items():
            if not member.startswith("_") and (inspect.isfunction(each) or isinstance(each, property)):
                yield from _function(f"{name}.{member}", each)
    elif inspect.isfunction(value):
        yield from _function(name, value)
    else:
        yield from (f"### {name}", "", f"A `{type(value).__name__}`.", "")


def _function(name: str, value: Callable[..., object] | property) -> Iterator[str]:
    if isinstance(value, property):
        yield from (f"#### {name}", "", _text(value.__doc__), "")
        return
    parameters = [each for each in inspect.signature(value).parameters.values() if each.name != "self"]
    named = ["*" if _first_named(parameters) is each else "" for each in parameters]
    words = [f"{'*, ' * bool(star)}{each.name}" for star, each in zip(named, parameters, strict=True)]
    call = "await " if inspect.iscoroutinefunction(value) else ""
    yield from (f"#### {name}", "", f"`{call}{name}({', '.join(words)})`", "", _text(value.__doc__), "")


def _first_named(parameters: list[inspect.Parameter]) -> inspect.Parameter | None:
    return next((each for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY), None)


def _usage(parameter: Any) -> str:  # noqa: ANN401 - typer's own types differ by release
    return ", ".join(parameter.opts) if parameter.param_type_name == "option" else str(parameter.name).upper()


def _text(docstring: str | None) -> str:
    """Markdown of a docstring: double backticks are single ones."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(docstring or "")).strip()


if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
