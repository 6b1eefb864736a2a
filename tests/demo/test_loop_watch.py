"""D4: a loop that does one thing for long is found, whatever else the machine does."""

import asyncio
import time

from hostweights.demo.loop_watch import LoopWatch


def work(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


async def scenario(watch: LoopWatch) -> tuple[float, float, float]:
    await asyncio.sleep(0)
    watch.take()
    for _ in range(3):
        work(0.01)
        await asyncio.sleep(0)
    parts_s = watch.take()
    work(0.03)
    whole_s = watch.take()
    await asyncio.sleep(0.05)
    return parts_s, whole_s, watch.take()


def test_D4_the_longest_pass_is_measured_and_waiting_is_not() -> None:
    watch = LoopWatch()
    with asyncio.Runner(loop_factory=watch.new_loop) as runner:
        parts_s, whole_s, waited_s = runner.run(scenario(watch))
    assert 0.01 <= parts_s < 0.03 <= whole_s
    assert waited_s < 0.01
