"""How a command says why it could not do what it was asked to, and the options that all commands have."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from hostweights.messages.failure import HostWeightsError

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]

REFUSED: Final = 2
INTERRUPTED: Final = 130


def root_path(text: str) -> Path:
    """What ``--root`` names; an empty one, as an unset variable of a shell gives, is not the working directory."""
    if not text:
        raise typer.BadParameter("it is empty; expected a directory, and . for the working directory")
    return Path(text)


@contextmanager
def refusing(*, debug: bool) -> Iterator[None]:
    """A failure of the block is one line on standard error and exit code 2; 130 for an interrupt.

    With ``debug`` a failure goes on as it is, to end the process with its traceback.
    """
    from hostweights.messages.failure import Code, HostWeightsError

    try:
        yield
    except HostWeightsError as failed:
        if debug:
            raise
        say(failed)
        raise typer.Exit(INTERRUPTED if failed.code is Code.CANCELLED else REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def refuse_unused(context: typer.Context, names: Sequence[str], why: str) -> None:
    """Raise HostWeightsError(invalid_config) for the first of these parameters that the command line gives.

    An option that changes nothing is a misunderstanding of whoever gave it.
    """
    from hostweights.messages.failure import Code, Stage, error

    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            text = f"--{name.replace('_', '-')} {why}; leave it out"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)


def say(failed: "HostWeightsError") -> None:
    """One line on standard error: what, where, why, the way out, and the stage and code for scripts."""
    _line(f"error: {failed} [{failed.failure.stage}/{failed.code}]")


def say_bug(found: Exception) -> None:
    """One line on standard error for what should not happen: an error that the library did not name."""
    _line(f"error: unexpected {type(found).__name__}: {found}; the option --debug shows where")


def print_json(result: object) -> None:
    """One JSON value on standard output."""
    import msgspec

    typer.echo(msgspec.json.encode(result).decode())


def _line(text: str) -> None:
    from rich.console import Console

    from hostweights.messages.failure import visible

    line = visible(" ".join(text.splitlines()))
    Console(stderr=True, emoji=False).print(line, markup=False, highlight=False, soft_wrap=True)
