"""Messages and effects of the PublisherActor."""

from .base import Count, Digest, Id, Message, SizeBytes
from .config import Validation
from .identity import ArtifactIdentity


class Publish(Message, frozen=True, kw_only=True, tag="publisher.publish"):
    """Publish a loaded model's weights in the background and, if asked, adopt them. Replies PublicationReport.

    Single flight per identity: a second request waits for the first and adopts its result. Cancel or failure leaves
    the served model as it was. The asker chooses ``lease_id`` and owns that lease when the report says adopted.
    """

    publication_id: Id
    lease_id: Id
    model_id: Id
    identity: ArtifactIdentity
    validation: Validation
    adopt: bool


class ListPublications(Message, frozen=True, kw_only=True, tag="publisher.list"):
    """Replies Publications."""


class Publications(Message, frozen=True, kw_only=True, tag="publisher.publications"):
    """Keys being published now."""

    keys: tuple[Digest, ...]


# --- effects on the model port --------------------------------------------------------------------------------------


class RegisterProducer(Message, frozen=True, kw_only=True, tag="publisher.effect.register"):
    """Freeze the model's tensors as a producer. Outcome ProducerRegistered."""

    model_id: Id
    producer_id: Id


class ProducerRegistered(Message, frozen=True, kw_only=True, tag="publisher.effect.registered"):
    """What the producer will write."""

    tensors: Count
    size_bytes: SizeBytes


class ForgetProducer(Message, frozen=True, kw_only=True, tag="publisher.effect.forget"):
    """Drop a producer. Outcome ProducerForgotten."""

    producer_id: Id


class ProducerForgotten(Message, frozen=True, kw_only=True, tag="publisher.effect.forgotten"):
    """The producer is gone, or was already."""

    producer_id: Id
