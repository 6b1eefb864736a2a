"""The event loops that the runtime promises to work on, by name."""

import asyncio
import importlib
import importlib.util
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def _eager() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    loop.set_task_factory(vars(asyncio)["eager_task_factory"])
    return loop


LOOPS: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
if importlib.util.find_spec("uvloop") is not None:
    LOOPS["uvloop"] = importlib.import_module("uvloop").new_event_loop
if "eager_task_factory" in vars(asyncio):
    LOOPS["eager"] = _eager


def run_on(loop: str, main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on the loop of that name."""
    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        return runner.run(main)
