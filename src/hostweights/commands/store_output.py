"""What the commands on a store share: their options, how they fail, and how they write sizes and times."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hostweights.commands.layered import layered_config
from hostweights.commands.refusals import refusing, root_path

if TYPE_CHECKING:
    from hostweights.actors.upkeep import Upkeep

Root = Annotated[
    Path | None,
    typer.Option(help="The store (default: the setting root).", envvar="HOSTWEIGHTS_ROOT", parser=root_path),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
SHORT_KEY = 12


@contextmanager
def opened(root: Path | None, *, debug: bool) -> Iterator["Upkeep"]:
    """The store for the block; failures end the command as ``refusing`` says."""
    from hostweights.actors.upkeep import existing_store

    with refusing(debug=debug), existing_store(root or Path(layered_config().root)) as upkeep:
        yield upkeep


def confirmed(question: str, *, yes: bool) -> None:
    """Go on if the user agrees; exit code 1 otherwise, 130 at Ctrl-C, with nothing changed. Asks on standard error."""
    try:
        if yes or typer.confirm(question, err=True):
            return
    except typer.Abort as ended:  # also at the end of the input
        if isinstance(ended.__context__, KeyboardInterrupt):
            raise typer.Exit(130) from None
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
    """The bytes that ``200G`` or ``512 MiB`` mean. Raises typer.BadParameter."""
    from hostweights.settings.sizes import UNITS, parse_size

    found = parse_size(text)
    if found is None:
        units = ", ".join(unit for unit in UNITS if unit)
        raise typer.BadParameter(f"{text!r} is no size; expected a number of bytes, or one with {units}")
    return found
