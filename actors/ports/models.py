"""The PublisherActor's port: producers of loaded models, registered by id."""

from contextlib import ExitStack

from ...hwr.packed.pending import unpack_waiting
from ...hwr.producers import ModelProducer
from ...messages.budget import Budget
from ...messages.failure import Code, Stage
from ...messages.publisher import ProducerForgotten, ProducerRegistered, RegisterProducer
from ..resources import Resources
from .faults import answered


class LocalModels:
    """Implements ``actors.publisher.ModelPort``."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def register(self, effect: RegisterProducer, budget: Budget) -> ProducerRegistered:
        """Enter a producer: the one made when the model was loaded, or a new one between two forwards."""
        with answered(Stage.PRODUCTION, Code.PRODUCER_FAILED, f"model {effect.model_id} could not be published"):
            return self._register(effect, budget)

    def _register(self, effect: RegisterProducer, budget: Budget) -> ProducerRegistered:
        entry = self._resources.models.get(effect.model_id)
        entry.require_untouched("publishing it")
        producer = entry.producer
        if producer is None:
            # Streaming's code: a load whose model is not published has no use of it.
            from ...dlo.hooks import refuse_gone
            from .packed import with_values

            prepared = entry.need_prepared()
            refuse_gone(prepared.module)
            with ExitStack() as still:
                still.enter_context(entry.need_gate().exclusive(budget))
                streaming = [a for a in self._resources.attachments.all() if a.info.model_id == effect.model_id]
                for attachment in streaming:  # what computes is on the device, and may be called past the gate
                    still.enter_context(attachment.streamer.at_rest(budget))
                unpack_waiting(prepared.module.parameters())
                producer = ModelProducer(prepared.module, prepared.ownership)
                if streaming and entry.lease_id is not None:
                    producer = with_values(producer, self._resources.leases.get(entry.lease_id).lease)
        self._resources.producers.put(effect.producer_id, producer)
        return ProducerRegistered(
            tensors=len(producer.plan.tensors),
            size_bytes=sum(tensor.size_bytes for tensor in entry.need_prepared().ownership.tensors),
        )

    def forget(self, producer_id: str) -> ProducerForgotten:
        """Take a producer out; twice is harmless."""
        self._resources.producers.pop(producer_id)
        return ProducerForgotten(producer_id=producer_id)
