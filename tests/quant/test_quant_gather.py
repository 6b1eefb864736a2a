"""C8, C4: ranks gather the parts of FP8 weights, and compute what the model quantised in memory does."""

from pathlib import Path

import pytest

from hostweights import Config, Representation, warm
from loader_models import save
from quant_kit import REPRESENTATIONS, factory, plain_stack
from rank_kit import pool


@pytest.mark.parametrize("representation", REPRESENTATIONS)
def test_C4_gathered_fp8_is_the_model_quantised_in_memory_to_the_bit(
    tmp_path: Path, representation: Representation
) -> None:
    checkpoint = save(tmp_path / "model.safetensors", plain_stack().state_dict())
    root = tmp_path / "store"
    warm(Config(root=str(root), representation=representation), factory, checkpoint)
    code = "from gather_kit import serve_quantised\nserve_quantised(*sys.argv[4:7])"
    with pool(2, code, root, checkpoint, representation.value) as ranks:
        assert ranks.lines() == ["[True, True, True, True] 2 []"] * 2
