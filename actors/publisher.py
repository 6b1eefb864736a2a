"""PublisherActor: background publication after load, single flight per identity, adoption of the result."""

import asyncio
from typing import Protocol
from weakref import WeakValueDictionary

from msgspec import Struct, field

from ..hwr.identity import artifact_key
from ..messages.base import Message
from ..messages.budget import Budget
from ..messages.failure import Failure, HostWeightsError
from ..messages.publisher import (
    ForgetProducer,
    ListPublications,
    ProducerForgotten,
    ProducerRegistered,
    Publications,
    Publish,
    RegisterProducer,
)
from ..messages.report import PublicationOutcome, PublicationReport
from ..messages.store import Build, Leased, Release
from ..messages.transport import Rebase, Rebased
from .kernel.contract import Context

STORE = "store"
TRANSPORT = "transport"


class ModelPort(Protocol):
    """Loaded models as the publisher sees them."""

    def register(self, effect: RegisterProducer, budget: Budget) -> ProducerRegistered:
        """Enter a producer of the model's tensors into the resource table."""
        ...

    def forget(self, producer_id: str) -> ProducerForgotten:
        """Take a producer out of the resource table."""
        ...


class PublisherState(Struct):
    """Keys in flight, each with the lock that its followers wait for, kept by those who have or await it."""

    flights: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)


class PublisherActor:
    """Owns publications. Serving never waits for one; cancel or failure leaves the served model as it was.

    Publish runs concurrently, per identity one after another: a follower finds the leader's artifact and joins it, and
    takes over when the leader failed or was cancelled. Adoption is the transport's: it alone knows who streams. A lease
    that a model or ring reads is held, so the release after a failure or cancel is refused where it would harm.
    """

    def __init__(self, port: ModelPort) -> None:
        self._port = port
        self._state = PublisherState()

    async def started(self, context: Context) -> None:
        """Nothing outlives a publication."""

    async def receive(self, message: Message, context: Context) -> Message | None:
        """Answer one request."""
        match message:
            case Publish():
                return await self._publish(message, context)
            case ListPublications():
                flying = tuple(key for key, lock in self._state.flights.items() if lock.locked())
                return Publications(keys=flying)
            case _:
                raise AssertionError(type(message))

    async def _publish(self, message: Publish, context: Context) -> Message:
        started_s = context.now()
        key = artifact_key(message.identity)
        leased: Leased | None = None
        adopted = False
        replaced: str | None = None
        failure: Failure | None = None
        try:
            async with self._state.flights.setdefault(key, asyncio.Lock()):
                leased = await self._build(message, context)
            if message.adopt:
                rebase = Rebase(model_id=message.model_id, lease_id=message.lease_id)
                rebased = await context.ask(TRANSPORT, rebase)
                assert isinstance(rebased, Rebased)
                adopted, replaced = True, rebased.replaced_lease_id
        except HostWeightsError as failed:
            failure = failed.failure
        finally:
            for lease_id in (replaced, None if adopted else message.lease_id):
                if lease_id is not None:
                    context.tell(STORE, Release(lease_id=lease_id))
        report = _report(message, key, leased, adopted, max(0.0, context.now() - started_s), failure)
        context.emit(report)
        return report

    async def _build(self, message: Publish, context: Context) -> Leased:
        producer_id = f"model-{message.publication_id}"
        try:
            await context.effect(RegisterProducer(model_id=message.model_id, producer_id=producer_id))
            leased = await context.ask(
                STORE,
                Build(
                    lease_id=message.lease_id,
                    identity=message.identity,
                    producer_id=producer_id,
                    validation=message.validation,
                ),
            )
        finally:
            await context.effect(ForgetProducer(producer_id=producer_id))
        assert isinstance(leased, Leased)
        return leased

    async def perform(self, effect: Message, context: Context) -> Message:
        """Carry out an effect on a model, off the loop."""
        port = self._port
        match effect:
            case RegisterProducer():
                return await context.blocking(lambda budget: port.register(effect, budget))
            case ForgetProducer(producer_id=producer_id):
                return port.forget(producer_id)
            case _:
                raise AssertionError(type(effect))

    async def stopped(self, context: Context) -> None:
        """Nothing to give back: producers are forgotten by the handlers that registered them."""


def _report(
    message: Publish,
    key: str,
    leased: Leased | None,
    adopted: bool,
    seconds: float,
    failure: Failure | None,
) -> PublicationReport:
    if leased is None:
        outcome = PublicationOutcome.FAILED
    else:
        outcome = PublicationOutcome.PUBLISHED if leased.built else PublicationOutcome.JOINED
    return PublicationReport(
        publication_id=message.publication_id,
        outcome=outcome,
        key=key,
        generation=None if leased is None else leased.lease.generation,
        size_bytes=0 if leased is None else leased.lease.size_bytes,
        tensors=0 if leased is None else leased.lease.tensors,
        adopted=adopted,
        seconds=seconds,
        failure=failure,
    )
