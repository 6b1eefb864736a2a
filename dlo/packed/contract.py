"""What the ring's driver must know of a backing whose blocks are packed, and nothing else."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from ...messages.transport import PackingInfo, RegistrationPolicy
from ..contract import Device, Stream

if TYPE_CHECKING:
    from ..transfer import Transfer, Way


@runtime_checkable
class UnpackingBacking(Protocol):
    """A host backing of packed blocks: parked tensors of what is packed stand in for values and hold NaN.

    So such a parameter that is read outside its block's forward is wrong loudly, and costs no memory.
    """

    @property
    def travels_packed(self) -> bool:
        """Whether packed bytes travel and the device unpacks them; otherwise ``pack`` does, on the host."""
        ...

    def open_transfer(self, way: "Way", device: Device, copies: Stream, policy: RegistrationPolicy) -> "Transfer":
        """A transfer of this backing, which travels packed; ``way`` opens the one that moves the packed bytes."""
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
