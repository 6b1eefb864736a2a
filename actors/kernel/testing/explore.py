"""One scenario under many orders."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from .virtual_loop import VirtualLoop

T = TypeVar("T")


def run_virtual(scenario: Callable[[], Coroutine[Any, Any, T]], seed: int | None = None) -> T:
    """Run a scenario on a new ``VirtualLoop``; without a seed in the order of a plain loop."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(scenario())


def explore(scenario: Callable[[], Coroutine[Any, Any, object]], seeds: Iterable[int]) -> None:
    """Run a scenario once for each seed; the first failure carries its seed as a note."""
    for seed in seeds:
        try:
            run_virtual(scenario, seed)
        except BaseException as failed:
            failed.add_note(f"with seed {seed}; run_virtual(scenario, seed={seed}) fails again")
            raise
