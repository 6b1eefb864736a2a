"""For tests of actors: time that costs nothing, work in threads that has an order, and many orders of one scenario.

    async def scenario() -> None:
        async with ActorSystem(pool=SimulatedPool) as system:
            ...

    explore(scenario, seeds=range(500))

Everything that is left to chance comes from the seed, so a failing seed fails again.
"""

from .explore import explore, run_virtual
from .pool import SimulatedPool
from .virtual_loop import Deadlock, VirtualLoop

__all__ = ["Deadlock", "SimulatedPool", "VirtualLoop", "explore", "run_virtual"]
