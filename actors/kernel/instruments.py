"""What a system counts and traces when it is asked to: per message type, times in powers of two, W3C trace contexts.

Off, it costs one look at an attribute per message. A trace is handed on inside the process by a context variable: a
handler's asks and tells are children of the message it handles.
"""

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from ...messages.base import ActorName, Count, Name, Record, Seconds
from ...messages.envelope import TraceParent
from ...messages.failure import Code, Stage, error
from ...messages.journal import Ended
from .delivery import Delivery

NUM_BUCKETS = 32
"""Bucket n of a histogram counts times below 2**n microseconds, and not below half of that; the last takes the rest."""

_current: ContextVar[str | None] = ContextVar("hostweights_traceparent", default=None)


class Span(Record, frozen=True, kw_only=True):
    """One handled message. Times are of the loop's clock; ``parent`` is None for the root of a trace."""

    actor: ActorName
    message: Name
    trace: TraceParent
    parent: TraceParent | None
    accepted_s: float
    started_s: float
    ended_s: float
    ended: Ended


class MessageStats(Record, frozen=True, kw_only=True):
    """One message type of one actor since its start; buckets as ``NUM_BUCKETS`` says."""

    actor: ActorName
    message: Name
    ended: dict[Ended, Count]
    waited: tuple[Count, ...]
    """Between acceptance and the handler's start."""
    handled: tuple[Count, ...]
    """Between the handler's start and its end."""

    def handled_below_s(self, share: float) -> Seconds:
        """A time that at least this share of the handlers stayed below; exact to a factor of two."""
        return below_s(self.handled, share)

    def waited_below_s(self, share: float) -> Seconds:
        """A time that at least this share of the messages waited less than; exact to a factor of two."""
        return below_s(self.waited, share)


class _Meter(msgspec.Struct):
    ended: dict[Ended, int]
    waited: list[int]
    handled: list[int]


class Instruments:
    """Counts and traces one system: ``ActorSystem(instruments=Instruments())``; counts stand in ``stats``.

    ``on_span``, if given, is called on the loop with each handled message, and has to be quick. One that raises is not
    called again, and its error is raised to nobody but kept in ``failure``.
    """

    def __init__(self, on_span: Callable[[Span], None] | None = None) -> None:
        self._on_span = on_span
        self._meters: dict[tuple[str, str], _Meter] = {}
        self.failure: BaseException | None = None

    def accepted(self, delivery: Delivery) -> None:
        """A message enters a mailbox: give it its place in a trace."""
        if self._on_span is not None:
            delivery.parent = parent = _current.get()
            trace_id = secrets.token_hex(16) if parent is None else parent.split("-")[1]
            delivery.trace = f"00-{trace_id}-{secrets.token_hex(8)}-01"

    def began(self, delivery: Delivery) -> None:
        """Its handler begins: what that sends belongs to it."""
        if self._on_span is not None:
            _current.set(delivery.trace)

    def over(self, delivery: Delivery, started_s: float, ended_s: float, ended: Ended) -> None:
        """Its handler has ended."""
        key = delivery.cell.name, delivery.name
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = _Meter({}, [0] * NUM_BUCKETS, [0] * NUM_BUCKETS)
        meter.ended[ended] = meter.ended.get(ended, 0) + 1
        meter.waited[_bucket(started_s - delivery.enqueued_s)] += 1
        meter.handled[_bucket(ended_s - started_s)] += 1
        if self._on_span is not None and delivery.trace is not None:
            self._report(self._on_span, delivery, delivery.trace, started_s, ended_s, ended)

    def snapshot(self) -> tuple[MessageStats, ...]:
        """What was counted, in the order in which the types were first seen."""
        return tuple(
            MessageStats(
                actor=actor,
                message=message,
                ended=dict(meter.ended),
                waited=tuple(meter.waited),
                handled=tuple(meter.handled),
            )
            for (actor, message), meter in self._meters.items()
        )

    def _report(
        self,
        on_span: Callable[[Span], None],
        delivery: Delivery,
        trace: str,
        started_s: float,
        ended_s: float,
        ended: Ended,
    ) -> None:
        span = Span(
            actor=delivery.cell.name,
            message=delivery.name,
            trace=trace,
            parent=delivery.parent,
            accepted_s=delivery.enqueued_s,
            started_s=started_s,
            ended_s=ended_s,
            ended=ended,
        )
        try:
            on_span(span)
        except KeyboardInterrupt:  # Ctrl-C, which comes anywhere in the main thread
            raise
        except BaseException as raised:  # noqa: BLE001 - the user's code, whatever it raises; the work goes on
            self.failure, self._on_span = raised, None


@contextmanager
def traced(parent: str) -> Iterator[None]:
    """What is asked and told inside the block belongs to this ``traceparent``, as a server's request brought it.

    Raises ``invalid_config`` for what is none.
    """
    try:
        msgspec.convert(parent, TraceParent)
    except msgspec.ValidationError as found:
        text = f"{parent!r} is no W3C traceparent (00-<32 hex>-<16 hex>-<2 hex>): {found}"
        raise error(Stage.RUNTIME, Code.INVALID_CONFIG, text) from found
    token = _current.set(parent)
    try:
        yield
    finally:
        _current.reset(token)


def below_s(buckets: tuple[int, ...], share: float) -> float:
    """The upper end, in seconds, of the bucket in which this share of all is reached; 0.0 without any."""
    wanted, seen = share * sum(buckets), 0
    for number, count in enumerate(buckets):
        seen += count
        if count and seen >= wanted:
            return float(2**number) * 1e-6
    return 0.0


def _bucket(seconds: float) -> int:
    return min(int(seconds * 1e6).bit_length() if seconds > 0.0 else 0, NUM_BUCKETS - 1)
