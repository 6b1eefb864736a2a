"""What the demo's processes say to each other, a JSON line each, and the demo's result."""

import msgspec

from hostweights.messages.failure import Failure


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The first line a worker reads."""

    root: str
    model: str
    journal: str | None
    slots: int


class RingCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Copies into slots, and blocks that compute waited for."""

    copies: int
    stalls: int


class Progress(msgspec.Struct, frozen=True, kw_only=True, tag="progress"):
    """A worker began a stage, or got on with it."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0


class Settled(msgspec.Struct, frozen=True, kw_only=True, tag="settled"):
    """A worker serves from the shared pages; ``hidden`` and ``embeddings`` are raw float32 bytes."""

    role: str
    seconds: dict[str, float]
    loop_held_s: dict[str, float]
    forwards: int
    steady: bool
    hidden: bytes
    embeddings: bytes
    artifact_bytes: int
    block_bytes: int
    private_bytes_before_adoption: int
    private_bytes_after_adoption: int


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """What a worker's mappings cost while all workers live."""

    mapped_pss_bytes: int
    mapped_anonymous_bytes: int
    ring: RingCounts


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """A worker closed everything; ``leaks`` names what stayed."""

    leaks: tuple[str, ...]


class Crashed(msgspec.Struct, frozen=True, kw_only=True, tag="crashed"):
    """A worker ended with a failure."""

    failure: Failure


WorkerLine = Progress | Settled | Measured | Finished | Crashed


class WorkerResult(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in the demo's result; bytes are anonymous memory (private) and PSS of the artifact's mappings.

    ``loop_held_s`` is, by stage, the longest that the worker's event loop did one thing.
    """

    role: str
    seconds: dict[str, float]
    loop_held_s: dict[str, float]
    forwards: int
    private_bytes_before_adoption: int
    private_bytes_after_adoption: int
    mapped_pss_bytes: int
    mapped_anonymous_bytes: int
    ring: RingCounts


class Cosine(msgspec.Struct, frozen=True, kw_only=True):
    """Cosines of the streamed model's embeddings."""

    cat_kitten: float
    cat_stocks: float


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result; ``--json`` prints it."""

    equal: bool
    artifact_bytes: int
    block_bytes: int
    cosine: Cosine
    workers: tuple[WorkerResult, ...]
    leaks: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Everything was equal and nothing leaked."""
        return self.equal and not self.leaks
