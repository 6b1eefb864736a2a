"""A thread's own default dtype: what torch would have made of the same calls, and nothing in other threads."""

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from hostweights.hwr.build_mode import default_dtype


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3),
        lambda: torch.tensor([0.1, 0.2]),
        lambda: torch.arange(0, 1, 0.1),
        lambda: torch.arange(4),
        lambda: torch.arange(4).float(),
        lambda: torch.arange(4).to(torch.float32),
        lambda: torch.zeros(2, dtype=torch.float32),
        lambda: torch.zeros(2, dtype=torch.float64) + 1,
        lambda: 1.0 / (10_000 ** (torch.arange(0, 8, 2, dtype=torch.int64).to(dtype=torch.float) / 8)),
        lambda: torch.arange(4) / 8,
        lambda: torch.cat([torch.zeros(2, dtype=torch.float32)]),
        lambda: nn.Linear(2, 3).weight.detach() * 0,
        lambda: nn.LayerNorm(2).weight.detach(),
        lambda: torch.tensor([1, 2]),
        lambda: torch.tensor([True]),
    ],
)
def test_B9_tensors_are_those_of_torchs_default_dtype(make: Callable[[], torch.Tensor]) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        expected = make()
    finally:
        torch.set_default_dtype(torch.float32)
    with default_dtype(torch.bfloat16):
        made = make()
    assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
    assert torch.equal(made, expected)


def test_B8_memory_that_nobody_filled_is_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a conversion touches every page")

    monkeypatch.setattr(torch.Tensor, "to", refuse)
    with default_dtype(torch.bfloat16):
        assert torch.empty(1024).dtype is torch.bfloat16
        assert torch.empty(2, dtype=torch.float64).dtype is torch.float64


def test_B9_other_threads_keep_their_default() -> None:
    found: list[torch.dtype] = []
    with default_dtype(torch.bfloat16):
        thread = threading.Thread(target=lambda: found.append(torch.ones(2).dtype))
        thread.start()
        thread.join()
    assert found == [torch.float32]
    assert torch.ones(2).dtype is torch.float32
