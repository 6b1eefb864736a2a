"""D2: the loop in a thread of its own that blocking code calls into."""

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from hostweights import Code, HostWeightsError
from hostweights.actors.portal import Portal

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME", default="nobody")


def test_D2_a_call_runs_on_the_loops_thread_in_the_callers_context() -> None:
    portal = Portal("a portal")
    NAME.set("the caller")

    async def look() -> tuple[str, str]:
        return threading.current_thread().name, NAME.get()

    try:
        assert portal.call(look) == ("a portal", "the caller")
    finally:
        portal.stop()


def test_D2_a_call_raises_what_its_coroutine_raises() -> None:
    portal = Portal("a portal")

    async def fail() -> None:
        raise ValueError("of the coroutine")

    try:
        with pytest.raises(ValueError, match="of the coroutine"):
            portal.call(fail)
    finally:
        portal.stop()


def test_D2_stopping_lets_the_calls_of_other_threads_end() -> None:
    portal = Portal("a portal")
    begun, go_on = threading.Event(), asyncio.Event()

    async def wait() -> str:
        begun.set()
        await go_on.wait()
        for _ in range(1000):
            await asyncio.sleep(0)
        return "whole"

    async def release() -> None:
        asyncio.get_running_loop().call_soon(go_on.set)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(portal.call, wait)
        assert begun.wait(60)
        portal.call(release)
        portal.stop()
        assert other.result() == "whole"


def test_D2_a_stopped_portal_refuses_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    portal = Portal("a portal")
    portal.stop()
    portal.stop()

    async def nothing() -> None:
        """Never runs."""

    with pytest.raises(HostWeightsError) as caught:
        portal.call(nothing)
    assert caught.value.code is Code.ACTOR_STOPPED
    assert set(threading.enumerate()) == before


@pytest.mark.parametrize("swallowed", [False, True])
def test_D2_an_async_context_manager_sees_the_end_of_the_block(swallowed: bool) -> None:
    portal = Portal("a portal")
    seen: list[str] = []

    @asynccontextmanager
    async def manager() -> AsyncIterator[str]:
        try:
            yield "inside"
        except KeyError:
            seen.append("raised")
            if not swallowed:
                raise
        else:
            seen.append("left")

    try:
        with portal.inside(manager()) as value:
            assert value == "inside"
        if swallowed:
            with portal.inside(manager()):
                raise KeyError("of the block")
        else:
            with pytest.raises(KeyError), portal.inside(manager()):
                raise KeyError("of the block")
    finally:
        portal.stop()
    assert seen == ["left", "raised"]
