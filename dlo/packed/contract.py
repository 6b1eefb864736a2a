"""What the ring's driver must know of a backing whose blocks are packed, and nothing else."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from ...messages.transport import PackingInfo, RegistrationPolicy
from ..contract import Device, HostBacking, Stream

if TYPE_CHECKING:
    from ..transfer import Transfer

Room = Callable[[int], int]
OpenTransfer = Callable[[HostBacking, Device, Stream, RegistrationPolicy], "Transfer"]


@runtime_checkable
class UnpackingBacking(Protocol):
    """A host backing of packed blocks: parked tensors of what is packed stand in for values and hold NaN.

    So such a parameter that is read outside its block's forward is wrong loudly, and costs no memory.
    """

    @property
    def on_device(self) -> bool:
        """Whether packed bytes travel; else the host unpacks, and a block travels like any scattered one."""
        ...

    def open_transfer(
        self, plain: OpenTransfer, device: Device, copies: Stream, policy: RegistrationPolicy, room: Room
    ) -> "Transfer":
        """A transfer of this backing, which is ``on_device``.

        ``plain`` opens the one that moves packed bytes, into memory of ``room`` bytes for a block of so many.
        """
        ...

    def hand_back(self, block: int, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Give parameters that show the block's parked tensors, by the plan's names, their values: at the latest when
        somebody looks at them."""
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
