"""The contract, sentence by sentence: which tests show it, on every loop. A sentence without one fails here."""

# ruff: noqa: ARG001, ARG002 - handlers and fakes keep the protocol's signature
import ast
import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from hostweights.actors.kernel import (
    ActorSpec,
    ActorStopped,
    ActorSystem,
    Context,
    DeadlineExceeded,
    HandlerFailed,
    RestartPolicy,
    contract,
)
from hostweights.messages.base import Message
from hostweights.messages.budget import Budget

PREMISE = ("-",)
"""Says what is not promised, or what the user promises."""

SHOWN_BY: dict[str, tuple[str, ...]] = {
    "Messages from one sender": ("test_messages_of_one_sender_are_handled_in_order_and_one_at_a_time",),
    "Nothing is promised between": PREMISE,
    "System messages": (
        "test_a_stop_overtakes_what_is_queued",
        "test_control_reaches_a_reader_that_does_not_want_messages",
    ),
    "``mailbox_limit`` bounds": ("test_a_full_mailbox_refuses_and_counts",),
    "A tell to a full mailbox": (
        "test_a_tell_and_an_ask_are_refused_at_once",
        "test_news_takes_the_place_of_the_oldest_tell_and_never_of_an_ask",
    ),
    "``offer`` waits for room": (
        "test_offers_wait_and_are_let_in_as_they_came",
        "test_an_offer_that_found_no_room_in_time_says_so_and_leaves_nothing",
        "test_an_offer_to_an_actor_that_stops_is_told_at_once",
    ),
    "What the actor declares ``beside_limit``": ("test_what_gives_back_is_queued_beside_the_limit",),
    "A message is handled once or never": (
        "test_a_crash_restarts_the_actor_and_those_after_it_and_keeps_what_is_queued",
        "test_a_message_that_crashed_is_not_run_again",
    ),
    "With the reply; with": (
        "test_T82_a_handler_that_raises_on_the_nth_message_answers_every_request_once",
        "test_D1_crashes_under_load_lose_no_request",
    ),
    "Nobody waits for a timeout": (
        "test_an_unknown_actor_and_a_stopped_one_answer_at_once",
        "test_an_ask_that_comes_back_to_its_asker_raises_ask_cycle",
        "test_two_handlers_that_ask_each_other_do_not_wait_for_ever",
    ),
    "A late reply is counted": ("test_an_answer_that_nobody_received_is_taken_back",),
    "Absolute on the loop clock": ("test_a_nested_ask_inherits_the_earlier_deadline_and_the_cap_applies",),
    "Checked at enqueue": (
        "test_a_deadline_withdraws_what_is_queued_and_what_runs",
        "test_useful_replies_under_overload_are_not_crowded_out",
        "test_admission_keeps_headroom_and_concurrent_work_shares_it",
    ),
    "Of what the actor declares ``uneven``": ("test_what_is_uneven_is_begun_whatever_others_took",),
    "When the caller is cancelled": (
        "test_a_queued_message_is_withdrawn_at_once_and_never_starts",
        "test_T77_a_cancel_at_every_loop_pass_tears_and_leaks_nothing",
    ),
    "Tells are never withdrawn": ("test_a_tell_outlives_the_handler_that_sent_it",),
    "``ask`` then returns": ("test_a_cancelled_caller_returns_only_when_its_handler_has_ended",),
    "Further cancels": ("test_T77_a_cancel_at_every_loop_pass_tears_and_leaks_nothing",),
    "A handler that answers in spite": (
        "test_a_handler_that_answers_in_spite_of_its_deadline_is_believed",
        "test_an_answer_that_nobody_received_is_taken_back",
    ),
    "Inside ``context.critical``": ("test_a_cancel_withheld_by_a_section_is_raised_at_its_end",),
    "Asking another actor inside": (
        "test_asking_inside_a_critical_section_is_refused",
        "test_blocking_work_in_a_critical_section_has_no_deadline",
    ),
    "``context.blocking`` runs": (
        "test_T78_blocking_work_is_awaited_and_undone_exactly_once",
        "test_a_call_that_no_thread_has_begun_is_dropped",
    ),
    "On a cancel its budget": (
        "test_a_cancel_wakes_blocking_work_through_its_budget",
        "test_T78_blocking_work_is_awaited_and_undone_exactly_once",
    ),
    "One handler at a time": (
        "test_messages_of_one_sender_are_handled_in_order_and_one_at_a_time",
        "test_concurrent_types_run_beside_each_other_and_within_their_limit",
    ),
    "A handler's HostWeightsError": ("test_T82_a_handler_that_raises_on_the_nth_message_answers_every_request_once",),
    "Any other exception ends": (
        "test_a_declared_fault_restarts_with_growing_pauses_and_then_escalates",
        "test_an_unknown_fault_ends_the_system_with_its_cause",
    ),
    "A restart takes": (
        "test_a_crash_restarts_the_actor_and_those_after_it_and_keeps_what_is_queued",
        "test_one_for_one_leaves_the_others_alone",
    ),
    "What is queued waits": ("test_a_deadline_goes_on_while_an_actor_backs_off",),
    "A message that crashes every": ("test_a_poisoned_message_cannot_restart_an_actor_for_ever",),
    "In a restart each step": ("test_closing_ends_a_restart_in_which_two_actors_wait_for_each_other",),
    "Who watches an actor": (
        "test_a_watcher_is_told_once_of_a_stop_and_not_of_a_restart",
        "test_an_actor_that_does_not_run_is_terminated_at_once",
        "test_what_the_ended_actor_had_told_comes_first",
        "test_a_task_that_someone_cancelled_ends_its_actor_too",
    ),
    "A restart is no end": ("test_a_watcher_is_told_once_of_a_stop_and_not_of_a_restart",),
    "A watch ends": ("test_a_watch_ends_with_the_incarnation_that_asked_for_it",),
    "A stopped actor accepts": ("test_an_unknown_actor_and_a_stopped_one_answer_at_once",),
    "Drained, it handles": (
        "test_closing_drains_what_is_queued_and_refuses_what_comes",
        "test_a_stop_overtakes_what_is_queued",
        "test_closing_without_drain_waits_for_sections_and_blocking_work",
    ),
    "An actor that is down for a restart when": (
        "test_closing_does_not_wait_for_a_back_off",
        "test_closing_withdraws_what_is_queued_for_actors_that_are_down_for_a_restart",
    ),
    "Stopping or closing twice": ("test_stopping_and_closing_twice_is_harmless",),
    "Only the runtime cancels": PREMISE,
    "A CancelledError that nobody": ("test_an_unrequested_cancelled_error_is_a_failure_and_not_a_stop",),
    "A cancel that someone else": (
        "test_a_foreign_cancel_of_the_actor_s_task_stops_it_in_good_order",
        "test_a_foreign_cancel_of_a_running_handler_stops_the_actor_and_tells_its_asker",
    ),
    "Before CPython 3.13 a TaskGroup": PREMISE,
    "A handler that swallows": ("test_a_handler_that_swallows_its_cancel_is_tolerated_and_counted",),
    "Every task and thread": (
        "test_T77_a_cancel_at_every_loop_pass_tears_and_leaks_nothing",
        "test_a_loop_that_goes_down_with_the_system_open_leaves_nothing_behind",
    ),
    "An interpreter that ends": ("test_an_interpreter_ends_with_a_system_open_and_keeps_its_last_records",),
    "A handler takes inputs": PREMISE,
    "What it awaits besides": ("test_D3_a_recorded_run_replays_to_the_same_doings",),
}


def sentences() -> list[str]:
    """Of the contract's sections, without their headings."""
    assert contract.__doc__ is not None
    body = [line.strip() if line.startswith("    ") else "" for line in contract.__doc__.splitlines()[1:]]
    sections = " ".join(line or "\n" for line in body).split("\n")
    return [found for section in sections for found in re.split(r"(?<=[.])\s+(?=[A-Z`])", section.strip()) if found]


def test_D1_every_sentence_of_the_contract_is_shown_by_tests() -> None:
    said = sentences()
    shown = {said_one: [key for key in SHOWN_BY if said_one.startswith(key)] for said_one in said}
    assert [one for one, keys in shown.items() if len(keys) != 1] == [], "sentences without their entry"
    assert [key for key in SHOWN_BY if not any(one.startswith(key) for one in said)] == [], "entries without sentence"


def test_D1_the_tests_that_show_it_exist() -> None:
    names = {
        node.name
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name for tests in SHOWN_BY.values() if tests is not PREMISE for name in tests} <= names


class Do(Message, frozen=True, kw_only=True, tag="t.do"):
    """Ask for something."""

    what: str = ""


Handler = Callable[[Do, Context], Awaitable[Message | None]]


class Scripted:
    """An actor whose handler is a function of the test."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def started(self, context: Context) -> None: ...

    async def receive(self, message: Message, context: Context) -> Message | None:
        assert isinstance(message, Do)
        return await self._handler(message, context)

    async def perform(self, effect: Message, context: Context) -> Message:
        left: list[float | None] = []

        def look(budget: Budget) -> None:
            left.append(budget.remaining_s())

        await context.blocking(look)
        return Do(what=f"{left[0] is None}")

    async def stopped(self, context: Context) -> None: ...


def spec(handler: Handler, name: str = "a", restart: RestartPolicy | None = None) -> ActorSpec:
    create = lambda: Scripted(handler)  # noqa: E731 - an actor is its handler here
    return ActorSpec(name=name, create=create, accepts=(Do,), restart=restart or RestartPolicy())


async def passes(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_a_stop_overtakes_what_is_queued() -> None:
    seen: list[str] = []

    async def handler(message: Do, context: Context) -> Message | None:
        seen.append(message.what)
        await asyncio.Event().wait()
        return None

    async with ActorSystem() as system:
        await system.start(spec(handler))
        asks = [asyncio.create_task(system.ask("a", Do(what=f"{n}"))) for n in range(5)]
        await passes()
        await system.close(drain=False)
        answers = await asyncio.gather(*asks, return_exceptions=True)
    assert [type(answer) for answer in answers] == [ActorStopped] * 5
    assert seen == ["0"]


@pytest.mark.asyncio
async def test_a_message_that_crashed_is_not_run_again() -> None:
    seen: list[str] = []

    async def handler(message: Do, context: Context) -> Message | None:
        seen.append(message.what)
        if message.what == "crash":
            raise OSError("transient")
        return message

    async with ActorSystem() as system:
        await system.start(spec(handler, restart=RestartPolicy(backoff_s=0.0, restart_on=(OSError,))))
        system.tell("a", Do(what="crash"))
        assert await system.ask("a", Do(what="after")) == Do(what="after")
    assert seen == ["crash", "after"]


@pytest.mark.asyncio
async def test_a_tell_outlives_the_handler_that_sent_it() -> None:
    seen: list[str] = []

    async def front(message: Do, context: Context) -> Message | None:
        context.tell("b", Do(what="told"))
        await asyncio.Event().wait()
        return None

    async def back(message: Do, context: Context) -> Message | None:
        seen.append(message.what)
        return message

    async with ActorSystem() as system:
        await system.start(spec(back, "b"))
        await system.start(spec(front))
        caller = asyncio.create_task(system.ask("a", Do()))
        while not system.stats().actors[1].handled and not seen:  # noqa: ASYNC110 - polling is by loop pass
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
    assert seen == ["told"]


@pytest.mark.asyncio
async def test_a_handler_that_answers_in_spite_of_its_deadline_is_believed() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return Do(what="late and right")
        return None

    async with ActorSystem() as system:
        await system.start(spec(handler))
        assert await system.ask("a", Do(), timeout_s=0.1) == Do(what="late and right")


@pytest.mark.asyncio
async def test_blocking_work_in_a_critical_section_has_no_deadline() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        if message.what == "critical":
            async with context.critical("section"):
                return await context.effect(Do())
        return await context.effect(Do())

    async with ActorSystem() as system:
        await system.start(spec(handler))
        assert await system.ask("a", Do(what="critical"), timeout_s=60.0) == Do(what="True")
        assert await system.ask("a", Do(), timeout_s=60.0) == Do(what="False")


@pytest.mark.asyncio
async def test_a_deadline_goes_on_while_an_actor_backs_off() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        if message.what == "crash":
            raise OSError("transient")
        return message

    restart = RestartPolicy(backoff_s=3600.0, backoff_limit_s=3600.0, restart_on=(OSError,))
    async with ActorSystem() as system:
        await system.start(spec(handler, restart=restart))
        with pytest.raises(HandlerFailed):
            await system.ask("a", Do(what="crash"))
        with pytest.raises(DeadlineExceeded) as found:
            await system.ask("a", Do(), timeout_s=0.02)
        assert found.value.phase == "queued"


@pytest.mark.asyncio
async def test_stopping_and_closing_twice_is_harmless() -> None:
    async def handler(message: Do, context: Context) -> Message | None:
        return message

    async with ActorSystem() as system:
        await system.start(spec(handler))
        await system.start(spec(handler, "b"))
        ends = await asyncio.gather(system.stop_actor("a"), system.stop_actor("a"), return_exceptions=True)
        assert all(end is None for end in ends)
        await asyncio.gather(system.close(), system.close(drain=False))
        await system.close()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("actor-")]
