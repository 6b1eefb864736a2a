"""ResolverActor: carries out resolutions; what to do next is decided in ``resolution``."""

import asyncio
from contextlib import nullcontext
from typing import Protocol

from ..messages.base import Message
from ..messages.budget import Budget
from ..messages.failure import HostWeightsError
from ..messages.resolver import (
    CanonicalLoaded,
    CommitRestore,
    Identified,
    Identify,
    LoadCanonical,
    PlanRestore,
    Resolve,
    Resolved,
    Restored,
    RestorePlanned,
    StageFailed,
)
from ..messages.store import Build, Fetch, Lookup, Release
from . import resolution
from .kernel.contract import Context

STORE = "store"


class LoaderPort(Protocol):
    """Models and checkpoints as the actor sees them: blocking calls that name both by id."""

    def identify(self, effect: Identify, budget: Budget) -> Identified:
        """Skeleton, checkpoint plan, source digest, identity; registers a checkpoint producer."""
        ...

    def plan_restore(self, effect: PlanRestore, budget: Budget) -> RestorePlanned:
        """Check a lease against the skeleton; touches neither."""
        ...

    def commit_restore(self, effect: CommitRestore) -> Restored:
        """Bind the skeleton to the lease, once."""
        ...

    def load_canonical(self, effect: LoadCanonical, budget: Budget) -> CanonicalLoaded:
        """Fill the skeleton, or a fresh one, from the checkpoint."""
        ...


class ResolverActor:
    """Owns resolutions: mode policy, terminal report, one restore commit. No files, no locks, no device memory.

    Those that meet other ranks come one after another, since the ranks must meet for the same one.
    """

    def __init__(self, port: LoaderPort) -> None:
        self._port = port
        self._meeting = asyncio.Lock()

    async def started(self, context: Context) -> None:
        """Nothing outlives a resolution."""

    async def receive(self, message: Message, context: Context) -> Message | None:
        """Run one resolution to its terminal report; a failure is a report, not an error."""
        assert isinstance(message, Resolve), type(message)
        async with self._meeting if message.together else nullcontext():
            return await self._resolve(message, context)

    async def _resolve(self, message: Resolve, context: Context) -> Resolved:
        state, command = resolution.begin(message, context.new_id("resolution"), context.now())
        try:
            while not isinstance(command, Resolved):
                happened = await self._carry_out(command, context)
                state, command = resolution.advance(state, happened, context.now())
        except BaseException:
            context.tell(STORE, Release(lease_id=message.lease_id))
            raise
        context.emit(command.report)
        return command

    async def _carry_out(self, command: Message, context: Context) -> Message:
        try:
            match command:
                case Lookup() | Fetch() | Build() | Release():
                    return await context.ask(STORE, command)
                case CommitRestore():
                    async with context.critical("restore"):
                        return await context.effect(command)
                case _:
                    return await context.effect(command)
        except HostWeightsError as failed:
            return StageFailed(failure=failed.failure)

    async def perform(self, effect: Message, context: Context) -> Message:
        """Carry out an effect on models and checkpoints, off the loop."""
        port = self._port
        match effect:
            case Identify():
                return await context.blocking(lambda budget: port.identify(effect, budget))
            case PlanRestore():
                return await context.blocking(lambda budget: port.plan_restore(effect, budget))
            case CommitRestore():
                return await context.blocking(lambda _: port.commit_restore(effect))
            case LoadCanonical():
                return await context.blocking(lambda budget: port.load_canonical(effect, budget))
            case _:
                raise AssertionError(type(effect))

    async def stopped(self, context: Context) -> None:
        """Nothing to give back."""
