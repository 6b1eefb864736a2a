"""The TransportActor's port: devices, backings and streamers of attached models."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

import msgspec
import torch

from ...dlo.backing import LeaseBacking, LeasedBlock, PrivateBacking, leased_blocks
from ...dlo.contract import HostBacking
from ...dlo.devices.opening import open_device
from ...dlo.discovery import BlockMap, discover
from ...dlo.hooks import refuse_gone
from ...dlo.packed.backing import PackedBacking
from ...dlo.parts import find_part
from ...dlo.sharded import refuse_sharded
from ...dlo.streamer import Streamer
from ...hwr.adopt import adopt, check_adoptable
from ...hwr.budget import PlainBudget
from ...hwr.memory import trim
from ...hwr.packed.pending import KeptPacked, unpack_waiting
from ...messages.budget import Budget
from ...messages.failure import Code, Stage, error
from ...messages.transport import (
    Announced,
    AnnounceModel,
    Attached,
    AttachmentInfo,
    AttachModel,
    Backing,
    BackingChoice,
    Detached,
    DetachModel,
    ReadModelRing,
    Rebased,
    RebaseModel,
    ReleaseModelResident,
    ResidentReleased,
    Ring,
)
from ..resources import AttachmentEntry, Resources
from .faults import answered
from .packed import open_packed
from .ways import open_way


class LocalDevices:
    """What ``DevicesOnDemand`` does once a model is attached or re-bound."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def attach(self, effect: AttachModel, budget: Budget) -> Attached:
        """Open the device and stream the model, between two forwards; after an error the model is as it was."""
        request = effect.request
        entry = self._resources.models.get(request.model_id)
        if (other := self._attachment_of(request.model_id)) is not None:
            text = f"model {request.model_id} already streams as {other.info.attachment_id}; detach that first"
            raise error(Stage.TRANSPORT, Code.ALREADY_ATTACHED, text, attachment=other.info.attachment_id)
        prepared = entry.need_prepared()
        failing = answered(Stage.TRANSPORT, Code.DEVICE_UNAVAILABLE, f"the model could not stream to {request.device}")
        # Undone inside the gate: a forward that waits at it must not meet half of an attach.
        with failing, entry.need_gate().exclusive(budget), ExitStack() as undo:
            refuse_gone(prepared.module)
            if entry.lease_id is not None:
                entry.require_untouched("streaming it")
            packed = KeptPacked(prepared.module.parameters())
            undo.callback(packed.undo)
            refuse_sharded(prepared.module)  # looks at ``data``, which would unpack a pending parameter
            device = open_device(request.device)
            undo.callback(device.close)
            blocks = discover(prepared.module, prepared.record.blocks).keeping(request.resident)
            backing = self._backing(request.attachment_id, blocks, request.model_id, request.backing)
            undo.callback(backing.close)
            packed.unpack_others(_streamed(prepared.module, backing))
            way, leave = open_way(request, entry.identity, budget)
            undo.callback(leave)
            streamer = Streamer.attach(
                prepared.module,
                blocks,
                device,
                backing,
                slots=request.slots,
                slot_limit_bytes=request.slot_limit_bytes,
                budget=budget,
                registration=request.registration,
                on_demand=request.on_demand,
                way=way,
            )
            undo.pop_all()
        sizes = streamer.sizes
        info = AttachmentInfo(
            attachment_id=request.attachment_id,
            model_id=request.model_id,
            lease_id=entry.lease_id,
            device=device.name,
            backing=_kind(backing, request.backing),
            slots=sizes.slots,
            blocks=sizes.paths,
            block_bytes=sizes.block_bytes,
            slot_bytes=sizes.slot_bytes,
            kept=sizes.kept,
            on_demand=sizes.on_demand,
            ranks=1 if request.gather is None else len(request.gather.ranks),
        )
        self._resources.attachments.put(
            request.attachment_id, AttachmentEntry(info, request.backing, streamer, device, blocks, leave)
        )
        return Attached(info=info)

    def detach(self, effect: DetachModel) -> Detached:
        """Stop streaming between two forwards, close the device; a repeat after a failure goes on where it stopped."""
        attachment = self._resources.attachments.find(effect.attachment_id)
        if attachment is None:
            return Detached(attachment_id=effect.attachment_id, known=False)
        entry = self._resources.models.find(attachment.info.model_id)
        with ExitStack() as stack:
            if entry is not None:
                stack.enter_context(entry.need_gate().exclusive(PlainBudget()))
            attachment.streamer.detach(terminal=effect.terminal)
        attachment.leave()
        attachment.device.close()
        self._resources.attachments.pop(effect.attachment_id)
        return Detached(attachment_id=effect.attachment_id, known=True)

    def rebase(self, effect: RebaseModel, budget: Budget) -> Rebased:
        """Move the ring first and the rest of the model next, then give free memory back to the system."""
        entry = self._resources.models.get(effect.model_id)
        prepared = entry.need_prepared()
        lease = self._resources.leases.get(effect.lease_id).lease
        attachment = self._attachment_of(effect.model_id)
        failing = answered(
            Stage.TRANSPORT, Code.RESTORE_COMMIT_FAILED, f"the model could not move to lease {effect.lease_id}"
        )
        with failing, entry.need_gate().exclusive(budget):
            refuse_gone(prepared.module)
            entry.require_untouched("adoption")
            unpack_waiting(prepared.module.parameters())  # a detach since the publication lets them wait again
            with _at_home(attachment):
                check_adoptable(prepared.module, prepared.record, lease)
            info = None if attachment is None else self._rebase_ring(attachment, effect.lease_id, budget)
            with _at_home(attachment):
                released_bytes = adopt(prepared.module, prepared.record, lease)
            replaced = entry.bind(effect.model_id, lease)
        entry.producer = None
        trim()
        return Rebased(released_bytes=released_bytes, replaced_lease_id=replaced, info=info)

    def _attachment_of(self, model_id: str) -> AttachmentEntry | None:
        found = (each for each in self._resources.attachments.all() if each.info.model_id == model_id)
        return next(found, None)

    def _rebase_ring(self, attachment: AttachmentEntry, lease_id: str, budget: Budget) -> AttachmentInfo:
        slot_bytes = attachment.streamer.sizes.slot_bytes
        holder = attachment.info.attachment_id
        backing = self._lease_backing(holder, attachment.blocks, lease_id, attachment.choice, slot_bytes)
        kind = _kind(backing, attachment.choice)
        with ExitStack() as undo:
            undo.callback(backing.close)
            attachment.streamer.rebase(backing, budget)
            undo.pop_all()
        attachment.info = msgspec.structs.replace(attachment.info, lease_id=lease_id, backing=kind)
        return attachment.info

    def announce(self, effect: AnnounceModel) -> Announced:
        """Tell the ring how many forwards follow."""
        self._resources.attachments.get(effect.attachment_id).streamer.announce(effect.forwards)
        return Announced(attachment_id=effect.attachment_id, forwards=effect.forwards)

    def release(self, effect: ReleaseModelResident) -> ResidentReleased:
        """Let kept blocks leave the device until the next forward."""
        released_bytes = self._resources.attachments.get(effect.attachment_id).streamer.release()
        return ResidentReleased(attachment_id=effect.attachment_id, released_bytes=released_bytes)

    def read(self, effect: ReadModelRing) -> Ring:
        """The ring's counters."""
        stats = self._resources.attachments.get(effect.attachment_id).streamer.stats()
        return Ring(attachment_id=effect.attachment_id, stats=stats)

    def _backing(self, holder: str, blocks: BlockMap, model_id: str, choice: BackingChoice) -> HostBacking:
        entry = self._resources.models.get(model_id)
        if entry.lease_id is not None:
            return self._lease_backing(holder, blocks, entry.lease_id, choice)
        if choice == BackingChoice.DIRECT:
            text = (
                f"model {model_id} holds private tensors, which lie scattered and cannot be copied directly; adopt its "
                "artifact first, or attach with backing auto or staged"
            )
            raise error(Stage.TRANSPORT, Code.UNSUPPORTED, text, model=model_id)
        return PrivateBacking(entry.need_prepared().module, blocks)

    def _lease_backing(
        self, holder: str, blocks: BlockMap, lease_id: str, choice: BackingChoice, slot_bytes: int | None = None
    ) -> HostBacking:
        """Direct if asked for; staged if asked for, if a block has no extent, or if an extent exceeds a given slot."""
        lease = self._resources.leases.get(lease_id).lease
        if lease.manifest.packed:
            return open_packed(lease, blocks, holder, staged=choice == BackingChoice.STAGED)
        leased = leased_blocks(blocks, lease.manifest, lease.path)
        direct = _direct(leased, choice, slot_bytes)
        with ExitStack() as hold:
            hold.enter_context(lease.hold(holder))
            release: Callable[[], None] = hold.pop_all().close
        try:
            return LeaseBacking(lease, leased, direct=direct, release=release)
        except BaseException:
            release()
            raise


def _streamed(module: torch.nn.Module, backing: HostBacking) -> set[int]:
    """The ids of the parameters, or the parts of them, that will show slots."""
    return {id(find_part(module, tensor.name)) for plan in backing.blocks for tensor in plan.tensors}


def _kind(backing: HostBacking, choice: BackingChoice) -> Backing:
    """How its blocks travel."""
    if isinstance(backing, PackedBacking):
        return Backing.STAGED if choice == BackingChoice.STAGED else Backing.PACKED
    return Backing.STAGED if backing.extent(0) is None else Backing.DIRECT


def _at_home(attachment: AttachmentEntry | None) -> AbstractContextManager[None]:
    """Inside, every tensor of the model is a host tensor, whatever device it computes on."""
    return nullcontext() if attachment is None else attachment.streamer.at_home()


def _direct(leased: Sequence[LeasedBlock], choice: BackingChoice, slot_bytes: int | None) -> bool:
    """Whether blocks are copied as they lie; raises unsupported when that was asked for and cannot be."""
    scattered = [block.plan.name for block in leased if block.extent is None]
    if choice == BackingChoice.DIRECT and scattered:
        text = (
            f"the artifact stores block {scattered[0]!r} outside every block extent, so it cannot be copied directly; "
            "attach with backing auto or staged, or publish it with a record that names its blocks"
        )
        raise error(Stage.TRANSPORT, Code.UNSUPPORTED, text, block=scattered[0])
    fits = slot_bytes is None or all(block.plan.size_bytes <= slot_bytes for block in leased)
    return choice == BackingChoice.DIRECT or (choice == BackingChoice.AUTO and not scattered and fits)
