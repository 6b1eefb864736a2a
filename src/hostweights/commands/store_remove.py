"""``hostweights gc`` and ``hostweights rm``: taking artifacts away, never under a lease."""

from typing import Annotated

import typer

from hostweights.commands.refusals import AsJson, Debug, print_json
from hostweights.commands.store_output import SHORT_KEY, Root, Yes, confirmed, opened, size, size_bytes


def gc(
    root: Root = None,
    max_size: Annotated[
        str | None, typer.Option(help="Also delete by last lease until the store takes no more (10G, 512M).")
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Delete the condemned generations, and with --max-size those whose last lease is longest ago.

    What broken-off downloads left goes too. What is leased stays, and so does what is pinned and not condemned.
    Exit code 0 when done; 1 when not confirmed; 2 on bad input or a failure.

    Example: hostweights gc --max-size 200G --yes --root /var/cache/hostweights
    """
    limit = None if max_size is None else size_bytes(max_size)
    with opened(root, debug=debug) as upkeep:
        state = upkeep.state()
        left_bytes = state.left_bytes or 0
        excess = 0 if limit is None else max(0, state.held_bytes + left_bytes - limit)
        if not yes and not state.condemned_bytes and not excess and not left_bytes:
            freed = 0
        else:
            by_use = f", and others by last lease until {size(limit)} are left" if limit is not None else ""
            left = f", what downloads left ({size(left_bytes)})" if left_bytes else ""
            confirmed(f"Delete condemned generations ({size(state.condemned_bytes)}){left}{by_use}?", yes=yes)
            freed = upkeep.collect(limit)
    if as_json:
        print_json({"freed_bytes": freed})
    else:
        typer.echo(f"freed {size(freed)}")


def rm(
    key: Annotated[str, typer.Argument(help="A key, or the digits that only it begins with.")],
    root: Root = None,
    generation: Annotated[str | None, typer.Option(help="Only this generation, such as 00000002.")] = None,
    yes: Yes = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Delete the generations of a key, condemned or not, pinned or not.

    Refused while any process leases one; those before it are gone then. Exit code 0 when done; 1 when not confirmed; 2
    on bad input or a refusal.

    Example: hostweights rm 3f2a --yes --root /var/cache/hostweights
    """
    from hostweights.messages.failure import Code, Stage, error

    with opened(root, debug=debug) as upkeep:
        found = upkeep.of_key(key)
        chosen = [each for each in found if generation in {None, each.generation}]
        if not chosen:
            there = ", ".join(each.generation for each in found)
            text = f"the key {found[0].key[:SHORT_KEY]} has no generation {generation}; it has {there}"
            raise error(Stage.LOOKUP, Code.ARTIFACT_MISSING, text)
        full_key, total = chosen[0].key, sum(each.size_bytes for each in chosen)
        numbers = ", ".join(each.generation for each in chosen)
        confirmed(f"Delete {full_key[:SHORT_KEY]} ({numbers}), {size(total)}?", yes=yes)
        freed = sum(upkeep.remove(each) for each in chosen)
    if as_json:
        print_json({"key": full_key, "generations": [each.generation for each in chosen], "freed_bytes": freed})
    else:
        typer.echo(f"removed {full_key[:SHORT_KEY]} ({numbers}), freed {size(freed)}")
