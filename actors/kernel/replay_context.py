"""What a replayed handler sees: recorded inputs handed out, everything it does compared with the record."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn, TypeVar

import msgspec

from ...messages.base import Message
from ...messages.budget import Budget
from ...messages.failure import Code, Failure, HostWeightsError, Stage, error
from ...messages.journal import (
    NO_BODY,
    Answered,
    Asked,
    Cancelled,
    Critical,
    Drawn,
    Emitted,
    Ended,
    Finished,
    JournalRecord,
    Performed,
    Told,
    Watched,
)
from .errors import HandlerFailed, from_failure
from .handling import ask_in_critical, blocking_outside_effect

T = TypeVar("T")
"""Result of blocking work."""

Output = Asked | Critical | Drawn | Emitted | Finished | Performed | Told | Watched

_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that differs. ``position`` counts the journal's records from 0; the texts are JSON."""

    position: int
    recorded: str
    got: str


class Diverged(BaseException):
    """Ends a handler that does something else than it did; never seen outside a replay."""


class PerformCrashed(Exception):  # noqa: N818 - it names what happened
    """Stands for the exception, no HostWeightsError, that ``perform`` raised when it was recorded."""


class Script:
    """The records of one actor, by handler, and what of them has happened again."""

    def __init__(
        self,
        records: list[tuple[int, JournalRecord]],
        decoder: "msgspec.msgpack.Decoder[Message]",
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._decoder = decoder
        self._runs: dict[int, Run] = {}
        self._by_handling: defaultdict[int, list[tuple[int, JournalRecord]]] = defaultdict(list)
        self.loop = loop
        self.consumed: set[int] = set()
        """Positions of outputs that were made again and of cancels that were sent again."""
        self.difference: Difference | None = None
        self.abandoned = False
        """The replay is over and what still runs is being ended."""
        self._cancels = {position: record for position, record in records if isinstance(record, Cancelled)}
        for position, record in records:
            if isinstance(record, Output | Cancelled):
                self._by_handling[record.handling].append((position, record))

    @property
    def over(self) -> bool:
        """Whether a difference was found."""
        return self.difference is not None

    def decode(self, body: msgspec.Raw) -> Message:
        """A recorded message; journal_corrupt for one that is of no known kind."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError) as found:
            text = f"the journal holds a message that this version does not know: {found}"
            raise error(Stage.RUNTIME, Code.JOURNAL_CORRUPT, text) from found

    def same(self, recorded: msgspec.Raw, got: Message | None) -> bool:
        """Whether a message says what was recorded; a field that came later counts as its default."""
        if bytes(recorded) == _ENCODER.encode(got):
            return True
        try:
            return got is not None and self.decode(recorded) == got
        except HostWeightsError:
            return False

    def run(self, handling: int, deadline_s: float | None) -> "Run":
        """The run of a handler that begins now."""
        run = self._runs[handling] = Run(self, deadline_s, self._by_handling[handling])
        return run

    def crash(self, position: int) -> None:
        """A handler crashed at this record: the others are cancelled in the same step, before any of them goes on.

        The cancels stand right before it. What one of the others waits for may be free now, a lock that the crashed one
        held, but it never came to have it.
        """
        first = position
        while first - 1 in self._cancels:
            first -= 1
        for cancelled in range(first, position):
            run = self._runs.get(self._cancels[cancelled].handling)
            if run is not None and run.task is not None and run.comes_next(cancelled):
                self.consumed.add(cancelled)
                run.task.cancel()

    def answer(self, position: int, record: Answered) -> None:
        """End a handler's wait as it ended."""
        run = self._runs.get(record.handling)
        if run is None or not run.answer(record):
            self.differ(position, record, "no such wait: the handler does not wait for this")

    def differ(self, position: int, recorded: object, got: object) -> None:
        """Note the first difference and end the replay."""
        if self.difference is None and not self.abandoned:
            self.difference = Difference(position, as_json(recorded), as_json(got))
        self.loop.stop()


class Run:
    """One handler being replayed."""

    def __init__(self, script: Script, deadline_s: float | None, records: list[tuple[int, JournalRecord]]) -> None:
        self.script = script
        self.deadline_s = deadline_s
        self.context = ReplayContext(self)
        self.task: asyncio.Task[None] | None = None
        self._records = records
        self._next = 0
        self._waits: dict[int, asyncio.Future[Answered]] = {}
        self._answers: dict[int, Answered] = {}

    def output(self, kind: type[T], got: object) -> tuple[int, T]:
        """The recorded output that should be what the handler does now."""
        index = self._next
        while index < len(self._records) and isinstance(self._records[index][1], Cancelled):
            index += 1
        if index == len(self._records):
            self._cut_off(got)
        position, record = self._records[index]
        if not isinstance(record, kind):
            self.diverge(position, record, got)
        self._next = index + 1
        self.script.consumed.add(position)
        return position, record

    def comes_next(self, position: int) -> bool:
        """Whether the record there is the handler's next one, and nobody has seen to it."""
        unseen = position not in self.script.consumed
        return unseen and self._next < len(self._records) and self._records[self._next][0] == position

    def withheld_cancel(self) -> bool:
        """Whether the record before the last output is a cancel not sent yet: one that a section withheld."""
        index = self._next - 2
        if index < 0 or not isinstance(self._records[index][1], Cancelled):
            return False
        position = self._records[index][0]
        if position in self.script.consumed:
            return False
        self.script.consumed.add(position)
        return True

    def check(self, position: int, recorded: msgspec.Raw, got: Message, record: object) -> None:
        """Compare a body."""
        if not self.script.same(recorded, got):
            self.diverge(position, record, got)

    def diverge(self, position: int, recorded: object, got: object) -> NoReturn:
        """End the replay and this handler."""
        self.script.differ(position, recorded, got)
        raise Diverged

    async def wait(self, sequence: int) -> Answered:
        """Wait for the recorded end of a wait; a cancel does not end it, as it did not then."""
        while sequence not in self._answers:
            if self.script.abandoned:
                raise Diverged
            gate = self._waits[sequence] = self.script.loop.create_future()
            try:
                await gate
            except asyncio.CancelledError:
                continue
        return self._answers[sequence]

    def answer(self, record: Answered) -> bool:
        """Open a wait; False when the handler is not in it."""
        gate = self._waits.get(record.sequence)
        if gate is None:
            return False
        self._answers[record.sequence] = record
        if not gate.done():
            gate.set_result(record)
        return True

    def finished(self, reply: Message | None, raised: Exception | None, *, cancelled: bool = False) -> None:
        """The handler ended: compare how."""
        if self.script.abandoned:
            return
        got = _ending(reply, raised, cancelled=cancelled)
        try:
            position, record = self.output(Finished, got)
            if raised is not None and not isinstance(raised, HostWeightsError):
                self.script.crash(position)
            if not _same_ending(record, got, self.script.same):
                self.diverge(position, record, got)
        except Diverged:
            return

    def _cut_off(self, got: object) -> NoReturn:
        """Beyond the record: a difference, unless the journal ends before this handler did."""
        if self._records and isinstance(self._records[-1][1], Finished):
            self.diverge(*self._records[-1], got)
        raise Diverged


class ReplayContext:
    """Implements ``contract.Context`` from the record."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._sequence = 0
        self._critical_depth = 0

    def now(self) -> float:
        """The recorded reading."""
        return self._drawn_float("now")

    def new_id(self, prefix: str) -> str:
        """The recorded id."""
        position, record = self._run.output(Drawn, {"drawn": "new_id", "prefix": prefix})
        if not isinstance(record.value, str) or not record.value.startswith(f"{prefix}-"):
            self._run.diverge(position, record, {"drawn": "new_id", "prefix": prefix})
        return record.value

    def remaining_s(self) -> float | None:
        """The recorded reading; None for a message without a deadline."""
        return None if self._run.deadline_s is None else self._drawn_float("remaining_s")

    async def ask(self, recipient: str, message: Message, *, timeout_s: float | None = None) -> Message:  # noqa: ARG002 - time is not replayed
        """Compare the ask and give its recorded end."""
        if self._critical_depth:
            raise ask_in_critical(recipient)
        got = {"asked": recipient, "body": message}
        position, record = self._run.output(Asked, got)
        if record.recipient != recipient:
            self._run.diverge(position, record, got)
        self._run.check(position, record.body, message, record)
        return await self._answer(crashes=False)

    def tell(self, recipient: str, message: Message) -> None:
        """Compare the tell; refused if it was."""
        got = {"told": recipient, "body": message}
        position, record = self._run.output(Told, got)
        if record.recipient != recipient:
            self._run.diverge(position, record, got)
        self._run.check(position, record.body, message, record)
        if record.failure is not None:
            raise from_failure(record.failure)

    def watch(self, actor: str) -> None:
        """Compare the watch."""
        got = {"watched": actor}
        position, record = self._run.output(Watched, got)
        if record.recipient != actor:
            self._run.diverge(position, record, got)

    def emit(self, event: Message) -> None:
        """Compare the event."""
        position, record = self._run.output(Emitted, event)
        self._run.check(position, record.body, event, record)

    async def effect(self, effect: Message) -> Message:
        """Compare the effect and give its recorded outcome."""
        position, record = self._run.output(Performed, effect)
        self._run.check(position, record.body, effect, record)
        return await self._answer(crashes=True)

    async def blocking(self, call: Callable[[Budget], T], undo: Callable[[T], None] | None = None) -> T:  # noqa: ARG002 - the protocol's signature
        """Refused, as it was."""
        raise blocking_outside_effect()

    def critical(self, name: str) -> "ReplayCritical":
        """A section whose begin and end are compared."""
        return ReplayCritical(self, name)

    def enter(self, name: str, *, entered: bool) -> bool:
        """Compare a section's begin or end; whether a withheld cancel is due."""
        got = {"critical": name, "entered": entered}
        position, record = self._run.output(Critical, got)
        if record.name != name or record.entered is not entered:
            self._run.diverge(position, record, got)
        self._critical_depth += 1 if entered else -1
        if entered or self._critical_depth or not self._run.withheld_cancel():
            return False
        if self._run.task is not None:
            self._run.task.cancel()
        return True

    async def _answer(self, *, crashes: bool) -> Message:
        sequence = self._sequence
        self._sequence += 1
        answer = await self._run.wait(sequence)
        if answer.failure is not None:
            if crashes and answer.failure.code is Code.HANDLER_FAILED:
                raise PerformCrashed(answer.failure.text)
            raise from_failure(answer.failure)
        if answer.body == NO_BODY:
            raise asyncio.CancelledError
        return self._run.script.decode(answer.body)

    def _drawn_float(self, what: str) -> float:
        position, record = self._run.output(Drawn, {"drawn": what})
        if isinstance(record.value, str):
            self._run.diverge(position, record, {"drawn": what})
        return record.value


class ReplayCritical:
    """A critical section in a replay; a withheld cancel comes at its end, as it did."""

    def __init__(self, context: ReplayContext, name: str) -> None:
        self._context = context
        self._name = name

    async def __aenter__(self) -> None:
        self._context.enter(self._name, entered=True)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._context.enter(self._name, entered=False) and exc is None:
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class _Ending:
    ended: Ended
    body: Message | None
    failure: Failure | None


def _ending(reply: Message | None, raised: Exception | None, *, cancelled: bool) -> _Ending:
    if cancelled:
        return _Ending(Ended.WITHDRAWN, None, None)
    if raised is None:
        return _Ending(Ended.REPLIED, reply, None)
    failed = raised if isinstance(raised, HostWeightsError) else HandlerFailed.of("", "", raised)
    return _Ending(Ended.FAILED, None, failed.failure)


def _same_ending(record: Finished, got: _Ending, same: Callable[[msgspec.Raw, Message | None], bool]) -> bool:
    """Texts of crashes are not compared, and a stop is a withdrawal to the handler.

    A CancelledError that nobody sent was recorded as a crash; a missing reply as well.
    """
    if record.ended is Ended.FAILED and record.failure is not None and record.failure.code is Code.HANDLER_FAILED:
        missing_reply = got.ended is Ended.REPLIED and got.body is None
        crashed = got.failure is not None and got.failure.code is Code.HANDLER_FAILED
        return crashed or missing_reply or got.ended is Ended.WITHDRAWN
    if record.ended in (Ended.WITHDRAWN, Ended.STOPPED):
        return got.ended is Ended.WITHDRAWN
    return record.ended is got.ended and record.failure == got.failure and same(record.body, got.body)


def as_json(value: object) -> str:
    """Any part of a journal, or of what a handler did, for a person."""
    if isinstance(value, msgspec.Struct) and value.__struct_config__.array_like:
        named = {name: getattr(value, name) for name in value.__struct_fields__}
        value = {"type": value.__struct_config__.tag, **named}
    data: object = msgspec.msgpack.decode(_ENCODER.encode(value))
    return msgspec.json.encode(data).decode()
