"""Progress of long work by bytes: bars with rate and time left, or plain lines where standard error is no terminal."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from hostweights.commands.store_output import size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_QUARTERS: Final = 4


@dataclass(slots=True)
class _Step:
    began_s: float
    began_bytes: int
    """What was done when it was first shown: nobody knows how long that took."""
    task: "TaskID | None"
    shown: int = field(default=0)
    """Quarters that a plain line told of."""


class Work:
    """``with Work(console) as work: work.show("read", done, total)``; each name has a bar, or lines, of its own."""

    def __init__(self, console: "Console", clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._steps: dict[str, _Step] = {}
        self._bars = _bars(console) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, name: str, done: int, total: int) -> None:
        """So many bytes are done, of so many."""
        step = self._steps.get(name)
        if step is None:
            task = None if self._bars is None else self._bars.add_task(name, total=None)
            step = self._steps[name] = _Step(self._clock(), done, task)
        if self._bars is not None and step.task is not None:
            self._bars.update(step.task, completed=done, total=total)
            return
        quarters = _QUARTERS if done >= total else _QUARTERS * done // total
        if quarters > step.shown:
            step.shown = quarters
            told = _plain(name, done, total, done - step.began_bytes, self._clock() - step.began_s)
            self._console.print(told, highlight=False, markup=False)


def _plain(name: str, done: int, total: int, since_bytes: int, spent_s: float) -> str:
    share = f"{name}: {100 if done >= total else 100 * done // total}% of {size(total)}"
    if spent_s <= 0 or since_bytes <= 0:
        return share
    left = "" if done >= total else f", {(total - done) * spent_s / since_bytes:.0f} s left"
    return f"{share}, {size(int(since_bytes / spent_s))}/s{left}"


def _bars(console: "Console") -> "Progress":
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
