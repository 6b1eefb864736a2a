"""A GPU that counts and packs instead of the CPU, where there is one: the bytes are the same."""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import torch

T = TypeVar("T")

_LOG = logging.getLogger("hostweights")

_LEAST_BYTES: Final = 1024**2
"""Less is done sooner than it is sent."""
_ROOM: Final = 6
"""Device memory that packing takes, in sizes of the tensor."""


class Helper:
    """Where one publication counts and packs: on a stream of its own, beside whatever the GPU computes.

    A GPU that fails is left out from then on, and one that is full for that tensor.
    """

    def __init__(self) -> None:
        self._device = torch.device("cuda") if torch.cuda.is_available() else None
        self._stream: torch.cuda.Stream | None = None

    def run(self, bits: torch.Tensor, work: Callable[[torch.Tensor], T]) -> T:
        """What ``work`` makes of ``bits``, in host memory; ``bits`` are on a GPU if there is room, else on the CPU."""
        if self._device is None or bits.nbytes < _LEAST_BYTES:
            return work(bits)
        try:
            free_bytes, _ = torch.cuda.mem_get_info(self._device)
            if free_bytes < _ROOM * bits.nbytes:
                return work(bits)
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # torch's
            with torch.inference_mode(mode=False), torch.cuda.stream(self._stream):
                return work(bits.to(self._device))
        except RuntimeError as failure:  # torch's own, and its children: out of memory, no driver, a lost device
            _LOG.warning("the GPU could not pack, the CPU does it from here on: %s", failure)
            self._device = None
            return work(bits)

    def close(self) -> None:
        """Give the GPU's memory back, for others to use."""
        if self._stream is not None:
            torch.cuda.empty_cache()
