"""Counts, times and traces: what was asked for, nothing when it was not."""

import asyncio
from pathlib import Path

import pytest

import loop_guard
from hostweights.actors.kernel import (
    ActorSpec,
    ActorSystem,
    Context,
    DeadlineExceeded,
    Instruments,
    Span,
    traced,
)
from hostweights.actors.kernel.instruments import below_s
from hostweights.actors.kernel.journal_file import JournalReader
from hostweights.actors.kernel.testing import run_virtual
from hostweights.messages.base import Message
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from hostweights.messages.journal import Dequeued, Ended

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    what: str = ""


class Worker:
    """Sleeps, refuses, or asks the next one."""

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        if message.what == "refuse":
            raise error(Stage.RUNTIME, Code.UNSUPPORTED, "no")
        if message.what == "next":
            context.tell("b", Do(what="told"))
            return await context.ask("b", Do(what="asked"))
        if message.what:
            await asyncio.sleep(0.1)
        return message

    async def perform(self, effect: Message, context: Context) -> Message:  # noqa: ARG002 - the signature of the protocol
        return effect

    async def stopped(self, context: Context) -> None: ...


def spec(name: str) -> ActorSpec:
    return ActorSpec(name=name, create=Worker, accepts=(Do,))


def test_each_type_is_counted_by_its_end_and_its_times() -> None:
    async def scenario() -> None:
        async with ActorSystem(instruments=Instruments()) as system:
            await system.start(spec("a"))
            for _ in range(9):
                await system.ask("a", Do())
            with pytest.raises(HostWeightsError):
                await system.ask("a", Do(what="refuse"))
            with pytest.raises(DeadlineExceeded):
                await system.ask("a", Do(what="slow"), timeout_s=0.06)
            await asyncio.gather(*(system.ask("a", Do(what="slow")) for _ in range(3)))
            (stats,) = system.stats().messages
        assert (stats.actor, stats.message) == ("a", "Do")
        assert stats.ended == {Ended.REPLIED: 12, Ended.FAILED: 1, Ended.WITHDRAWN: 1}
        assert sum(stats.waited) == sum(stats.handled) == 14
        assert 0.1 <= stats.handled_below_s(1.0) <= 0.2
        assert stats.handled_below_s(0.5) < 0.001
        assert 0.2 <= stats.waited_below_s(1.0) <= 0.4

    run_virtual(scenario)


def test_a_histogram_without_times_has_no_share() -> None:
    assert below_s((0, 0), 0.5) == 0.0


@pytest.mark.asyncio
async def test_a_trace_goes_from_the_request_through_every_message_it_caused(tmp_path: Path) -> None:
    spans: list[Span] = []
    path = tmp_path / "run.journal"
    async with ActorSystem(path, instruments=Instruments(spans.append)) as system:
        for name in ("a", "b"):
            await system.start(spec(name))
        with traced(PARENT):
            await system.ask("a", Do(what="next"))
        await system.ask("a", Do())
    told, asked, outer, untraced = spans
    assert outer.parent == PARENT
    assert told.parent == asked.parent == outer.trace
    assert {span.trace.split("-")[1] for span in (told, asked, outer)} == {PARENT.split("-")[1]}
    assert len({span.trace for span in spans}) == 4
    assert untraced.parent is None
    assert outer.accepted_s <= outer.started_s <= asked.started_s <= asked.ended_s <= outer.ended_s
    with loop_guard.allowed(), JournalReader(path) as reader:
        traces = {record.envelope.trace for record in reader if isinstance(record, Dequeued)}
    assert traces == {span.trace for span in spans}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit, asyncio.CancelledError])
async def test_a_hook_that_raises_disturbs_nobody(kind: type[BaseException]) -> None:
    def broken(span: Span) -> None:
        raise kind(span.actor)

    instruments = Instruments(broken)
    async with ActorSystem(instruments=instruments) as system:
        await system.start(spec("a"))
        for _ in range(3):
            assert await system.ask("a", Do()) == Do()
        assert system.failure is None
    assert isinstance(instruments.failure, kind)


@pytest.mark.asyncio
async def test_without_instruments_nothing_is_counted() -> None:
    async with ActorSystem() as system:
        await system.start(spec("a"))
        await system.ask("a", Do())
        assert system.stats().messages == ()


def test_what_is_no_traceparent_is_refused() -> None:
    with pytest.raises(HostWeightsError, match="traceparent"), traced("not a trace"):
        pass
