"""What a model shows in place of its packed tensors until they are unpacked."""

from collections.abc import Sequence

import torch

from ...messages.manifest import PackedEntry
from ...messages.plan import BlockTensor


def stand_ins_for(entries: Sequence[PackedEntry]) -> Sequence[torch.Tensor]:
    """Tensors full of NaN in place of packed ones; each has an address of its own and costs no memory."""
    if not entries:
        return ()
    from ...dlo.packed.stand_ins import stand_ins  # streaming's code, which most loads do without

    planned = [
        BlockTensor(
            name=entry.name,
            offset=0,
            size_bytes=entry.size_bytes,
            shape=entry.shape,
            dtype=entry.dtype,
            stride=entry.stride,
        )
        for entry in entries
    ]
    return stand_ins([planned])[0]
