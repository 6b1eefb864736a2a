"""C4: who waits for other ranks waits no longer than its caller does, and leaves nobody waiting."""

import gc
import threading
import weakref
from pathlib import Path
from typing import NoReturn

import pytest

from hostweights import Code, Config, HostWeightsError, warm
from hostweights.dlo.gather.ranks import RankGroup
from hostweights.hwr.budget import PlainBudget
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


class Work:
    """What the other rank has not answered yet; whoever waits inside it aborts an interpreter that ends."""

    def __init__(self) -> None:
        self.over = False

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> NoReturn:
        raise AssertionError("inside torch")


class Gloo:
    """A group's end."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def allgather(self, *_: object) -> Work:
        return self.work


def test_C4_what_is_left_behind_holds_the_group_until_it_has_ended_and_waits_outside_of_torch() -> None:
    work = Work()
    group = Gloo(work)
    seen = weakref.ref(group)
    ranks = RankGroup((0, 1), 0, group, 60.0)  # type: ignore[arg-type]  # what is used of a group
    del group
    with pytest.raises(HostWeightsError) as ended:
        ranks.exchange([0], "waiting", None, PlainBudget(0.01))
    assert ended.value.code is Code.DEADLINE_EXCEEDED
    ended.value.__traceback__ = None
    ranks.close()
    assert seen() is not None
    work.over = True
    for thread in threading.enumerate():
        if thread.name == "hostweights-left":
            thread.join()
    gc.collect()
    assert seen() is None
