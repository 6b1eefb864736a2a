"""Models whose parameters another library has sharded over ranks already."""

import sys

from torch import nn

from ..messages.failure import Code, Stage, error


def refuse_sharded(module: nn.Module) -> None:
    """Raise HostWeightsError(unsupported) for a model of which fully_shard (FSDP2, HSDP) has taken the parameters.

    FSDP gathers from flat shards that it keeps for itself and never looks at where its parameters point, so a slot
    that a parameter is pointed at would not be read, and the host or device copy of the shard would stay.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return  # nothing can be sharded; the import takes long
    from torch.distributed.tensor import DTensor

    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or isinstance(parameter.data, DTensor):
            text = (
                f"parameter {name!r} is a shard that fully_shard (FSDP2, HSDP) gathers from storage of its own, so "
                "streaming would move bytes that no forward reads; use its CPUOffloadPolicy, or attach the model "
                "without fully_shard and let AllGather share out the blocks"
            )
            raise error(Stage.TRANSPORT, Code.UNSUPPORTED, text, tensor=name)
