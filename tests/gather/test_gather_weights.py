"""C4: ranks gather one and the same weights, each from where it has them."""

from pathlib import Path

import pytest

from gather_kit import record_of
from hostweights import Config, warm
from rank_kit import FAULTY_BLOCKS, pool
from tiny_model import Tiny, make_checkpoint

CODE = "import sys\nfrom gather_kit import serve_weights\nserve_weights(*sys.argv[4:])"


@pytest.fixture
def checkpoints(tmp_path: Path) -> list[Path]:
    """Two revisions of one model, equal in layout."""
    folders = [tmp_path / name for name in ("old", "new")]
    for folder in folders:
        folder.mkdir()
    return [make_checkpoint(folder, FAULTY_BLOCKS, seed=seed) for seed, folder in enumerate(folders)]


def publish(root: Path, rank: int, source: Path, name: str = "tiny") -> None:
    warm(Config(root=f"{root}-{rank}"), lambda: Tiny(FAULTY_BLOCKS), source, name=name, record=record_of(name))


def test_C4_artifacts_of_equal_layout_and_other_bytes_are_refused_on_all_ranks(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    for rank, source in enumerate(checkpoints):
        publish(tmp_path / "store", rank, source)
    sources = [f"required:{source}:tiny" for source in checkpoints]
    with pool(2, CODE, tmp_path / "store", *sources) as ranks:
        for line in ranks.lines():
            assert line.startswith("True group_mismatch the ranks attach different weights of equal layout")


def test_C4_private_weights_of_another_revision_are_refused_too(tmp_path: Path, checkpoints: list[Path]) -> None:
    publish(tmp_path / "store", 0, checkpoints[0])
    sources = [f"required:{checkpoints[0]}:tiny", f"preferred:{checkpoints[1]}:tiny", f"disabled:{checkpoints[0]}:tiny"]
    with pool(3, CODE, tmp_path / "store", *sources) as ranks:
        for line in ranks.lines():
            assert line.startswith("True group_mismatch")
            assert "rank 2 unknown ones" in line


def test_C4_private_and_leased_tensors_of_the_same_weights_are_gathered_through_an_adoption(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    source = checkpoints[0]
    publish(tmp_path / "store", 0, source)
    sources = [f"{mode}:{source}:tiny" for mode in ("required", "preferred", "disabled")]
    with pool(3, CODE, tmp_path / "store", *sources) as ranks:
        assert ranks.lines() == ["True attached"] * 3


def test_C4_the_same_weights_are_gathered_by_whatever_name_each_rank_has_them(
    tmp_path: Path, checkpoints: list[Path]
) -> None:
    for rank, name in enumerate(["tiny", "replica"]):
        publish(tmp_path / "store", rank, checkpoints[0], name)
    sources = [f"required:{checkpoints[0]}:{name}" for name in ("tiny", "replica")]
    with pool(2, CODE, tmp_path / "store", *sources) as ranks:
        assert ranks.lines() == ["True attached"] * 2
