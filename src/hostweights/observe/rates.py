"""What two snapshots of one process say about the time between them. Pure."""

from collections.abc import Callable, Sequence

from hostweights.messages.base import Count, Name, Path, Record, Seconds
from hostweights.messages.report import Outcome
from hostweights.messages.transport import RingStats
from hostweights.observe.snapshot import Snapshot


class Row(Record, frozen=True, kw_only=True):
    """One process as a viewer shows it; rates are None before there are two snapshots of it, and
    while nothing streams."""

    process: Name
    pid: Count
    root: Path
    up_s: Seconds
    leases: Count
    leased_bytes: Count
    shared_bytes: Count
    private_bytes: Count
    streaming: Count
    queued: Count
    loads: Count
    failed_loads: Count
    restarts: Count
    publishing: float | None
    """The share that is written of what is being published."""
    forwards_per_s: float | None
    copied_bytes_per_s: float | None
    stalls_per_s: float | None
    stalled_share: float | None
    """Of the time, how much compute waited for blocks."""


def rows(now: Sequence[Snapshot], before: Sequence[Snapshot] = ()) -> list[Row]:
    """A row for each process of ``now``, with rates against its earlier snapshot in ``before``."""
    earlier = {_process(each): each for each in before}
    return [_row(each, earlier.get(_process(each))) for each in now]


def _process(snapshot: Snapshot) -> tuple[int, str, float]:
    return snapshot.pid, snapshot.name, snapshot.started_unix_s


def _row(now: Snapshot, before: Snapshot | None) -> Row:
    runtime = now.stats.runtime
    return Row(
        process=now.name,
        pid=now.pid,
        root=now.root,
        up_s=max(0.0, now.taken_unix_s - now.started_unix_s),
        leases=len(now.stats.leases),
        leased_bytes=now.leased_bytes,
        shared_bytes=now.shared_bytes,
        private_bytes=now.memory.process.private_bytes,
        streaming=len(now.stats.attachments),
        queued=sum(actor.mailbox_length for actor in runtime.actors),
        loads=sum(now.resolutions.values()),
        failed_loads=now.resolutions.get(Outcome.FAILED, 0),
        restarts=sum(actor.restarts for actor in runtime.actors),
        publishing=_written(now),
        forwards_per_s=_rate(now, before, lambda ring: ring.forwards),
        copied_bytes_per_s=_rate(now, before, lambda ring: ring.copied_bytes),
        stalls_per_s=_rate(now, before, lambda ring: ring.stalls),
        stalled_share=_rate(now, before, lambda ring: ring.stall_s),
    )


def _written(snapshot: Snapshot) -> float | None:
    total = sum(build.total_bytes for build in snapshot.builds)
    return sum(build.written_bytes for build in snapshot.builds) / total if total else None


def _rate(now: Snapshot, before: Snapshot | None, value: Callable[[RingStats], float]) -> float | None:
    """Per second, over the attachments that both know; a ring that was not there before begins at nothing."""
    if before is None or now.taken_s <= before.taken_s:
        return None
    if not now.stats.attachments and not before.stats.attachments:
        return None  # nothing streams: its forwards are not counted
    earlier = {each.info.attachment_id: value(each.ring) for each in before.stats.attachments}
    grown = sum(value(each.ring) - earlier.get(each.info.attachment_id, 0.0) for each in now.stats.attachments)
    return grown / (now.taken_s - before.taken_s)
