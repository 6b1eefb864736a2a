"""``hostweights show``: what one key names and holds, or why two keys differ."""

from typing import TYPE_CHECKING, Annotated

import typer

from hostweights.commands.refusals import AsJson, Debug, print_json
from hostweights.commands.store_list import state_of
from hostweights.commands.store_output import Root, opened, size

if TYPE_CHECKING:
    from hostweights.actors.upkeep import Contents, DifferingField, PackedContents


def show(
    keys: Annotated[list[str], typer.Argument(help="A key, or the digits that only it begins with; two with --why.")],
    root: Root = None,
    why: Annotated[bool, typer.Option("--why", help="Name every field that made two keys differ.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the identity that a key stands for and what its generations hold; writes nothing.

    Exit code 0; 2 when there is no such key, or several begin so.

    Example: hostweights show --why 3f2a 9c41 --root /var/cache/hostweights
    """
    if len(keys) != (2 if why else 1):
        raise typer.BadParameter("--why compares two keys" if why else "show one key, or two with --why")
    with opened(root, debug=debug) as upkeep:
        if why:
            differing = upkeep.why(*keys)
            print_json(differing) if as_json else _show_why(differing)
        else:
            contents = upkeep.contents(*keys)
            print_json(contents) if as_json else _show_contents(contents)


def _show_why(differing: "tuple[DifferingField, ...]") -> None:
    for field in differing:
        typer.echo(f"{field.path}: {field.left} != {field.right}")
    if not differing:
        typer.echo("the keys are equal")


def _show_contents(found: "tuple[Contents, ...]") -> None:
    import msgspec

    from hostweights.messages.failure import visible

    newest = found[0]
    typer.echo(f"key {newest.entry.key}")
    for part, value in msgspec.to_builtins(newest.identity).items():
        shown = ", ".join(f"{name} {text}" for name, text in value.items()) if isinstance(value, dict) else value
        typer.echo(visible(f"  {part}: {shown}"))
    for each in found:
        entry = each.entry
        typer.echo(visible(f"generation {entry.generation}: {state_of(entry)}, publication {each.publication_id}"))
        typer.echo(visible(f"  {entry.directory}"))
        typer.echo(
            f"  {size(entry.size_bytes)} in {each.files} files, {each.tensors} tensors, {each.aliases} aliases, "
            f"{each.blocks} blocks, content {each.content}"
        )
        if each.packed is not None:
            typer.echo(visible(f"  {_packed(each.packed)}"))
        if entry.condemned is not None:
            typer.echo(visible(f"  condemned: {entry.condemned}"))
        for holder in entry.holders:
            pss = "unknown PSS" if holder.pss_bytes is None else f"PSS {size(holder.pss_bytes)}"
            typer.echo(f"  mapped by process {holder.pid} {holder.name}: {pss}")


def _packed(found: "PackedContents") -> str:
    """How the packed tensors are stored, in one line."""
    widths = ", ".join(f"{count} with {width}-bit codes" for width, count in found.widths.items())
    return (
        f"packed by {found.codec} {found.codec_version}: {found.tensors} tensors ({widths}), {size(found.plain_bytes)} "
        f"in {size(found.packed_bytes)} ({found.plain_bytes / found.packed_bytes:.3f} to 1), "
        f"{100 * found.escapes / found.elements:.3f} % of the elements escape"
    )
