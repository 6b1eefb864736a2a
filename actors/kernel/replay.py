"""Run an actor again from a journal and find the first thing it does differently.

The same actor code runs under a context that takes its inputs from the journal, in recorded order: a message starts its
handler, an answer ends its wait, a cancel is sent where it was sent, clock readings and ids are handed out again.
Effects are not performed and nothing is sent. Everything the actor does is compared with what it did.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from itertools import dropwhile
from pathlib import Path
from types import UnionType
from typing import Any, cast

import msgspec

from ...messages.base import Message
from ...messages.failure import Code, Stage, error
from ...messages.journal import (
    Answered,
    Cancelled,
    DeadLetter,
    Dequeued,
    Ended,
    Finished,
    JournalHeader,
    JournalRecord,
    Started,
    Stopped,
    Stopping,
)
from .contract import Actor
from .journal_file import JournalReader
from .replay_context import Difference, Diverged, ReplayContext, Run, Script
from .replay_loop import ReplayLoop

Create = Callable[[msgspec.Raw], Actor]
Body = Callable[[Actor, ReplayContext], Coroutine[Any, Any, Message | None]]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """How far a replay came. ``difference`` is None when the actor did what it had done."""

    actor: str
    num_records: int
    """Records of the actor that were replayed, the one that differs included."""
    num_handlers: int
    torn_bytes: int
    """Bytes of an incomplete last record; 0 for a journal that was closed."""
    difference: Difference | None


def replay(journal: Path, actor_name: str, create: Create, union: type[Message] | UnionType) -> ReplayResult:
    """Replay one actor of a journal and stop at the first difference.

    ``create`` builds an incarnation from its recorded settings (msgpack; nil without); ``union`` is the type that
    decodes the actor's messages, effects and outcomes. A journal whose oldest records are gone, with the parts that
    were removed or from a ring, is replayed from the actor's first start that is left. Blocking, without clock and
    threads; call it where no event loop runs. Raises ``journal_corrupt`` for a file that is no journal,
    ``invalid_config`` for an actor it does not name, or not since its start.
    """
    with JournalReader(journal) as reader:
        records: list[tuple[int, JournalRecord]] = [
            (position, record)
            for position, record in enumerate(reader)
            if not isinstance(record, JournalHeader | DeadLetter) and record.actor == actor_name
        ]
        if reader.first_part:  # what began before the oldest record that is left cannot be replayed
            records = list(dropwhile(lambda each: not isinstance(each[1], Started), records))
    if not records:
        text = f"journal {journal} holds no record of actor {actor_name!r}, or none since its start"
        raise error(Stage.RUNTIME, Code.INVALID_CONFIG, text)
    decoder = cast("msgspec.msgpack.Decoder[Message]", msgspec.msgpack.Decoder(union))
    player = _Player(records, create, decoder)
    player.play()
    return ReplayResult(
        actor=actor_name,
        num_records=player.num_played,
        num_handlers=player.num_handlers,
        torn_bytes=reader.torn_bytes,
        difference=player.script.difference,
    )


class _Player:
    """Feeds the records of one actor, each when the actor has come to rest after the one before."""

    def __init__(
        self, records: list[tuple[int, JournalRecord]], create: Create, decoder: "msgspec.msgpack.Decoder[Message]"
    ) -> None:
        self._records = records
        self._create = create
        self._loop = ReplayLoop(self._idle)
        self.script = Script(records, decoder, self._loop)
        self.num_played = 0
        self.num_handlers = 0
        self._actor: Actor | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def play(self) -> None:
        """Replay until the end or the first difference, and leave nothing running."""
        try:
            self._loop.run_forever()
            self.script.abandoned = True
            for task in self._tasks.values():
                task.cancel()
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _idle(self, timeout_s: float | None) -> None:
        """Everything waits: feed the next input, or see that the outputs up to it were made."""
        while not self.script.abandoned and not self.script.over and self.num_played < len(self._records):
            position, record = self._records[self.num_played]
            if not self._passed(position, record):
                if self._stopped_by_foreign_cancel(record):
                    return
                if timeout_s is not None:
                    self._loop.advance(timeout_s)
                    return
                self.script.differ(position, record, "nothing: the handler waits or has ended")
                break
            self.num_played += 1
            if self._feed(position, record):
                return
        self._loop.stop()

    def _passed(self, position: int, record: JournalRecord) -> bool:
        """Whether an output was made; inputs are always due."""
        return isinstance(record, Started | Dequeued | Answered | Cancelled | Stopping | Stopped) or (
            position in self.script.consumed
        )

    def _stopped_by_foreign_cancel(self, record: JournalRecord) -> bool:
        """Send the cancel that the runtime did not send, and so did not record, when the handler's end shows it."""
        if not isinstance(record, Finished) or record.ended is not Ended.STOPPED:
            return False
        task = self._tasks.get(record.handling)
        if task is None or task.cancelling():
            return False
        task.cancel()
        return True

    def _feed(self, position: int, record: JournalRecord) -> bool:
        """Give the actor an input; whether there was something to give."""
        match record:
            case Started():
                self._begin(position, record)
            case Dequeued(envelope=envelope):
                body = partial(self._receive, self.script.decode(envelope.body))
                self._handle(envelope.id, envelope.deadline_s, position, record, body)
            case Stopping(handling=handling):
                self._handle(handling, None, position, record, self._stopped)
            case Answered():
                self.script.answer(position, record)
            case Cancelled(handling=handling):
                if position in self.script.consumed:
                    return False
                self.script.consumed.add(position)
                task = self._tasks.get(handling)
                if task is None:
                    self.script.differ(position, record, "nothing runs under that number: it never began")
                    return True
                task.cancel()
            case _:
                return False
        return True

    def _begin(self, position: int, record: Started) -> None:
        try:
            self._actor = self._create(record.settings)
        except Exception as crash:  # noqa: BLE001 - an incarnation that could not be built is part of the record
            self._actor = None
            following = self._records[self.num_played : self.num_played + 1]
            if not (following and isinstance(following[0][1], Stopped)):
                self.script.differ(position, record, f"create raised {type(crash).__name__}: {crash}")
            return
        self._handle(record.handling, None, position, record, self._started)

    def _handle(
        self, handling: int, deadline_s: float | None, position: int, record: JournalRecord, body: Body
    ) -> None:
        """Start a handler or hook as a task."""
        if self._actor is None:
            self.script.differ(position, record, "no incarnation runs: the record of its start is missing")
            return
        self.num_handlers += 1
        run = self.script.run(handling, deadline_s)
        run.task = self._tasks[handling] = self._loop.create_task(self._to_its_end(self._actor, run, body))

    async def _to_its_end(self, actor: Actor, run: Run, body: Body) -> None:
        try:
            reply = await body(actor, run.context)
        except asyncio.CancelledError:
            run.finished(None, None, cancelled=True)
        except Diverged:
            return
        except Exception as raised:  # noqa: BLE001 - compared with what was raised then
            run.finished(None, raised)
        else:
            run.finished(reply, None)

    async def _receive(self, message: Message, actor: Actor, context: ReplayContext) -> Message | None:
        return await actor.receive(message, context)

    async def _started(self, actor: Actor, context: ReplayContext) -> None:
        await actor.started(context)

    async def _stopped(self, actor: Actor, context: ReplayContext) -> None:
        await actor.stopped(context)
