"""C4: a rank that is lost, stopped, late or astray ends the others by the deadline, all with one code."""

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hostweights import Config, Mode, ProductionPolicy, open_sync
from rank_kit import FAULTY_BLOCKS, pool
from tiny_model import factory, make_checkpoint

FAULTS = {
    "killed": "group_broken",
    "stopped": "group_broken",
    "late": "group_broken",
    "raised": "group_broken",
    "astray": "group_mismatch",
}
NAMED = ("killed", "stopped")
"""Faults that the host can tell of a process."""
CODE = "import sys\nserve_faulty(sys.argv[4], sys.argv[5], int(sys.argv[6]), sys.argv[7], int(sys.argv[8]))"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store that holds the model, and its checkpoint."""
    folder = tmp_path_factory.mktemp("published")
    source, root = make_checkpoint(folder, FAULTY_BLOCKS), folder / "store"
    policy = ProductionPolicy(build_before_load=True)
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED, production=policy)) as host:
        host.unload(host.load(factory(FAULTY_BLOCKS), source))
    return root, source


@pytest.mark.parametrize("fault", FAULTS)
@settings(
    max_examples=2,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(size=st.integers(2, 4), data=st.data())
def test_C4_all_others_end_with_the_same_code_and_hold_nothing(
    published: tuple[Path, Path], fault: str, size: int, data: st.DataObject
) -> None:
    root, source = published
    bad = data.draw(st.integers(0, size - 1))
    block = data.draw(st.integers(0, FAULTY_BLOCKS - 1))
    with pool(size, CODE, root, source, bad, fault, block) as ranks:
        others = [rank for rank in range(size) if rank != bad]
        for rank in others:
            _check(ranks.children[rank].line(), FAULTS[fault], bad if fault in NAMED else None)
            assert ranks.children[rank].wait() == 0
        culprit = ranks.children[bad]
        if fault == "stopped":
            culprit.signal(signal.SIGCONT)
        if fault == "late":
            culprit.tell()
        if fault == "killed":
            assert culprit.wait() == -signal.SIGKILL
        else:
            _check(culprit.line(), "raised" if fault == "raised" else FAULTS[fault])
            assert culprit.wait() == 0
    _leased_by_nobody(root, source)


def _check(line: str, code: str, lost: int | None = None) -> None:
    how, again, left = line.split(" | ")
    assert how.startswith(code), line
    assert lost is None or f"rank {lost} was lost (process " in how, line
    assert "'blocks." in how or how == "raised", line
    assert again == code, line
    assert left == "0 []", line


def _leased_by_nobody(root: Path, source: Path) -> None:
    """Another process can use the store as ever."""
    with open_sync(Config(root=str(root), mode=Mode.REQUIRED)) as host:
        model = host.load(factory(FAULTY_BLOCKS), source)
        assert model.warm
        assert len(host.leases()) == 1
        host.unload(model)


@pytest.mark.parametrize("copies_before", [0, 3, 6])
def test_C4_a_copy_that_fails_on_one_rank_fails_that_forward_on_all_and_no_later_one(copies_before: int) -> None:
    with pool(3, f"serve_copy_failure({copies_before})") as ranks:
        assert ranks.lines() == ["['copy_failed', 'none'] 1 [True, True, True]"] * 3


@pytest.mark.parametrize("again", ["again", "on", "together"])
def test_C4_a_whole_block_that_fails_on_one_rank_alone_fails_its_forward_and_no_later_one_on_any_rank(
    again: str,
) -> None:
    with pool(2, f"serve_failure_alone({again!r})") as ranks:
        assert ranks.lines() == ["wrong: []"] * 2
