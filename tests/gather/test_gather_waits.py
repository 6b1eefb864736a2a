"""C4: who waits for other ranks waits no longer than its caller does, and leaves nobody waiting."""

from pathlib import Path

import pytest

from hostweights import Config, warm
from rank_kit import FAULTY_BLOCKS, pool
from tiny_model import Tiny, make_checkpoint

LEAD = "import sys\nfrom wait_kit import serve_conceding, serve_stopped, serve_waits\n"


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Path]:
    source, root = make_checkpoint(tmp_path, FAULTY_BLOCKS), tmp_path / "store"
    warm(Config(root=str(root)), lambda: Tiny(FAULTY_BLOCKS), source)
    return root, source


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("load timeout 0", "deadline_exceeded"),
        ("load cancel 1", "cancelled"),
        ("load close 0", "actor_stopped"),
        ("attach timeout 1", "deadline_exceeded"),
        ("attach cancel 0", "cancelled"),
        ("attach close 1", "actor_stopped"),
    ],
)
def test_C4_a_rank_whose_others_do_not_come_ends_with_its_caller(
    published: tuple[Path, Path], what: str, told: str
) -> None:
    with pool(
        2,
        LEAD + "serve_waits(*sys.argv[4:7])",
        *published,
        what,
    ) as ranks:
        assert ranks.children[int(what.split()[-1])].line() == f"{told} []"
        for child in ranks.children:
            child.tell()


@pytest.mark.parametrize(("end", "told"), [("timeout", "deadline_exceeded"), ("cancel", "cancelled")])
def test_C4_a_load_that_its_caller_ends_is_no_longer_waited_for(
    published: tuple[Path, Path], end: str, told: str
) -> None:
    with pool(
        3,
        LEAD + "serve_conceding(*sys.argv[4:7])",
        *published,
        end,
    ) as ranks:
        assert ranks.lines() == ["restore_plan_failed", "restore_plan_failed", told]
        for child in ranks.children:
            child.tell()


@pytest.mark.parametrize("exchanges", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize("end", ["timeout", "cancel", "close"])
def test_C4_an_attach_ends_with_its_caller_although_a_rank_stops_after_they_met(
    published: tuple[Path, Path], exchanges: int, end: str
) -> None:
    code = LEAD + "serve_stopped(sys.argv[4], sys.argv[5], int(sys.argv[6]), sys.argv[7])"
    told = {"timeout": {"deadline_exceeded", "group_broken"}, "cancel": {"cancelled"}, "close": {"actor_stopped"}}
    with pool(2, code, *published, exchanges, end) as ranks:
        assert ranks.children[0].line() in told[end]
