"""The ports of the host weight runtime: what is promised, what is not, and what holds after an error or a cancel.

Everything here is plain blocking code. A call that can take long gets a ``Budget`` and asks it often; when the budget
raises, the call undoes what it began and lets the exception pass.

Vocabulary. *Artifact*: the finished weights named by one identity. *Generation*: one publication of an artifact, never
changed after it became visible; its number never names another one of its key, also after it was removed. *Lease*: the
right to map one generation, held by a kernel lock. *Producer*: writes an artifact. *Condemned*: a generation that must
not be leased any more; whoever holds it keeps it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

import torch
from msgspec import Struct

from ..messages.budget import Budget
from ..messages.composites import CompositeEntry
from ..messages.config import Validation
from ..messages.dtypes import DType
from ..messages.identity import ArtifactIdentity
from ..messages.manifest import Manifest, PackedEntry, TensorKind

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) from the working thread; must be quick and must not raise."""


class TensorSpec(Struct, frozen=True):
    """A tensor that a producer is going to write, in the order of the sequence it stands in.

    ``block`` is an index into the producer's block names, or None. Specs of one block stand together. ``stride`` is how
    it lies in memory, one run in any order of the dimensions; None is C-contiguous.
    """

    name: str
    kind: TensorKind
    role: str
    shape: tuple[int, ...]
    dtype: DType
    block: int | None
    stride: tuple[int, ...] | None = None


class ProductionPlan(Struct, frozen=True):
    """All a writer needs to know before the first byte: specs in execution order, block names, aliases.

    ``aliases`` are (second name, stored name) pairs. ``composites`` say which tensors are parts of others. ``packed``
    describes tensors whose parts stand in ``tensors``.
    """

    tensors: tuple[TensorSpec, ...]
    blocks: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    composites: tuple[CompositeEntry, ...] = ()
    packed: tuple[PackedEntry, ...] = ()


class Producer(Protocol):
    """Makes the bytes of one artifact, deterministically."""

    @property
    def plan(self) -> ProductionPlan:
        """What will be written; cheap, fixed for the producer's life."""
        ...

    def produce(self, budget: Budget) -> Iterator[torch.Tensor]:
        """Yield one CPU tensor per spec, in order, with the spec's shape and dtype.

        A yielded tensor belongs to the producer and may be reused after the next one was asked for; the consumer
        reads it before that. Raises HostWeightsError when the source changed or cannot be read.
        """
        ...


class Lease(Protocol):
    """One mapped generation. Closed once; views of it must not be used after ``close``."""

    @property
    def lease_id(self) -> str:
        """The id that messages use."""
        ...

    @property
    def manifest(self) -> Manifest:
        """The generation's manifest."""
        ...

    @property
    def path(self) -> str:
        """The generation's directory, as text."""
        ...

    @property
    def directory(self) -> Path:
        """The generation's directory."""
        ...

    @property
    def publication_id(self) -> str:
        """Which publication this is."""
        ...

    @property
    def closed(self) -> bool:
        """Whether ``close`` has completed."""
        ...

    def extent(self, block: int) -> torch.Tensor:
        """The whole extent of a block: uint8, CPU, one dimension, a view of the shared read-only mapping.

        Writing to it kills the process. Valid until ``close``.
        """
        ...

    def shared(self, name: str) -> torch.Tensor:
        """A tensor over the shared read-only mapping (CPU; writing to it kills the process). Valid until ``close``."""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor over a private copy-on-write mapping of the same pages (CPU).

        Reading shares the page cache; a stray write costs this process one private page and changes no file. Aliases
        give the tensor they name. Valid until ``close``.
        """
        ...

    def all_tensors(self) -> Mapping[str, torch.Tensor]:
        """What ``tensor`` gives, for every name and alias but those of packed tensors, at a fraction of the cost."""
        ...

    def hold(self, holder: str) -> AbstractContextManager[None]:
        """Keep the lease from being closed while a device may read it; ``holder`` is named when close is refused."""
        ...

    def verify(self, budget: Budget, progress: Progress | None = None) -> None:
        """Compare every byte with its digest; raises HostWeightsError(checksum_mismatch) naming file and tensor."""
        ...

    def close(self) -> None:
        """Unmap and unlock. Idempotent. Raises HostWeightsError(lease_in_use), changing nothing, while it is held."""
        ...


class BuildResult(Struct, frozen=True):
    """A lease, and whether this call made the artifact or waited for another builder."""

    lease: Lease
    built: bool
    joined: bool


class Miss(Struct, frozen=True):
    """No usable generation; ``condemned`` of them exist but must not be used, ``reason`` says why for the last."""

    condemned: int
    reason: str


class Store(Protocol):
    """A node-local store under one root.

    Atomic: a generation is visible whole or not at all, at every moment and after a crash at any moment. Durable: when
    ``build`` returns, the generation survives power loss. Not promised: which of two equal builders wins, and that
    leftovers of a crashed builder vanish before the next build.

    Shared by the mode of its root, whatever the umask of those who use it: who may read the root may lease; who may
    write it may build, condemn and remove, also what others published. Payload files are read-only for everybody.
    """

    def lookup(
        self, identity: ArtifactIdentity, validation: Validation, budget: Budget, *, lease_id: str
    ) -> Lease | Miss:
        """Lease the newest usable generation under the caller's ``lease_id``.

        A hit writes no file. Where the store is writable it may set the marker's modification time, at most once a
        minute, and the first full validation of a generation since the host started leaves a record, which later full
        validations trust while no file was touched.

        A generation that is provably damaged is condemned (when the store is writable) and the next older one is
        tried. Transient I/O errors raise HostWeightsError(io_error, retryable) and condemn nothing. An artifact whose
        manifest names another identity raises identity_collision.
        """
        ...

    def build(
        self,
        identity: ArtifactIdentity,
        producer: Producer,
        validation: Validation,
        budget: Budget,
        progress: Progress | None = None,
        *,
        lease_id: str,
    ) -> BuildResult:
        """Lease the artifact under the caller's ``lease_id``, producing it if it is missing.

        Waits by its budget for another builder of the key (build_busy, retryable, when that runs out), then looks up
        again and joins if there is something to join. After any error or cancel no staging of this call remains.

        Keeps the store within its limits: room is reserved before the first byte, and made by collecting generations
        that nobody leases; capacity_exceeded (retryable, if waiting can help) when that is not enough.
        """
        ...

    def close(self) -> None:
        """Forget the store; leases live on. Idempotent."""
        ...


class Writer(Protocol):
    """Writes tensors to staged files in one pass; not visible before the store renames the directory."""

    def write(self, tensors: Iterable[torch.Tensor], budget: Budget, progress: Progress | None = None) -> Manifest:
        """Write all tensors of the plan, in order, and return the manifest; files are synced to disk."""
        ...
