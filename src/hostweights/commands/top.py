"""``hostweights top``: a live view of the processes of this user that have an endpoint."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hostweights.commands.refusals import AsJson, Debug, print_json, refusing, root_path

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hostweights.observe.endpoint import Unreachable
    from hostweights.observe.rates import Row
    from hostweights.observe.snapshot import Snapshot

_MIB = 1 << 20


def top(
    root: Annotated[Path | None, typer.Option(help="Show the processes of this store only.", parser=root_path)] = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, max=3600.0, help="Seconds between looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, an interval apart, print one table and end.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show running processes: leases, shared and private memory, forwards, copies, stalls, queues.

    A process is seen when it has opened an ``Endpoint`` (docs/observing.md) and runs as this user. The live view ends
    with Ctrl-C. Where output is not a terminal, and with --json,
    it looks twice, an interval apart, and prints that. Exit code 0, also when no process is there; 2 when the
    runtime directory is not this user's own.

    Example: hostweights top --once
    """
    import asyncio
    import sys

    only = None if root is None else str(root.absolute())
    with refusing(debug=debug):
        if as_json or once or not sys.stdout.isatty():
            asyncio.run(_once(only, interval_s, as_json=as_json))
        else:
            with suppress(KeyboardInterrupt):  # how one leaves it
                asyncio.run(_live(only, interval_s))


async def _once(root: str | None, interval_s: float, *, as_json: bool) -> None:
    import asyncio

    from rich.console import Console

    from hostweights.observe.endpoint import ask_all
    from hostweights.observe.rates import rows

    before, _ = await ask_all(root=root)
    if before:
        await asyncio.sleep(interval_s)
    now, failed = await ask_all(root=root)
    shown = rows(now, before)
    if as_json:
        print_json({"processes": shown, "unreachable": failed})
    else:
        console = Console(emoji=False)
        console.print(view(shown, failed, console.width))


async def _live(root: str | None, interval_s: float) -> None:
    import asyncio

    from rich.live import Live

    from hostweights.observe.endpoint import ask_all
    from hostweights.observe.rates import rows

    before: Sequence[Snapshot] = ()
    with Live(screen=True, auto_refresh=False) as live:
        while True:
            now, failed = await ask_all(root=root)
            live.update(view(rows(now, before), failed, live.console.width), refresh=True)
            before = now
            await asyncio.sleep(interval_s)


def view(rows: "Sequence[Row]", failed: "Sequence[Unreachable]", width: int = 200) -> "RenderableType":
    """The table; names come from other processes, so control characters in them are shown as dots."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    if not rows and not failed:
        return Text("no process of this user has an endpoint; docs/observing.md says how a process opens one")
    columns = [column for column in _COLUMNS if width >= _WIDE or column.always]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column.name, justify=column.justify, no_wrap=True)
    for row in rows:
        table.add_row(*(Text(column.cell(row)) for column in columns))
    roots = {row.root for row in rows}
    lines = [Text(f"{_clean(root)}: {_holding(rows, root)}") for root in sorted(roots)]
    lines += [Text(f"{_clean(each.path)}: {_clean(each.reason)}", style="yellow") for each in failed]
    return Group(table, *lines)


@dataclass(frozen=True, slots=True)
class _Column:
    """One column; not ``always``: left out where the terminal is narrow."""

    name: str
    cell: "Callable[[Row], str]"
    always: bool = True
    justify: Literal["left", "right"] = "right"


_COLUMNS = (
    _Column("process", lambda row: _clean(row.process), justify="left"),
    _Column("pid", lambda row: str(row.pid)),
    _Column("up", lambda row: _duration(row.up_s), always=False),
    _Column("leases", lambda row: str(row.leases), always=False),
    _Column("shared MiB", lambda row: f"{row.shared_bytes / _MIB:.0f}"),
    _Column("private MiB", lambda row: f"{row.private_bytes / _MIB:.0f}"),
    _Column("fwd/s", lambda row: _number(row.forwards_per_s, "{:.1f}")),
    _Column("copied GB/s", lambda row: _number(row.copied_bytes_per_s, "{:.2f}", 1e-9), always=False),
    _Column("stalls/s", lambda row: _number(row.stalls_per_s, "{:.1f}"), always=False),
    _Column("stalled", lambda row: _number(row.stalled_share, "{:.0%}")),
    _Column("queued", lambda row: str(row.queued), always=False),
    _Column("loads", lambda row: f"{row.loads}" + (f" ({row.failed_loads} failed)" if row.failed_loads else "")),
    _Column("state", lambda row: _state(row), justify="left"),
)
_WIDE = 130


def _holding(rows: "Sequence[Row]", root: str) -> str:
    of_root = [row for row in rows if row.root == root]
    held = max(row.leased_bytes for row in of_root)
    words = "process" if len(of_root) == 1 else "processes"
    return f"{len(of_root)} {words}, at most {held / _MIB:.0f} MiB leased by one, mapped once for all"


def _state(row: "Row") -> str:
    if row.publishing is not None:
        return f"publishing {row.publishing:.0%}"
    return "streaming" if row.streaming else "mapped" if row.leases else "private"


def _number(value: float | None, form: str, factor: float = 1.0) -> str:
    return "-" if value is None else form.format(value * factor)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def _clean(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{MIDDLE DOT}" for letter in text)[:200]
