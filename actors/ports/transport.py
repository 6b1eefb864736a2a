"""The TransportActor's port, without the code of streaming until something streams.

That code is a quarter of the library, and a process that only loads models runs none of it.
"""

from functools import cached_property
from typing import TYPE_CHECKING

from ...messages.budget import Budget
from ...messages.transport import (
    Announced,
    AnnounceModel,
    Attached,
    Attachments,
    AttachModel,
    Detached,
    DetachModel,
    ForgetModel,
    Forgotten,
    ReadModelRing,
    Rebased,
    RebaseModel,
    ReleaseModelResident,
    ResidentReleased,
    Ring,
)
from ..resources import Resources

if TYPE_CHECKING:
    from .devices import LocalDevices


class DevicesOnDemand:
    """Implements ``actors.transport.DevicePort`` by ``LocalDevices``, which the first call that needs it imports."""

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    def attach(self, effect: AttachModel, budget: Budget) -> Attached:
        """``LocalDevices.attach``."""
        return self._devices.attach(effect, budget)

    def detach(self, effect: DetachModel) -> Detached:
        """``LocalDevices.detach``."""
        return self._devices.detach(effect)

    def forget(self, effect: ForgetModel) -> Forgotten:
        """Detach the model, and drop it from the resource table."""
        for info in self.attachments().attachments:
            if info.model_id == effect.model_id:
                self.detach(DetachModel(attachment_id=info.attachment_id, terminal=False))
        lease_id = self._resources.forget_model(effect.model_id)
        return Forgotten(model_id=effect.model_id, lease_id=lease_id)

    def rebase(self, effect: RebaseModel, budget: Budget) -> Rebased:
        """``LocalDevices.rebase``."""
        return self._devices.rebase(effect, budget)

    def announce(self, effect: AnnounceModel) -> Announced:
        """``LocalDevices.announce``."""
        return self._devices.announce(effect)

    def release(self, effect: ReleaseModelResident) -> ResidentReleased:
        """``LocalDevices.release``."""
        return self._devices.release(effect)

    def read(self, effect: ReadModelRing) -> Ring:
        """``LocalDevices.read``."""
        return self._devices.read(effect)

    def attachments(self) -> Attachments:
        """What stands in the resource table."""
        return Attachments(attachments=tuple(each.info for each in self._resources.attachments.all()))

    @cached_property
    def _devices(self) -> "LocalDevices":
        from .devices import LocalDevices

        return LocalDevices(self._resources)
