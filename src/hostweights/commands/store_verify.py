"""``hostweights verify`` and ``hostweights scrub``: comparing stored bytes with their digests."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from hostweights.commands.store_output import SHORT_KEY, AsJson, Root, opened, print_json, size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from hostweights.actors.upkeep import Upkeep


def verify(
    root: Root,
    keys: Annotated[list[str] | None, typer.Argument(help="Keys or their first digits (default: all).")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every byte of artifacts with its digest, at full speed; condemns nothing.

    Exit code 0 when all is as published; 1 when something is damaged; 2 on bad input, or when bytes cannot be read.

    Example: hostweights verify 3f2a --root /var/lib/hostweights
    """
    with opened(root) as upkeep:
        rows = _verify_all(upkeep, keys)
    if as_json:
        print_json(rows)
    else:
        for row in rows:
            sound = f"sound, {size(int(row['size_bytes'] or 0))}"
            typer.echo(f"{str(row['key'])[:SHORT_KEY]} {row['generation']}: {row['damage'] or sound}")
    if any(row["damage"] for row in rows):
        raise typer.Exit(1)


def _verify_all(upkeep: "Upkeep", keys: list[str] | None) -> list[dict[str, str | int | None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from hostweights.messages.failure import Code, HostWeightsError

    proven = {Code.CHECKSUM_MISMATCH, Code.PAYLOAD_MISMATCH, Code.MANIFEST_CORRUPT}
    chosen = upkeep.stored() if not keys else tuple(each for key in keys for each in upkeep.of_key(key))
    rows: list[dict[str, str | int | None]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        for stored in chosen:
            task = bar.add_task(f"{stored.key[:SHORT_KEY]} {stored.generation}", total=None)
            damage: str | None = None
            done_bytes = 0
            try:
                done_bytes = upkeep.verify(stored, partial(_show_done, bar, task))
            except HostWeightsError as failed:
                if failed.code not in proven:
                    raise
                damage = f"{failed.code}: {failed}"
            rows.append(
                {"key": stored.key, "generation": stored.generation, "size_bytes": done_bytes, "damage": damage}
            )
    return rows


def _show_done(bar: "Progress", task: "TaskID", done: int, total: int) -> None:
    bar.update(task, completed=done, total=total)


def scrub(root: Root, as_json: AsJson = False) -> None:
    """Read the whole store at idle I/O priority, and condemn what is damaged so that workers publish it anew.

    Fit for a timer. Exit code 0 when all was sound; 1 when something was damaged or could not be read; 2 on bad input.

    Example: hostweights scrub --root /var/lib/hostweights
    """
    with opened(root) as upkeep:
        found = upkeep.scrub()
    if as_json:
        print_json(found)
    else:
        for text in found.damaged:
            typer.echo(f"damaged: {text}")
        for text in found.unread:
            typer.echo(f"not read: {text}")
        typer.echo(f"{found.sound} sound, {size(found.sound_bytes)}; {len(found.damaged)} damaged")
    if found.damaged or found.unread:
        raise typer.Exit(1)
