"""The device's collective, as far as it goes without a device."""

from collections.abc import Sequence
from typing import NoReturn

import pytest
import torch

from hostweights.dlo.gather.collective import open_collective
from hostweights.dlo.gather.ranks import RankGroup
from hostweights.messages.budget import Budget
from hostweights.messages.failure import Code, HostWeightsError, Stage, error


class Left(RankGroup):
    """The other rank went after both had joined."""

    def exchange(
        self, row: Sequence[int], what: str, deadline_s: float | None = None, budget: Budget | None = None
    ) -> list[tuple[int, ...]]:
        assert budget is None
        text = f"{what}: rank 1 was lost, and {len(row)} numbers were given within {deadline_s} s"
        raise self.lose(error(Stage.TRANSPORT, Code.GROUP_BROKEN, text))


class Untouched:
    """A process group whose first collective would wait for ever."""

    def _allgather_base(self, output: torch.Tensor, part: torch.Tensor, /) -> NoReturn:
        raise AssertionError(f"{part.numel()} bytes for {output.numel()}")

    def abort(self) -> None:
        """Nothing was begun."""


def test_C4_the_devices_communicator_is_not_begun_once_a_rank_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Stream", lambda device: device)
    monkeypatch.setattr("hostweights.dlo.gather.collective._make_group", lambda _ranks: Untouched())
    ranks = Left((0, 1), 0, None, 60.0)
    with pytest.raises(HostWeightsError, match="the first collective: rank 1 was lost") as broken:
        open_collective(ranks, torch.device("cuda", 0), 300.0)
    assert broken.value.code is Code.GROUP_BROKEN
