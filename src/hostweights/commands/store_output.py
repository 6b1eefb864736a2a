"""What the commands on a store share: their options, how they fail, and how they write sizes and times."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hostweights.commands.refusals import refusing

if TYPE_CHECKING:
    from hostweights.actors.upkeep import Upkeep

Root = Annotated[Path, typer.Option(help="The store.", envvar="HOSTWEIGHTS_ROOT")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
SHORT_KEY = 12


@contextmanager
def opened(root: Path, *, debug: bool) -> Iterator["Upkeep"]:
    """The store for the block; failures end the command as ``refusing`` says."""
    from hostweights.actors.upkeep import existing_store

    with refusing(debug=debug), existing_store(root) as upkeep:
        yield upkeep


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
