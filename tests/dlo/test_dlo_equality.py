"""C2: what is streamed computes what is resident, to the bit."""

import asyncio
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_fake import fake_device
from dlo_support import KINDS, ProbeDevice, Stack, discover, make_backing, run
from hostweights.dlo import Streamer, open_device

INTERRUPTS = (ValueError("block"), KeyboardInterrupt(), asyncio.CancelledError())


@st.composite
def _plays(draw: st.DrawFn) -> tuple[list[int], int, str, list[list[int]], list[tuple[int, int]]]:
    """Hidden sizes, slots, backing, an order per forward, and which (forward, block) raises."""
    hidden = draw(st.lists(st.integers(1, 40), min_size=1, max_size=9))
    blocks = st.integers(0, len(hidden) - 1)
    orders = draw(st.lists(st.lists(blocks, max_size=12), min_size=1, max_size=4))
    if draw(st.booleans()):
        orders = [list(range(len(hidden))) for _ in orders]
    raising = draw(st.lists(st.tuples(st.integers(0, len(orders) - 1), blocks), max_size=2))
    return hidden, draw(st.integers(2, 4)), draw(st.sampled_from(KINDS)), orders, raising


@settings(max_examples=80, deadline=None)
@given(play=_plays(), interrupt=st.sampled_from(INTERRUPTS), cuda=st.booleans())
def test_C2_any_order_any_backing_any_interruption_is_bit_equal(
    play: tuple[list[int], int, str, list[list[int]], list[tuple[int, int]]], interrupt: BaseException, cuda: bool
) -> None:
    hidden, slots, kind, orders, raising = play
    model = Stack(hidden)
    expected = [run(model, order) for order in orders]
    found = discover(model)
    with tempfile.TemporaryDirectory() as folder:
        device = ProbeDevice(fake_device() if cuda else open_device("cpu"))
        streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, Path(folder)), slots=slots)
        for number, order in enumerate(orders):
            for block in {block for forward, block in raising if forward == number}:
                model.block(block).raising = interrupt
                if block in order:
                    with pytest.raises(type(interrupt)):
                        run(model, order)
                model.block(block).raising = None
            assert torch.equal(run(model, order), expected[number])
        stats = streamer.stats()
        assert stats.hits + stats.copies >= sum(map(len, orders))
        assert len(device.staging) == (0 if kind == "direct" else min(len(hidden), 4))
        streamer.detach(terminal=False)
        assert torch.equal(run(model, orders[0]), expected[0])
        device.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [2, 3, 4])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 7])
def test_T55_T67_several_forwards_without_a_hint(
    device: ProbeDevice, tmp_path: Path, kind: str, slots: int, blocks: int
) -> None:
    model = Stack([3 + 5 * i for i in range(blocks)])
    expected = run(model)
    found = discover(model)
    streamer = Streamer.attach(model, found, device, make_backing(kind, model, found, tmp_path), slots=slots)
    for _ in range(4):
        assert torch.equal(run(model), expected)
    stats = streamer.stats()
    assert stats.forwards == 4
    assert stats.wrong_guesses == 0
    if blocks <= slots:
        assert stats.copies == blocks
    else:
        assert stats.copies >= 4 * blocks
        assert stats.hits == 4 * blocks  # every block was fetched before it was asked for
    streamer.detach(terminal=False)
