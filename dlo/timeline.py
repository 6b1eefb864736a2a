"""When each block was copied, computed and waited for, by the device's own clock."""

from collections.abc import Sequence
from dataclasses import dataclass

from .contract import Device, Event

_LANES = ("copy", "stall", "compute")


@dataclass(frozen=True, slots=True)
class Interval:
    """``kind`` is copy, stall (compute waited for the block) or compute; seconds count from the timeline's start."""

    kind: str
    block: int
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """What one block took over the whole timeline, in seconds."""

    block: int
    path: str
    uses: int
    copies: int
    copy_s: float
    compute_s: float
    stall_s: float


class Timeline:
    """Events of one recording. The driver's lock guards the writing; read it after ``finish``."""

    def __init__(self, device: Device, paths: Sequence[str]) -> None:
        self._device = device
        self._paths = tuple(paths)
        self._origin = device.compute_record()
        self._marks: list[tuple[str, int, Event, Event]] = []
        self._intervals: tuple[Interval, ...] = ()

    def add(self, kind: str, block: int, begin: Event, end: Event) -> None:
        """An interval between two events, which may not have passed yet."""
        self._marks.append((kind, block, begin, end))

    def passed(self) -> bool:
        """Whether ``finish`` would not wait."""
        return self._origin.done() and all(begin.done() and end.done() for _, _, begin, end in self._marks)

    def finish(self) -> None:
        """Wait for every event and turn them into seconds. Intervals of failed copies are left out.

        The origin is waited for as well: it may lie on another stream than what was recorded.
        """
        made: list[Interval] = []
        for kind, block, begin, end in self._marks:
            try:
                for event in (self._origin, begin, end):
                    event.synchronize()
            except Exception:  # noqa: BLE001, S112 - whoever needed the copy was told
                continue
            begin_s = self._device.elapsed_s(self._origin, begin)
            made.append(Interval(kind, block, begin_s, begin_s + self._device.elapsed_s(begin, end)))
        self._marks = []
        self._intervals = tuple(sorted(made, key=lambda each: (each.begin_s, each.block)))

    @property
    def intervals(self) -> Sequence[Interval]:
        """All of them, by their begin."""
        return self._intervals

    def table(self) -> tuple[BlockTimes, ...]:
        """The stall table: one row for each block."""
        return tuple(self._row(block, path) for block, path in enumerate(self._paths))

    def chrome_trace(self) -> dict[str, object]:
        """For chrome://tracing and Perfetto: one row for copies, one for stalls, one for compute; times in us."""
        names: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": lane, "args": {"name": kind}}
            for lane, kind in enumerate(_LANES)
        ]
        spans: list[dict[str, object]] = [
            {
                "ph": "X",
                "name": self._paths[each.block],
                "cat": each.kind,
                "pid": 0,
                "tid": _LANES.index(each.kind),
                "ts": each.begin_s * 1e6,
                "dur": (each.end_s - each.begin_s) * 1e6,
            }
            for each in self._intervals
        ]
        return {"traceEvents": names + spans, "displayTimeUnit": "ms"}

    def _row(self, block: int, path: str) -> BlockTimes:
        spent = {
            kind: [e.end_s - e.begin_s for e in self._intervals if (e.kind, e.block) == (kind, block)]
            for kind in _LANES
        }
        return BlockTimes(
            block=block,
            path=path,
            uses=len(spent["compute"]),
            copies=len(spent["copy"]),
            copy_s=sum(spent["copy"]),
            compute_s=sum(spent["compute"]),
            stall_s=sum(spent["stall"]),
        )
