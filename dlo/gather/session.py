"""The gathers of one attached model: the same blocks in the same order on all ranks, checked before each."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Final

import msgspec
import torch

from ...messages.failure import Code, HostWeightsError, Stage, error
from ...messages.plan import BlockPlan
from ..contract import Event
from ..transfer import settle
from .collective import Collective
from .ranks import RankGroup

TIMES: Final = -1
"""Stands for a block where ranks exchange how long blocks took."""
ENDLESS: Final = -2
"""Stands for an infinite time; -1 for none."""


class Session:
    """Counts the gathers of a model. ``begin`` runs on one thread at a time, in the order of issue.

    The order is that of the ring, which follows from the calls of blocks alone: equal forwards make equal orders. What
    a rank is about to gather travels ahead of the bytes, so ranks that differ are told so and no byte is mixed.
    """

    def __init__(self, ranks: RankGroup, collective: Collective, plans: Sequence[BlockPlan]) -> None:
        self._ranks = ranks
        self._collective = collective
        self._plans = tuple(plans)
        self._count = 0

    def require_equal(self, plans: Sequence[BlockPlan]) -> None:
        """Raise HostWeightsError(unsupported) unless blocks lie as they did when the model was attached.

        Other ranks move at other moments; meanwhile parts of either backing must make the same block.
        """
        for old, new in zip(self._plans, plans, strict=True):
            if old != new:
                text = (
                    f"block {new.name!r} lies otherwise in the new backing, and the ranks that gather it move at "
                    "different moments: detach, adopt the artifact, and attach again on all ranks"
                )
                raise error(Stage.TRANSPORT, Code.UNSUPPORTED, text, block=new.name)

    def begin(
        self, block: int, slot: torch.Tensor, part: torch.Tensor, copied: Event | None, after: Sequence[Event]
    ) -> Callable[[], None] | None:
        """Wait for this rank's part and the slot's readers, agree on the block, begin to gather it.

        What is returned waits for the bytes, on another thread: meanwhile the ranks agree on the next block. None for
        an empty block. Raises HostWeightsError on all ranks alike: copy_failed (retryable) if a rank's part did not
        come, group_mismatch if they gather different blocks, group_broken if a rank is lost.
        """
        name = self._plans[block].name
        failure = _failure_of(copied)
        rows = self._ranks.exchange([self._count, block, failure is not None], f"block {name!r}")
        self._count += 1
        self._check_order(rows)
        for event in after:  # also where it failed: the slot's readers are forgotten with this block
            settle(event)
        failed = [rank for rank, (_, _, bad) in zip(self._ranks.ranks, rows, strict=True) if bad]
        if failed:
            text = f"rank {failed[0]} could not copy its part of block {name!r}"
            text += "; its own log says why" if failure is None else f": {type(failure).__name__}: {failure}"
            raise error(Stage.TRANSPORT, Code.COPY_FAILED, text, retryable=True, block=name, rank=failed[0])
        return self._collective.start(slot, part, f"block {name!r}") if slot.numel() else None

    def slowest(self, seconds: float | None) -> float | None:
        """The longest of all ranks' times, in the same place of the order on all; None if one rank has none.

        Infinite if it is for one rank, which says so by a number that is no time either.
        """
        nanoseconds = -1 if seconds is None else ENDLESS if seconds == inf else round(seconds * 1e9)
        rows = self._ranks.exchange([self._count, TIMES, nanoseconds], "the times of the ranks")
        self._count += 1
        self._check_order(rows)
        found = [row[2] for row in rows]
        if ENDLESS in found:
            return inf
        return None if min(found) < 0 else max(found) / 1e9

    def _check_order(self, rows: Sequence[tuple[int, ...]]) -> None:
        asked = [(count, block) for count, block, _ in rows]
        if len(set(asked)) == 1:
            return
        said = ", ".join(
            f"rank {rank} {self._name(block)!r} as its gather {count}"
            for rank, (count, block) in zip(self._ranks.ranks, asked, strict=True)
        )
        text = f"the ranks gather different blocks: {said}; call the same blocks in the same order on all ranks"
        raise self._ranks.lose(_mismatch(text, self._name(asked[self._ranks.rank][1])))

    def _name(self, block: int) -> str:
        return "times" if block == TIMES else self._plans[block].name


def open_session(
    ranks: RankGroup,
    collective: Collective,
    plans: Sequence[BlockPlan],
    ask: Callable[[Sequence[int]], Sequence[tuple[int, ...]]],
    same: Mapping[str, int],
    weights: str | None,
) -> Session:
    """Compare the blocks of all ranks, by name, size, layout and ``weights``, before the first is gathered.

    ``ask`` gives everybody's integers, by rank. ``same`` are arguments, by name, that all ranks must have alike.
    ``weights`` is the hexadecimal digest of what the bytes are, equal where they are; None is compared with nothing.
    Raises HostWeightsError(group_mismatch) that names the first block that differs, or the argument, or the weights.
    """
    mine = [0 if weights is None else _number(weights), len(plans), *same.values()]
    identities, counts, *others = zip(*ask(mine), strict=True)
    if len(set(counts)) > 1:
        text = (
            f"the ranks attach different numbers of blocks ({_said(ranks, counts)}); load the same model on all of them"
        )
        raise ranks.lose(_mismatch(text, plans[-1].name))
    for name, values in zip(same, others, strict=True):
        if len(set(values)) > 1:
            text = (
                f"the ranks attach with different {name} ({_said(ranks, values)}); attach with the same on all of them"
            )
            raise ranks.lose(_mismatch(text, plans[0].name))
    prints = ask([_print(plan) for plan in plans])
    for index, plan in enumerate(plans):
        if len({row[index] for row in prints}) > 1:
            text = (
                f"block {plan.name!r} ({plan.size_bytes} bytes here) differs among the ranks {list(ranks.ranks)} in "
                "name, size or layout; load the same artifact on all of them"
            )
            raise ranks.lose(_mismatch(text, plan.name))
    if len({each for each in identities if each}) > 1:
        said = _said(ranks, [f"{each:015x}" if each else "unknown ones" for each in identities])
        text = (
            f"the ranks attach different weights of equal layout ({said}); load the same artifact on all of them, and "
            "attach several models one after the other, in the same order on all ranks"
        )
        raise ranks.lose(_mismatch(text, plans[0].name))
    return Session(ranks, collective, plans)


def _said(ranks: RankGroup, values: Sequence[object]) -> str:
    return ", ".join(f"rank {rank} {value}" for rank, value in zip(ranks.ranks, values, strict=True))


def _number(digest: str) -> int:
    """As many of a hexadecimal digest's first bits as travel; 0, which stands for none, is as unlikely as any other."""
    return int(digest[:15], 16)


def _print(plan: BlockPlan) -> int:
    digest = hashlib.sha256(msgspec.msgpack.encode(plan)).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _failure_of(event: Event | None) -> Exception | None:
    try:
        if event is not None:
            event.synchronize()
    except Exception as exc:  # noqa: BLE001 - told to all ranks
        return exc
    return None


def _mismatch(text: str, block: str) -> HostWeightsError:
    return error(Stage.TRANSPORT, Code.GROUP_MISMATCH, text, block=block)
