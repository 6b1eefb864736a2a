"""``hostweights list``: what a store holds, who uses it, and what it takes."""

import time
from typing import TYPE_CHECKING

from hostweights.commands.refusals import AsJson, Debug, print_json
from hostweights.commands.store_output import SHORT_KEY, Root, opened, size

if TYPE_CHECKING:
    from rich.console import Console

    from hostweights.actors.upkeep import Entry, StoreState


def list_store(root: Root = None, as_json: AsJson = False, debug: Debug = False) -> None:
    """List all generations with size, state, last lease and the processes that map them.

    PSS is what those processes take of memory for it, a page that n of them share counting 1/n; "?" where the kernel
    does not tell this user. Changes no artifact. Exit code 0; 2 when there is no store or it cannot be read.

    Example: hostweights list --root /var/cache/hostweights
    """
    from rich.console import Console

    with opened(root, debug=debug) as upkeep:
        state = upkeep.state()
    if as_json:
        print_json(state)
    else:
        _show(Console(), state)


def _show(console: "Console", state: "StoreState") -> None:
    from rich.table import Table

    if state.entries:
        table = Table("key", "generation", "model", "component", box=None, pad_edge=False, header_style="bold")
        for name in ("size", "state", "last lease", "holders", "PSS"):
            table.add_column(name, justify="right" if name in {"size", "PSS"} else "left")
        for entry in state.entries:
            table.add_row(*_cells(entry))
        console.print(table, highlight=False, markup=False)
    access = ", read-only" if state.read_only else ""
    reserved = "" if state.reserved_bytes is None else f", {size(state.reserved_bytes)} reserved by builders"
    left = f", {size(state.left_bytes)} left by broken-off downloads" if state.left_bytes else ""
    console.print(
        f"{len(state.entries)} generations, {size(state.held_bytes)} ({size(state.condemned_bytes)} condemned)"
        f"{reserved}{left}; {size(state.free_bytes)} free on {state.filesystem}{access}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _cells(entry: "Entry") -> tuple[str, ...]:
    from rich.markup import escape

    from hostweights.messages.failure import visible

    known = [holder.pss_bytes for holder in entry.holders if holder.pss_bytes is not None]
    names = ", ".join(f"{holder.pid} {holder.name}".strip() for holder in entry.holders)
    return (
        entry.key[:SHORT_KEY],
        entry.generation,
        escape(visible(entry.model) or "?"),
        escape(visible(entry.component) or "?"),
        size(entry.size_bytes),
        state_of(entry),
        ago(time.time() - entry.last_lease_s),
        escape(names or ("?" if entry.leased else "")),
        size(sum(known)) if known else "?" if entry.leased else "",
    )


def state_of(entry: "Entry") -> str:
    """Whether workers can use it."""
    words = ["condemned" if entry.condemned is not None else "unreadable" if entry.problem else "ready"]
    if entry.pinned:
        words.append("pinned")
    if entry.leased:
        words.append("leased")
    return ", ".join(words)


def ago(seconds: float) -> str:
    """How long ago, for people."""
    for limit, unit, unit_s in ((120, "s", 1), (7_200, "min", 60), (172_800, "h", 3_600)):
        if seconds < limit:
            return f"{max(0, round(seconds / unit_s))} {unit} ago"
    return f"{round(seconds / 86_400)} d ago"
