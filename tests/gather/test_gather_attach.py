"""C4: what ranks must have in common when they attach, and what they may do at different moments."""

from pathlib import Path

import pytest

from rank_kit import pool


def test_C4_models_that_differ_are_refused_on_all_ranks_with_the_block_named() -> None:
    with pool(2, "serve_attach(8, 16 + dist.get_rank(), 8)") as ranks:
        for line in ranks.lines():
            assert line.startswith("True [] group_mismatch block 'first.1'")


def test_C4_models_of_different_depth_are_refused_on_all_ranks() -> None:
    with pool(2, "serve_attach(*[8] * (2 + dist.get_rank()))") as ranks:
        for line in ranks.lines():
            assert line.startswith("True [] group_mismatch")
            assert "rank 0 2, rank 1 3" in line


def test_C4_a_group_that_others_do_not_join_fails_by_the_deadline() -> None:
    with pool(2, "serve_join(1.0)") as ranks:
        assert ranks.children[0].line().startswith("group_broken not all of the ranks [0, 1]")
        for child in ranks.children:
            child.tell()


@pytest.mark.parametrize("choose", [False, True])
def test_C4_ranks_move_to_equal_files_at_different_moments_and_to_no_others(tmp_path: Path, *, choose: bool) -> None:
    with pool(2, f"import sys\nserve_rebase(sys.argv[4], choose={choose})", tmp_path) as ranks:
        assert ranks.lines() == ["True unsupported"] * 2


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_C4_a_rank_that_came_in_vain_meets_the_others_when_they_come(bad_rank: int) -> None:
    with pool(2, f"serve_vain({bad_rank})") as ranks:
        lines = ranks.lines()
        assert lines.pop(bad_rank) == "['group_broken', 'group_broken'] [(0,), (1,)]"
        assert lines == ["[] [(0,), (1,)]"]


@pytest.mark.parametrize("room", [1, 3])
def test_C4_an_attach_that_fails_on_one_rank_fails_on_all(room: int) -> None:
    with pool(3, f"serve_room({room})") as ranks:
        assert ranks.lines() == ["group_broken True []"] * 2 + ["no room True []"]


@pytest.mark.parametrize(
    ("each_ranks", "said"),
    [
        ("(2, False), (4, False)", "group_mismatch the ranks attach with different slots (rank 0 2, rank 1 4)"),
        ("(2, False), (2, True)", "group_mismatch the ranks attach with different choose (rank 0 0, rank 1 1)"),
        ("(None, False), (2, False)", "attached"),
        ("(4, True), (9, True)", "attached"),
    ],
)
def test_C4_arguments_that_must_be_equal_are_compared_when_ranks_attach(each_ranks: str, said: str) -> None:
    with pool(2, f"serve_arguments({each_ranks})") as ranks:
        for line in ranks.lines():
            assert line.startswith(said)
