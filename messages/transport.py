"""Messages and effects of the TransportActor."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from .base import Count, Id, Message, Name, Record, Seconds, SizeBytes, Text

SlotCount = Annotated[int, Meta(ge=2, le=64)]


class Backing(StrEnum):
    """Where a block's bytes come from, and how they travel."""

    DIRECT = "direct"
    """One copy per block from the shared mapping."""
    STAGED = "staged"
    """Packed into a bounded staging buffer by a background thread, then copied."""
    PACKED = "packed"
    """One copy per block of its packed bytes, which the device unpacks."""


class BackingChoice(StrEnum):
    """What the caller asks for."""

    AUTO = "auto"
    DIRECT = "direct"
    STAGED = "staged"


class RegistrationPolicy(Record, frozen=True, kw_only=True):
    """How much of an artifact's mapping is registered with the device driver; the rest goes through staging.

    ``budget_bytes``: None is no limit of ours, 0 registers nothing. ``deadline_s`` is for all of it; registration
    never delays streaming, and what is not registered by then is not.
    """

    enabled: bool = True
    budget_bytes: SizeBytes | None = None
    deadline_s: Annotated[float, Meta(gt=0.0)] = 60.0


class GatherPolicy(Record, frozen=True, kw_only=True):
    """Which ranks bring a model's blocks together, each a part of every block, by AllGather.

    ``ranks`` are global ranks, in the same order on all; one rank alone gathers nothing. ``join_s`` is how long a rank
    waits for the others to attach, ``deadline_s`` how far it may be behind them afterwards. With ``choose`` the ranks
    measure whether whole blocks, copied by each rank alone, come sooner, and go by that.
    """

    ranks: Annotated[tuple[Count, ...], Meta(min_length=1)]
    deadline_s: Annotated[float, Meta(gt=0.0)] = 60.0
    join_s: Annotated[float, Meta(gt=0.0)] = 300.0
    choose: bool = False


class RegistrationInfo(Record, frozen=True, kw_only=True):
    """How far registration is.

    ``state``: ``none`` (nothing to register), ``running``, ``complete``, ``partial`` (``reason`` says why), ``closed``,
    or ``unsafe`` (the driver did not let pages go: mapping and lease are kept). ``blocks`` are copied directly.
    ``room_bytes`` is what the memory control group can pin and ``memlock_bytes`` what RLIMIT_MEMLOCK leaves, both as
    they were before the first range; None is no limit. The lock limit counts only where the driver charges pins to it.
    """

    state: Name
    blocks: Count = 0
    wanted_bytes: SizeBytes = 0
    registered_bytes: SizeBytes = 0
    seconds: Seconds = 0.0
    reason: Text = ""
    room_bytes: SizeBytes | None = None
    memlock_bytes: SizeBytes | None = None


class PackingInfo(Record, frozen=True, kw_only=True):
    """What unpacking costs and gains, in medians of the latest blocks.

    ``packed_bytes`` and ``plain_bytes`` are of all blocks; ``copied_bytes`` were copied since the backing was opened.
    ``slack_s``: how long a block's bytes lay on the device before its slot was free. ``unpack_s``: from the begin of
    unpacking to its end, which beside long kernels of compute is mostly waiting for them. ``bound`` is what a forward
    waits for, as far as that was seen: ``copy``, where packing makes forwards shorter, ``compute``, where unpacking
    makes them longer, or ``unknown``; ``reason`` says why.
    """

    packed_bytes: SizeBytes
    plain_bytes: SizeBytes
    copied_bytes: SizeBytes = 0
    copy_s: Seconds = 0.0
    slack_s: Seconds = 0.0
    unpack_s: Seconds = 0.0
    bound: Name = "unknown"
    reason: Text = ""


class GatheringInfo(Record, frozen=True, kw_only=True):
    """How the blocks of ranks that attached together travel: ``mode`` is ``gathered`` or ``rank-local``.

    ``settled``: nothing is being tried. The others are what a block took in each mode, on the slowest rank, when the
    ranks last tried both; None where that was not measured.
    """

    mode: Name
    settled: bool
    gathered_block_s: Seconds | None = None
    local_block_s: Seconds | None = None


class RingStats(Record, frozen=True, kw_only=True):
    """Counters of a slot ring since it was attached.

    ``copies``: blocks copied into a slot. ``hits``: blocks that were in a slot, or on their way there by a right guess.
    ``stalls``: blocks that compute had to wait for, right guess or wrong, and ``stall_s`` how long, by the device's
    clock and as far as the device has come. ``wrong_guesses``: prefetched blocks that were overwritten unused.
    ``slots`` is their count now and ``depth`` why it is that.
    """

    forwards: Count = 0
    copies: Count = 0
    hits: Count = 0
    stalls: Count = 0
    wrong_guesses: Count = 0
    copied_bytes: SizeBytes = 0
    stall_s: Seconds = 0.0
    registration: RegistrationInfo | None = None
    slots: Count = 0
    depth: Text = ""
    packing: PackingInfo | None = None
    gathering: GatheringInfo | None = None


class AttachmentInfo(Record, frozen=True, kw_only=True):
    """A model attached for streaming.

    ``slots`` are those it began with. ``kept`` blocks stay on the device until they are released; ``on_demand`` parts
    are there while they are used.
    """

    attachment_id: Id
    model_id: Id
    lease_id: Id | None
    device: Name
    backing: Backing
    slots: Count
    blocks: tuple[Name, ...]
    block_bytes: SizeBytes
    slot_bytes: SizeBytes
    kept: tuple[Name, ...] = ()
    on_demand: tuple[Name, ...] = ()
    ranks: Count = 1


# --- requests and replies -------------------------------------------------------------------------------------------


class Attach(Message, frozen=True, kw_only=True, tag="transport.attach"):
    """Stream a loaded model's blocks through slots of a device. Replies Attached.

    After an error or a cancel the model is as it was. Blocks come from the model's lease if it has one, else from its
    private tensors. The first ``resident`` blocks stay on the device and are not streamed; parts at the paths of
    ``on_demand`` are there only while their forward runs. ``slots`` None begins with two and adds more when the first
    forwards show that this pays, as far as ``slot_limit_bytes`` of device memory for all slots allow. With ``gather``
    every rank of the group attaches the same model, and none ends before all have or one failed.
    """

    attachment_id: Id
    model_id: Id
    device: Name
    slots: SlotCount | None
    backing: BackingChoice
    resident: Count = 0
    registration: RegistrationPolicy = RegistrationPolicy()
    on_demand: tuple[Name, ...] = ()
    slot_limit_bytes: SizeBytes | None = None
    gather: GatherPolicy | None = None


class Detach(Message, frozen=True, kw_only=True, tag="transport.detach"):
    """Stop streaming. Replies Detached; twice is harmless.

    ``terminal`` drops the model's streamed tensors; otherwise the model is usable again, bound to its host tensors.
    """

    attachment_id: Id
    terminal: bool


class Forget(Message, frozen=True, kw_only=True, tag="transport.forget"):
    """Stop streaming a model and forget it, after whatever was asked for it before. Replies Forgotten.

    What is asked for it afterwards is refused (model_unknown). After an error it is still known: ask again.
    """

    model_id: Id


class Rebase(Message, frozen=True, kw_only=True, tag="transport.rebase"):
    """Between two forwards, bind a model, and its ring if it streams, to a lease that holds equal bytes.

    Replies Rebased. A cancel ends the wait for running forwards; a re-bind that has begun is finished and stands. After
    an error or a cancel each tensor has right bytes, and a lease that any of them reads is held.
    """

    model_id: Id
    lease_id: Id


class AnnounceForwards(Message, frozen=True, kw_only=True, tag="transport.announce"):
    """Say how many forwards will follow, so that the last wrap-around prefetch is not made. Replies Announced."""

    attachment_id: Id
    forwards: Count


class ReleaseResident(Message, frozen=True, kw_only=True, tag="transport.release_resident"):
    """Let kept blocks leave the device until the next forward. Replies ResidentReleased."""

    attachment_id: Id


class ReadRing(Message, frozen=True, kw_only=True, tag="transport.read_ring"):
    """Replies Ring."""

    attachment_id: Id


class ListAttachments(Message, frozen=True, kw_only=True, tag="transport.list"):
    """Replies Attachments."""


class Attachments(Message, frozen=True, kw_only=True, tag="transport.attachments"):
    """All attachments of this process."""

    attachments: tuple[AttachmentInfo, ...]


class Attached(Message, frozen=True, kw_only=True, tag="transport.attached"):
    """The model streams."""

    info: AttachmentInfo


class Rebased(Message, frozen=True, kw_only=True, tag="transport.rebased"):
    """The model reads the lease; ``released_bytes`` of its former tensors were let go.

    ``replaced_lease_id`` is the lease it was bound to before, now the asker's to release; ``info`` is None for a model
    that does not stream.
    """

    released_bytes: SizeBytes
    replaced_lease_id: Id | None
    info: AttachmentInfo | None


class Detached(Message, frozen=True, kw_only=True, tag="transport.detached"):
    """The model does not stream any more; ``known`` is False if it already did not."""

    attachment_id: Id
    known: bool


class Forgotten(Message, frozen=True, kw_only=True, tag="transport.forgotten"):
    """The model is unknown now; ``lease_id`` is the lease it was bound to, now the asker's to release."""

    model_id: Id
    lease_id: Id | None


class Announced(Message, frozen=True, kw_only=True, tag="transport.announced"):
    """The ring knows."""

    attachment_id: Id
    forwards: Count


class ResidentReleased(Message, frozen=True, kw_only=True, tag="transport.resident_released"):
    """Kept blocks that were not in use left the device."""

    attachment_id: Id
    released_bytes: SizeBytes


class Ring(Message, frozen=True, kw_only=True, tag="transport.ring"):
    """A snapshot of a ring's counters."""

    attachment_id: Id
    stats: RingStats


# --- effects on the device port -------------------------------------------------------------------------------------


class ListModelAttachments(Message, frozen=True, kw_only=True, tag="transport.effect.list"):
    """Ask the resource table which attachments outlived the last incarnation. Outcome Attachments."""


class AttachModel(Message, frozen=True, kw_only=True, tag="transport.effect.attach"):
    """Build slots and hooks. Outcome Attached."""

    request: Attach


class DetachModel(Message, frozen=True, kw_only=True, tag="transport.effect.detach"):
    """Drain copies, remove hooks, free slots. Outcome Detached."""

    attachment_id: Id
    terminal: bool


class ForgetModel(Message, frozen=True, kw_only=True, tag="transport.effect.forget"):
    """Detach a model and drop it. Outcome Forgotten."""

    model_id: Id


class RebaseModel(Message, frozen=True, kw_only=True, tag="transport.effect.rebase"):
    """Wait for the running forwards, drain copies, re-bind. Outcome Rebased."""

    model_id: Id
    lease_id: Id


class AnnounceModel(Message, frozen=True, kw_only=True, tag="transport.effect.announce"):
    """Tell a ring how many forwards follow. Outcome Announced."""

    attachment_id: Id
    forwards: Count


class ReleaseModelResident(Message, frozen=True, kw_only=True, tag="transport.effect.release_resident"):
    """Let kept blocks leave the device. Outcome ResidentReleased."""

    attachment_id: Id


class ReadModelRing(Message, frozen=True, kw_only=True, tag="transport.effect.read"):
    """Read a ring's counters. Outcome Ring."""

    attachment_id: Id
