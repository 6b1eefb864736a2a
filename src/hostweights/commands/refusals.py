"""How a command says why it could not do what it was asked to, and the options that all commands have."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Final

import typer

if TYPE_CHECKING:
    from hostweights.messages.failure import HostWeightsError

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")]

REFUSED: Final = 2
INTERRUPTED: Final = 130


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

    Console(stderr=True).print(visible(" ".join(text.splitlines())), markup=False, highlight=False, soft_wrap=True)
