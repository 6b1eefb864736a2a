"""``hostweights verify`` and ``hostweights scrub``: comparing stored bytes with their digests."""

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from hostweights.commands.progress import Work
from hostweights.commands.refusals import AsJson, Debug, print_json
from hostweights.commands.store_output import SHORT_KEY, Root, opened, size

if TYPE_CHECKING:
    from hostweights.actors.upkeep import Upkeep


def verify(
    root: Root = None,
    keys: Annotated[list[str] | None, typer.Argument(help="Keys or their first digits (default: all).")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare every byte of artifacts with its digest, at full speed; condemns nothing.

    Exit code 0 when all is as published; 1 when something is damaged; 2 on bad input, or when bytes cannot be read.

    Example: hostweights verify 3f2a --root /var/cache/hostweights
    """
    with opened(root, debug=debug) as upkeep:
        rows = _verify_all(upkeep, keys)
    if as_json:
        print_json(rows)
    else:
        from hostweights.messages.failure import visible

        for row in rows:
            sound = f"sound, {size(int(row['size_bytes'] or 0))}"
            typer.echo(visible(f"{str(row['key'])[:SHORT_KEY]} {row['generation']}: {row['damage'] or sound}"))
    if any(row["damage"] for row in rows):
        raise typer.Exit(1)


def _verify_all(upkeep: "Upkeep", keys: list[str] | None) -> list[dict[str, str | int | None]]:
    from rich.console import Console

    from hostweights.messages.failure import Code, HostWeightsError

    proven = {Code.CHECKSUM_MISMATCH, Code.PAYLOAD_MISMATCH, Code.MANIFEST_CORRUPT}
    chosen = upkeep.stored() if not keys else tuple(each for key in keys for each in upkeep.of_key(key))
    rows: list[dict[str, str | int | None]] = []
    with Work(Console(stderr=True)) as work:
        for stored in chosen:
            damage: str | None = None
            done_bytes = 0
            try:
                done_bytes = upkeep.verify(stored, partial(work.show, f"{stored.key[:SHORT_KEY]} {stored.generation}"))
            except HostWeightsError as failed:
                if failed.code is Code.ARTIFACT_MISSING and not stored.directory.exists():
                    continue  # collected since it was listed: a store at work
                if failed.code not in proven:
                    raise
                damage = f"{failed.code}: {failed}"
            rows.append(
                {"key": stored.key, "generation": stored.generation, "size_bytes": done_bytes, "damage": damage}
            )
    return rows


def scrub(root: Root = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """Read the whole store at idle I/O priority, and condemn what is damaged so that workers publish it anew.

    Fit for a timer. Exit code 0 when all was sound; 1 when something was damaged or could not be read; 2 on bad input.

    Example: hostweights scrub --root /var/cache/hostweights
    """
    from rich.console import Console

    with opened(root, debug=debug) as upkeep, Work(Console(stderr=True)) as work:
        found = upkeep.scrub(
            lambda key, generation, done, total: work.show(f"{key[:SHORT_KEY]} {generation}", done, total)
        )
    if as_json:
        print_json(found)
    else:
        from hostweights.messages.failure import visible

        for text in found.damaged:
            typer.echo(visible(f"damaged: {text}"))
        for text in found.unread:
            typer.echo(visible(f"not read: {text}"))
        typer.echo(f"{found.sound} sound, {size(found.sound_bytes)}; {len(found.damaged)} damaged")
    if found.damaged or found.unread:
        raise typer.Exit(1)
