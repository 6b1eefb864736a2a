"""C8, C4: ranks gather the parts of FP8 weights, and compute what the model quantised in memory does."""

from pathlib import Path

import pytest

from hostweights import Config, Representation, warm
from loader_models import save
from quant_kit import REPRESENTATIONS, factory, plain_stack
from rank_kit import pool

RANKS = """
from hostweights import Config, Mode, Representation, WeightGroup, open_sync
from quant_kit import factory, in_memory, run
root, source, representation = sys.argv[4], sys.argv[5], Representation(sys.argv[6])
expected = run(in_memory(representation))
with open_sync(Config(root=root, mode=Mode.REQUIRED, representation=representation)) as host:
    loaded = host.load(factory, source)
    group = WeightGroup(ranks=tuple(range(dist.get_world_size())), deadline_s=20.0)
    attachment = host.attach(loaded, device="cpu", gather=group)
    equal = [torch.equal(run(loaded.module), expected) for _ in range(3)]
    ranks = attachment.info.ranks
    host.detach(attachment)
    equal.append(torch.equal(run(loaded.module), expected))
    host.unload(loaded)
say(f"{equal} {ranks} {library_threads()}")
"""


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_C4_gathered_fp8_is_the_model_quantised_in_memory_to_the_bit(
    tmp_path: Path, representation: Representation
) -> None:
    checkpoint = save(tmp_path / "model.safetensors", plain_stack().state_dict())
    root = tmp_path / "store"
    warm(Config(root=str(root), representation=representation), factory, checkpoint)
    with pool(2, RANKS, root, checkpoint, representation.value) as ranks:
        assert ranks.lines() == ["[True, True, True, True] 2 []"] * 2
