"""``hostweights bench``: what this machine does with a model; with a suite, the repository's own benchmarks."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hostweights.commands.refusals import AsJson, Debug, print_json, refuse_unused, refusing, root_path
from hostweights.commands.store_output import size_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from hostweights.bench.results import Measurement


_MEASURES = ("model", "component", "inputs", "size", "device", "slots", "forwards", "root", "trace")
"""What a suite has no use for."""


def bench(
    context: typer.Context,
    suite: Annotated[
        str | None, typer.Argument(help="A suite of the repository's benchmarks/ (default: measure this machine).")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="A diffusers or transformers directory (default: blocks with random weights)."),
    ] = None,
    component: Annotated[str | None, typer.Option(help="Component of a pipeline.")] = None,
    inputs: Annotated[
        str | None, typer.Option(help="MODULE:CALLABLE; from the module, the keyword arguments of one forward.")
    ] = None,
    size: Annotated[str, typer.Option(help="Size of the blocks with random weights (512M, 2G).")] = "192M",
    device: Annotated[str, typer.Option(help="Stream to this device, such as cuda.")] = "cpu",
    slots: Annotated[int, typer.Option(min=2, max=64, help="Slots to stream through.")] = 2,
    forwards: Annotated[int, typer.Option(min=1, max=1000, help="Forwards to record.")] = 3,
    root: Annotated[
        Path | None, typer.Option(help="Store to use and keep (default: a temporary one).", parser=root_path)
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with timeline, stalls and memory.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for chrome://tracing or Perfetto.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Publish a model, restore it warm and stream its forwards; show what each took and what bounds it.

    Exit code 0 when done; 1 when the streamed output is not the resident one (compared where the whole model fits on
    the device); 2 on bad input or a failure. With a SUITE, which needs a checkout of the repository, the exit code is
    that suite's.

    Example: hostweights bench --size 16M --report report.html --trace trace.json
    """
    with refusing(debug=debug):
        if suite is not None:
            from hostweights.commands.bench_suite import run_suite

            refuse_unused(context, _MEASURES, f"is for bench without a suite, and {suite} measures what it measures")
            raise typer.Exit(run_suite(suite, report, as_json=as_json))
        if model is None:
            refuse_unused(context, ("component", "inputs"), "is for a model of --model, and none is given")
        else:
            refuse_unused(context, ("size",), "is for blocks with random weights, and --model is given")
        wanted_bytes = size_bytes(size)
        found, events = _measured(
            root, lambda place: _subject(place, model, component, inputs, wanted_bytes), device, slots, forwards
        )
        _write(found, events, report, trace)
    if as_json:
        print_json(found)
    else:
        _show(found)
    if found.streamed is not None and found.streamed.equal is False:
        raise typer.Exit(1)


def _subject(place: Path, model: Path | None, component: str | None, inputs: str | None, wanted_bytes: int) -> object:
    from hostweights.bench.subject import model_in, stack_of
    from hostweights.commands.named import callable_named

    if model is None:
        return stack_of(wanted_bytes, place)
    return model_in(model, component, None if inputs is None else callable_named("--inputs", inputs))


def _measured(
    root: Path | None, subject: "Callable[[Path], object]", device: str, slots: int, forwards: int
) -> "tuple[Measurement, dict[str, object]]":
    import tempfile

    import anyio
    from rich.console import Console

    from hostweights.bench.measure import measure
    from hostweights.bench.subject import Subject
    from hostweights.messages.config import Config

    errors = Console(stderr=True, emoji=False)

    def say(text: str) -> None:
        errors.print(text, markup=False, highlight=False)

    with tempfile.TemporaryDirectory(prefix="hostweights-bench-") as name:
        place = Path(name)
        found = subject(place)
        assert isinstance(found, Subject)
        config = Config(root=str((root or place / "store").absolute()))

        async def run() -> "tuple[Measurement, dict[str, object]]":
            return await measure(config, found, device=device, slots=slots, forwards=forwards, say=say)

        return anyio.run(run)


def _write(found: "Measurement", events: dict[str, object], report: Path | None, trace: Path | None) -> None:
    import msgspec

    from hostweights.bench.page import page
    from hostweights.messages.failure import Code, Stage, error

    for path, data in ((report, page(found).encode()), (trace, msgspec.json.encode(events))):
        if path is not None:
            try:
                path.write_bytes(data)
            except OSError as failed:
                text = f"{path} could not be written: {failed.strerror}; choose another place"
                raise error(Stage.RUNTIME, Code.IO_ERROR, text, path=path) from failed


def _show(found: "Measurement") -> None:
    from rich.console import Console
    from rich.table import Table

    from hostweights.bench.page import milliseconds
    from hostweights.bench.page import size as mib

    rows = [
        ("artifact", mib(found.artifact_bytes)),
        ("published" if found.built else "found in the store", f"{found.publish_s:.3f} s"),
        ("warm restore", f"{found.restore_s:.3f} s"),
    ]
    if found.resident_forward_s is not None:
        rows.append((f"resident forward, {found.resident_device}", milliseconds(found.resident_forward_s)))
    if (streamed := found.streamed) is not None:
        if streamed.registered_s is not None:
            rows.append(("pages registered beside the first forward", f"{streamed.registered_s:.3f} s"))
        rows.append((f"streamed forward, {streamed.device}", milliseconds(streamed.forward_s)))
        rows += [(f"  {limit.name}", milliseconds(limit.seconds)) for limit in streamed.limits]
        rows.append(
            (f"  stalls in {streamed.forwards} forwards", f"{streamed.stalls}, {milliseconds(streamed.stall_s)}")
        )
        if streamed.equal is not None:
            rows.append(("  equal to the resident output, bit by bit", "yes" if streamed.equal else "NO"))
    rows += [(each.name, mib(each.size_bytes)) for each in found.memory[1:]]
    table = Table("", "", title=f"{found.model} on {found.machine}", title_justify="left", show_header=False)
    for name, cell in rows:
        table.add_row(name, cell)
    console = Console(emoji=False)
    console.print(table, markup=False)
    if found.note:
        console.print(found.note, markup=False, highlight=False)
