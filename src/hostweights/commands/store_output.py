"""What the commands on a store share: their options, how they fail, and how they write sizes and times."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hostweights.actors.upkeep import Upkeep

Root = Annotated[Path, typer.Option(help="The store.", envvar="HOSTWEIGHTS_ROOT")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
INTERRUPTED = 130
SHORT_KEY = 12


@contextmanager
def opened(root: Path) -> Iterator["Upkeep"]:
    """The store for the block; a failure of the block is one line on standard error and exit code 2."""
    from rich.console import Console

    from hostweights.actors.upkeep import existing_store
    from hostweights.messages.failure import HostWeightsError

    try:
        with existing_store(root) as upkeep:
            yield upkeep
    except HostWeightsError as failed:
        text = f"error: {failed} [{failed.failure.stage}/{failed.code}]"
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def print_json(result: object) -> None:
    """One JSON value on standard output."""
    import msgspec

    typer.echo(msgspec.json.encode(result).decode())


def confirmed(question: str, *, yes: bool) -> None:
    """Go on if the user agrees; exit code 1 otherwise, with nothing changed. The question goes to standard error."""
    if yes or typer.confirm(question, err=True):
        return
    typer.echo("nothing was removed", err=True)
    raise typer.Exit(1)


def size(size_bytes: int) -> str:
    """A size for people."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def size_bytes(text: str) -> int:
    """The bytes that ``10G``, ``512MiB`` or ``1000`` mean; units are powers of 1024. Raises typer.BadParameter."""
    number = text.strip().rstrip("ibIB")
    power = "KMGT".find(number[-1:].upper()) + 1 if number[-1:].isalpha() else 0
    digits: str = number[:-1] if power else number
    if not digits.isascii() or not digits.isdigit():
        raise typer.BadParameter(f"{text!r} is no size; expected digits and perhaps K, M, G or T")
    return int(digits) << 10 * power
