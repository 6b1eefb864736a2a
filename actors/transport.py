"""TransportActor: devices, slots and streams of attached models, and the order in which they go down."""

from dataclasses import dataclass, field
from typing import Protocol

from ..messages.base import Message
from ..messages.budget import Budget
from ..messages.failure import Code, Stage, error
from ..messages.transport import (
    Announced,
    AnnounceForwards,
    AnnounceModel,
    Attach,
    Attached,
    AttachmentInfo,
    Attachments,
    AttachModel,
    Detach,
    Detached,
    DetachModel,
    ListAttachments,
    ListModelAttachments,
    ReadModelRing,
    ReadRing,
    Rebase,
    Rebased,
    RebaseModel,
    Ring,
)
from .kernel.contract import Context


class DevicePort(Protocol):
    """Streaming as the actor sees it: blocking calls that name models, leases and attachments by id."""

    def attach(self, effect: AttachModel, budget: Budget) -> Attached:
        """Open the device, build slots, hook the blocks; after an error the model is as it was."""
        ...

    def detach(self, effect: DetachModel) -> Detached:
        """Drain copies, remove hooks, free slots, close the device, let the lease go; always to its end."""
        ...

    def rebase(self, effect: RebaseModel, budget: Budget) -> Rebased:
        """Between two forwards, bind the model and its ring to the lease, and hold the lease for both."""
        ...

    def announce(self, effect: AnnounceModel) -> Announced:
        """Tell the ring how many forwards follow."""
        ...

    def read(self, effect: ReadModelRing) -> Ring:
        """Counters."""
        ...

    def attachments(self) -> Attachments:
        """What stands in the resource table."""
        ...


@dataclass(slots=True)
class TransportState:
    """Attachments by id."""

    attachments: dict[str, AttachmentInfo] = field(default_factory=dict)


class TransportActor:
    """Owns attachments. The per-block hot path sends no message: a forward touches the ring directly."""

    def __init__(self, port: DevicePort) -> None:
        self._port = port
        self._state = TransportState()

    async def started(self, context: Context) -> None:
        """Find the attachments that outlived the last incarnation."""
        recovered = await context.effect(ListModelAttachments())
        assert isinstance(recovered, Attachments)
        self._state.attachments = {info.attachment_id: info for info in recovered.attachments}

    async def receive(self, message: Message, context: Context) -> Message | None:
        """Answer one request."""
        match message:
            case Attach():
                return await self._attach(message, context)
            case Detach():
                return await self._detach(message, context)
            case Rebase():
                return await self._rebase(message, context)
            case AnnounceForwards(attachment_id=attachment_id, forwards=forwards):
                self._known(attachment_id)
                return await context.effect(AnnounceModel(attachment_id=attachment_id, forwards=forwards))
            case ReadRing(attachment_id=attachment_id):
                self._known(attachment_id)
                return await context.effect(ReadModelRing(attachment_id=attachment_id))
            case ListAttachments():
                return Attachments(attachments=tuple(self._state.attachments.values()))
            case _:
                raise AssertionError(type(message))

    async def _attach(self, message: Attach, context: Context) -> Message:
        for info in self._state.attachments.values():
            if message.model_id == info.model_id or message.attachment_id == info.attachment_id:
                text = f"model {message.model_id} already streams as {info.attachment_id}; detach that first"
                raise error(Stage.TRANSPORT, Code.ALREADY_ATTACHED, text, attachment=info.attachment_id)
        return self._note(await context.effect(AttachModel(request=message)))

    async def _rebase(self, message: Rebase, context: Context) -> Message:
        async with context.critical("rebase"):
            rebased = await context.effect(RebaseModel(model_id=message.model_id, lease_id=message.lease_id))
            assert isinstance(rebased, Rebased)
            if rebased.info is not None:
                self._state.attachments[rebased.info.attachment_id] = rebased.info
        return rebased

    async def _detach(self, message: Detach, context: Context) -> Message:
        if message.attachment_id not in self._state.attachments:
            return Detached(attachment_id=message.attachment_id, known=False)
        async with context.critical("detach"):
            detached = await context.effect(DetachModel(attachment_id=message.attachment_id, terminal=message.terminal))
            self._state.attachments.pop(message.attachment_id, None)
            return detached

    def _known(self, attachment_id: str) -> None:
        if attachment_id not in self._state.attachments:
            text = f"no model streams as {attachment_id}; attach one first"
            raise error(Stage.TRANSPORT, Code.NOT_ATTACHED, text, attachment=attachment_id)

    def _note(self, outcome: Message) -> Attached:
        assert isinstance(outcome, Attached)
        self._state.attachments[outcome.info.attachment_id] = outcome.info
        return outcome

    async def perform(self, effect: Message, context: Context) -> Message:
        """Carry out an effect on a device, off the loop; an attach that was cancelled is undone."""
        port = self._port
        match effect:
            case ListModelAttachments():
                return port.attachments()
            case AttachModel():
                return await context.blocking(lambda budget: port.attach(effect, budget), self._undo)
            case DetachModel():
                return await context.blocking(lambda _: port.detach(effect))
            case RebaseModel():
                return await context.blocking(lambda budget: port.rebase(effect, budget))
            case AnnounceModel():
                return port.announce(effect)
            case ReadModelRing():
                return port.read(effect)
            case _:
                raise AssertionError(type(effect))

    def _undo(self, attached: Attached) -> None:
        self._port.detach(DetachModel(attachment_id=attached.info.attachment_id, terminal=False))

    async def stopped(self, context: Context) -> None:
        """Attachments stand in the resource table and outlive this incarnation."""
