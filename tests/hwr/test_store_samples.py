"""Artifacts as each version of the format wrote them: they must be readable for ever.

``samples/format-1`` holds a root as it was written. A new format gets a directory of its own; old ones never change.
"""

import shutil
from pathlib import Path

import pytest

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.identity import artifact_key
from hostweights.hwr.lease import ArtifactLease
from hostweights.messages.config import Validation
from store_kit import assert_right_values, build, make_identity, open_store

SAMPLES = sorted((Path(__file__).parent / "samples").iterdir())


def test_A4_there_is_a_sample_of_every_format() -> None:
    assert [sample.name for sample in SAMPLES] == ["format-1"]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_A4_an_artifact_written_by_an_earlier_version_is_leased_and_whole(tmp_path: Path, sample: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(sample, root)
    store = open_store(root)
    lease = store.lookup(make_identity(), Validation.FULL, PlainBudget(), lease_id="x")
    assert isinstance(lease, ArtifactLease)
    assert lease.manifest.key == artifact_key(make_identity())
    assert (lease.generation, lease.publication_id) == ("00000002", "89b2f5d6a1a94c6f9a5c5f5a7d0e1b23")
    assert_right_values(lease)
    assert [(g.generation, g.condemned) for g in store.list_stored()] == [("00000002", False), ("00000001", True)]
    lease.close()
    assert not build(store).built
    store.close()
