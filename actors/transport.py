"""TransportActor: devices, slots and streams of attached models, and the order in which they go down."""

from contextlib import nullcontext
from typing import Protocol

from ..messages.base import Message
from ..messages.budget import Budget
from ..messages.transport import (
    Announced,
    AnnounceForwards,
    AnnounceModel,
    Attach,
    Attached,
    Attachments,
    AttachModel,
    Detach,
    Detached,
    DetachModel,
    Forget,
    ForgetModel,
    Forgotten,
    ListAttachments,
    ListModelAttachments,
    ReadModelRing,
    ReadRing,
    Rebase,
    Rebased,
    RebaseModel,
    ReleaseModelResident,
    ReleaseResident,
    ResidentReleased,
    Ring,
)
from .kernel.contract import Context
from .turns import Line, Turns


class DevicePort(Protocol):
    """Streaming as the actor sees it: blocking calls that name models, leases and attachments by id."""

    def attach(self, effect: AttachModel, budget: Budget) -> Attached:
        """Open the device, build slots, hook the blocks; after an error the model is as it was."""
        ...

    def detach(self, effect: DetachModel) -> Detached:
        """Drain copies, remove hooks, free slots, close the device, let the lease go; always to its end."""
        ...

    def forget(self, effect: ForgetModel) -> Forgotten:
        """Detach a model, drop it and let its lease go; after an error it is still there. Waits only to detach."""
        ...

    def rebase(self, effect: RebaseModel, budget: Budget) -> Rebased:
        """Between two forwards, bind the model and its ring to the lease, and hold the lease for both."""
        ...

    def announce(self, effect: AnnounceModel) -> Announced:
        """Tell the ring how many forwards follow; may wait for a forward that waits for other ranks."""
        ...

    def release(self, effect: ReleaseModelResident) -> ResidentReleased:
        """Let kept blocks leave the device until the next forward."""
        ...

    def read(self, effect: ReadModelRing) -> Ring:
        """Counters; may wait for a forward that waits for other ranks."""
        ...

    def attachments(self) -> Attachments:
        """What stands in the resource table."""
        ...


class TransportActor:
    """Owns attachments; they stand in the resource table, so that a new incarnation finds them.

    The per-block hot path sends no message: a forward touches the ring directly.

    What changes a model, and may wait for its forwards, is done in the order of the messages, and beside what changes
    other models: a long forward of one holds up no other. Attaches that meet other ranks are also done in the order of
    their messages, whatever their models, since the ranks must meet for the same one.
    """

    def __init__(self, port: DevicePort) -> None:
        self._port = port
        self._turns = Turns()
        self._meetings = Line()
        self._models: dict[str, str] = {}
        """By the attachments that this incarnation made or looked for."""

    async def started(self, context: Context) -> None:
        """The resource table knows what is attached."""

    async def receive(self, message: Message, context: Context) -> Message | None:
        """Answer one request."""
        match message:
            case Attach(model_id=model_id, gather=gather):
                meets = gather is not None and len(gather.ranks) > 1
                with self._meetings.join() if meets else nullcontext() as place:
                    async with self._turns.of(model_id):
                        if place is not None:
                            await place.first()
                        return self._note(await context.effect(AttachModel(request=message)))
            case Detach(attachment_id=attachment_id, terminal=terminal):
                async with context.critical("detach"), self._turns.of(await self._model_of(attachment_id, context)):
                    detached = await context.effect(DetachModel(attachment_id=attachment_id, terminal=terminal))
                    self._models.pop(attachment_id, None)
                    return detached
            case Forget(model_id=model_id):
                async with context.critical("forget"), self._turns.of(model_id):
                    forgotten = await context.effect(ForgetModel(model_id=model_id))
                    self._models = {each: of for each, of in self._models.items() if of != model_id}
                    return forgotten
            case Rebase(model_id=model_id, lease_id=lease_id):
                async with self._turns.of(model_id):
                    return await context.effect(RebaseModel(model_id=model_id, lease_id=lease_id))
            case AnnounceForwards(attachment_id=attachment_id, forwards=forwards):
                return await context.effect(AnnounceModel(attachment_id=attachment_id, forwards=forwards))
            case ReleaseResident(attachment_id=attachment_id):
                async with self._turns.of(await self._model_of(attachment_id, context)):
                    return await context.effect(ReleaseModelResident(attachment_id=attachment_id))
            case ReadRing(attachment_id=attachment_id):
                return await context.effect(ReadModelRing(attachment_id=attachment_id))
            case ListAttachments():
                return await context.effect(ListModelAttachments())
            case _:
                raise AssertionError(type(message))

    def _note(self, attached: Message) -> Message:
        assert isinstance(attached, Attached)
        self._models[attached.info.attachment_id] = attached.info.model_id
        return attached

    async def _model_of(self, attachment_id: str, context: Context) -> str:
        """Whose turn it takes to change an attachment; one that is not there has no model, and nothing to change."""
        if attachment_id not in self._models:
            listed = await context.effect(ListModelAttachments())
            assert isinstance(listed, Attachments)
            self._models |= {each.attachment_id: each.model_id for each in listed.attachments}
        return self._models.get(attachment_id, attachment_id)

    async def perform(self, effect: Message, context: Context) -> Message:
        """Carry out an effect on a device, off the loop.

        An attach that was cancelled is undone. A re-bind stops waiting when it is cancelled; once it began it is
        carried to its end and stands.
        """
        port = self._port
        match effect:
            case ListModelAttachments():
                return port.attachments()
            case AttachModel():
                return await context.blocking(lambda budget: port.attach(effect, budget), self._undo)
            case DetachModel():
                return await context.blocking(lambda _: port.detach(effect))
            case ForgetModel(model_id=model_id):
                if any(each.model_id == model_id for each in port.attachments().attachments):
                    return await context.blocking(lambda _: port.forget(effect))
                return port.forget(effect)
            case RebaseModel():
                return await context.blocking(lambda budget: port.rebase(effect, budget))
            case AnnounceModel():
                return await context.blocking(lambda _: port.announce(effect))
            case ReleaseModelResident():
                return await context.blocking(lambda _: port.release(effect))
            case ReadModelRing():
                return await context.blocking(lambda _: port.read(effect))
            case _:
                raise AssertionError(type(effect))

    def _undo(self, attached: Attached) -> None:
        self._port.detach(DetachModel(attachment_id=attached.info.attachment_id, terminal=False))

    async def stopped(self, context: Context) -> None:
        """Attachments stand in the resource table and outlive this incarnation."""
