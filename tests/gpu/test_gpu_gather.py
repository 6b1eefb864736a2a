"""AllGather over NCCL: equal to the bit on every rank, and nobody waits for ever for one that is lost."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hostweights import Config, Mode, ProductionPolicy, Representation, open_sync, warm
from loader_models import save
from quant_kit import REPRESENTATIONS, plain_stack
from quant_kit import factory as quantisable
from rank_kit import FAULTY_BLOCKS, Pool, pool
from tiny_model import factory, make_checkpoint

GPUS = torch.cuda.device_count()
SIZES = [size for size in (2, 3, 4) if size <= GPUS] or [2]
OWN_GPU = "torch.cuda.set_device(dist.get_rank())"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
    with pool(request.param, f"{OWN_GPU}\nserve_examples()") as made:
        yield made


@pytest.mark.parametrize("seed", range(8))
def test_C4_any_blocks_any_order_any_slots_are_bit_equal_over_nccl(ranks: Pool, seed: int) -> None:
    choices = random.Random(seed)
    first = [choices.randint(1, 2000) for _ in range(choices.randint(1, 5))]
    second = [choices.randint(1, 900) for _ in range(choices.randint(0, 3))]
    count = len(first) + len(second)
    orders = [list(range(count)), [choices.randrange(count) for _ in range(9)], list(range(count)), list(range(count))]
    example = {
        "first": first,
        "second": second,
        "orders": orders * 5,
        "slots": choices.randint(2, 4),
        "seed": seed,
        "kind": ("direct", "staged", "private")[seed % 3],
        "choose": seed % 2 == 1,
        "device": "cuda",
    }
    assert set(ranks.ask(["model", example])) == {""}


@pytest.mark.parametrize("fault", ["killed", "stopped", "late", "astray"])
def test_C4_a_lost_rank_ends_the_others_and_leaves_their_gpus_usable(tmp_path: Path, fault: str) -> None:
    source, root = make_checkpoint(tmp_path, FAULTY_BLOCKS), tmp_path / "store"
    policy = ProductionPolicy(build_before_load=True)
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED, production=policy)) as host:
        host.unload(host.load(factory(FAULTY_BLOCKS), source))
    code = "import sys\nserve_faulty(sys.argv[4], sys.argv[5], 1, sys.argv[6], 2, 'cuda')"
    expected = "group_mismatch" if fault == "astray" else "group_broken"
    with pool(SIZES[-1], code, root, source, fault) as ranks:
        for rank, child in enumerate(ranks.children):
            if rank != 1:
                assert child.line().startswith(expected)
                assert child.wait() == 0
        if fault == "stopped":
            ranks.children[1].signal(signal.SIGCONT)
        if fault == "late":
            ranks.children[1].tell()


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_C8_gathered_fp8_is_the_model_quantised_in_memory_over_nccl(
    tmp_path: Path, representation: Representation
) -> None:
    checkpoint, root = save(tmp_path / "model.safetensors", plain_stack().state_dict()), tmp_path / "store"
    warm(Config(root=str(root), representation=representation), quantisable, checkpoint)
    code = f"{OWN_GPU}\nfrom gather_kit import serve_quantised\nserve_quantised(*sys.argv[4:8])"
    with pool(SIZES[-1], code, root, checkpoint, representation.value, "cuda") as ranks:
        assert ranks.lines() == [f"[True, True, True, True] {SIZES[-1]} []"] * SIZES[-1]


def test_B14_nccl_groups_and_meshes_say_the_ranks_and_stay_the_engines_who_uses_them_inside_forwards(
    tmp_path: Path,
) -> None:
    source, root = make_checkpoint(tmp_path, FAULTY_BLOCKS), tmp_path / "store"
    policy = ProductionPolicy(build_before_load=True)
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED, production=policy)) as host:
        host.unload(host.load(factory(FAULTY_BLOCKS), source))
    code = f"{OWN_GPU}\nfrom gather_kit import serve_given\nserve_given(*sys.argv[4:7])"
    with pool(SIZES[-1], code, root, source, "cuda", backend="cpu:gloo,cuda:nccl") as ranks:
        assert ranks.lines() == ["well"] * SIZES[-1]
