"""Which ranks share out a model's blocks under AllGather, from a topology or from what the engine has."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..messages.failure import Code, Stage, error
from ..messages.topology import Topology
from ..messages.transport import GatherPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """The ranks, the engine's process group whose ranks they are, if it has one, and how long they wait for each other.

    ``choose``: the ranks measure whether gathering or whole blocks, copied by each rank alone, make forwards faster.
    When the copy of a whole block fails on one rank alone, it is whole blocks for all of them until they attach again.
    Other waits and choices than the usual: ``dataclasses.replace``.

    ``group`` only says who they are, in its order, and stays the engine's, who may use it as it likes while a model is
    attached. Blocks travel over connections of their own, on GPUs by a communicator of their own (NCCL), which the
    attach makes and the detach, or the loss of a rank, ends.
    """

    ranks: tuple[int, ...]
    group: ProcessGroup | None = None
    deadline_s: float = 60.0
    join_s: float = 300.0
    choose: bool = False

    def __post_init__(self) -> None:
        """Raise HostWeightsError(invalid_config) unless ``ranks`` are the group's, in its order."""
        if self.group is None:
            return
        found = _ranks(self.group)
        if tuple(self.ranks) != found:
            text = f"the ranks are {self.ranks} and those of the group {found}: use WeightGroup.of_group"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)

    @classmethod
    def of_topology(cls, topology: Topology, rank: int) -> Self:
        """The data parallel ranks of ``rank``, else its sequence parallel ones, never tensor parallel ones.

        Raises HostWeightsError(invalid_config) under HSDP, whose parameters are shards already.
        """
        return cls(ranks=topology.weight_ranks(rank))

    @classmethod
    def of_group(cls, group: ProcessGroup) -> Self:
        """The ranks of a process group."""
        return cls(ranks=_ranks(group), group=group)

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh, dim: str | None = None) -> Self:
        """The ranks along one dimension of a device mesh; a mesh of several dimensions wants its name."""
        if dim is None and mesh.ndim != 1:
            text = f"the mesh has the dimensions {mesh.mesh_dim_names}; say which of them shares out weights"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
        group = mesh.get_group(dim)
        return cls(ranks=_ranks(group), group=group)

    @property
    def policy(self) -> GatherPolicy:
        """As messages say it."""
        return GatherPolicy(ranks=self.ranks, deadline_s=self.deadline_s, join_s=self.join_s, choose=self.choose)


def _ranks(group: ProcessGroup) -> tuple[int, ...]:
    try:
        found: Sequence[int] = dist.get_process_group_ranks(group)
    except (KeyError, TypeError) as wrong:
        text = f"{group!r} is no process group of torch.distributed"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text) from wrong
    return tuple(found)
