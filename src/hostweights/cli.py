"""The ``hostweights`` command. Exit codes: 0 done; 1 the result is not what it must be; 2 bad input or a failure."""

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from hostweights.commands.bench import bench
from hostweights.commands.config import config
from hostweights.commands.doctor import doctor
from hostweights.commands.pull import pull
from hostweights.commands.push import push
from hostweights.commands.refusals import REFUSED, AsJson, Debug, print_json, refusing, root_path, say_bug
from hostweights.commands.replay import replay
from hostweights.commands.store_list import list_store
from hostweights.commands.store_remove import gc, rm
from hostweights.commands.store_show import show
from hostweights.commands.store_verify import scrub, verify
from hostweights.commands.top import top
from hostweights.commands.warm import warm

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(version("hostweights"))
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 done; 1 the result is not what it must be, or was not confirmed; 2 bad input or a "
    "failure, said in one line on standard error; 130 interrupted."
)
def _root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """One host copy of model weights: published once, mapped by every worker, streamed block by block.

    Every command takes --json, for one JSON value on standard output, and --debug, for the traceback of a failure.
    """


@app.command()
def demo(
    model: Annotated[
        Path | None, typer.Option(help="Directory of a BERT-like sentence encoder (default: the installed MiniLM).")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, max=16, help="Worker processes; the first one starts cold.")] = 2,
    root: Annotated[
        Path | None, typer.Option(help="Store to use and keep (default: a temporary one).", parser=root_path)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the temporary store.")] = False,
    journals: Annotated[
        Path | None, typer.Option(help="Record every message of each worker into a new file in this directory.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the whole path on real weights.

    Worker 1 starts cold, serves at once, publishes in the background and adopts the published pages; the other workers
    start warm from them. All stream the model's blocks through two slots, and every output is compared with the plain
    model to the bit. Exit code 0 only if everything was equal and nothing leaked.

    Example: hostweights demo --workers 4
    """
    import anyio
    from rich.console import Console

    from hostweights.demo.display import ProgressView, render
    from hostweights.demo.run import DemoSettings, run_demo

    errors = Console(stderr=True, emoji=False)
    settings = DemoSettings(model=model, workers=workers, root=root, keep=keep, journals=journals)
    with refusing(debug=debug), ProgressView(errors, workers) as view:
        result = anyio.run(run_demo, settings, view.show)
    if as_json:
        print_json(result)
    else:
        Console(emoji=False).print(render(result))
    if not result.ok:
        raise typer.Exit(1)


app.command()(bench)
app.command()(config)
app.command()(doctor)
app.command()(pull)
app.command()(push)
app.command()(replay)
app.command()(top)
app.command()(warm)
app.command("list")(list_store)
app.command()(show)
app.command()(verify)
app.command()(scrub)
app.command()(gc)
app.command()(rm)


def main() -> None:
    """Entry point. An error that nobody foresaw is one line too, but with ``--debug``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a terminal that lacks a letter is no failure
    try:
        app()
    except Exception as found:
        if "--debug" in sys.argv:
            raise
        say_bug(found)
        sys.exit(REFUSED)
