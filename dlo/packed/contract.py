"""What the ring's driver must know of a backing whose blocks are packed, and nothing else."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from ...messages.transport import PackingInfo, RegistrationPolicy
from ..contract import Device, HostBacking, Stream

if TYPE_CHECKING:
    from ..transfer import Transfer

OpenTransfer = Callable[[HostBacking, Device, Stream, RegistrationPolicy], "Transfer"]


@runtime_checkable
class UnpackingBacking(Protocol):
    """A host backing of packed blocks: parked tensors of what is packed stand in for values and hold NaN.

    So such a parameter that is read outside its block's forward is wrong loudly, and costs no memory.
    """

    def open_transfer(
        self, plain: OpenTransfer, device: Device, copies: Stream, policy: RegistrationPolicy
    ) -> "Transfer":
        """A transfer of this backing; ``plain`` opens the one that moves packed bytes."""
        ...

    def restored(self, block: int) -> Mapping[str, torch.Tensor]:
        """The block's tensors by the plan's names, unpacked into private host memory."""
        ...


@runtime_checkable
class UnpackingTransfer(Protocol):
    """A transfer that unpacks."""

    def packing(self) -> PackingInfo:
        """What is copied and unpacked, how long both take, and what was decided from that."""
        ...
