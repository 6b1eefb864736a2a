"""Gathering as a way for blocks to travel: opened on all ranks of a group together."""

import time
from collections.abc import Sequence

import torch

from ...messages.budget import Budget
from ...messages.failure import Code, Stage, error
from ...messages.transport import GatheringInfo, RegistrationPolicy
from ..contract import Device, HostBacking, Stream
from ..depth import LEAST_SLOTS
from ..packed.contract import UnpackingBacking
from ..transfer import RankLocal, Transfer, open_transfer
from .choosing import ChoosingTransfer, Rounds
from .collective import Collective, open_collective
from .cut import Cut
from .ranks import JOIN_S, RankGroup
from .session import Session, open_session
from .shards import ShardBacking, WholeAndPart
from .transfer import GatherTransfer, Lanes


class Gathering:
    """Implements ``Way`` for one attached model over ``ranks``, which nothing else may use meanwhile.

    A group of one rank gathers nothing: its blocks travel rank by rank. ``close`` after the detach: it leaves ``ranks``
    and destroys what was made here. With ``choose`` the ranks measure whether whole blocks come sooner, and go by that.
    ``weights`` is the hexadecimal digest of what the model's bytes are, ``slots`` how many the ring is given: ranks
    that differ in any of these are refused when they meet. Until the attach is done ranks wait for each other for
    ``join_s`` in all, or the group's deadline where that is later, and no longer than ``budget`` lasts.
    """

    def __init__(
        self,
        ranks: RankGroup,
        *,
        join_s: float = JOIN_S,
        choose: bool = False,
        weights: str | None = None,
        slots: int | None = None,
        budget: Budget | None = None,
    ) -> None:
        self._ranks = ranks
        self._choose = choose
        self._weights = weights
        self._slots = slots
        self._until_s = time.monotonic() + join_s
        self._budget = budget
        self._collective: Collective | None = None
        self._session: Session | None = None
        self._lanes: Lanes | None = None
        self._rounds: Rounds | None = None
        self._opened: GatherTransfer | ChoosingTransfer | None = None

    @property
    def ranks(self) -> RankGroup:
        """Who gathers."""
        return self._ranks

    def slot_bytes(self, size_bytes: int) -> int:
        """The block and the padding that makes all parts equal; no smaller block needs more."""
        return Cut(RankLocal().slot_bytes(size_bytes), self._ranks.size).padded_bytes

    def open(self, backing: HostBacking, device: Device, copies: Stream, policy: RegistrationPolicy) -> Transfer:
        """The first time meets the other ranks, which must attach the same blocks; later ones check that blocks stay.

        Raises HostWeightsError: group_mismatch, group_broken, or unsupported where blocks would lie otherwise.
        """
        ranks = self._ranks
        if ranks.size == 1:
            return open_transfer(backing, device, copies, policy)
        if isinstance(backing, UnpackingBacking) and backing.travels_packed:
            return backing.open_transfer(self, device, copies, policy)
        if self._session is None:
            self._meet(backing, device)
        else:
            self._session.require_equal(backing.blocks)
        assert self._session is not None
        assert self._lanes is not None
        kind = WholeAndPart if self._choose else ShardBacking
        parts = open_transfer(kind(backing, ranks.rank, ranks.size), device, copies, policy)
        try:
            self._opened = self._over(parts, backing, device, self._lanes, self._session)
        except BaseException:
            parts.close()
            raise
        return self._opened

    def ready(self) -> None:
        """Return once all ranks are as far, so that an attach fails on all of them or on none; raises group_broken."""
        if self._ranks.size > 1:
            self._ask([0])
        self._budget = None

    def gathering(self) -> GatheringInfo | None:
        """Of the transfer opened last."""
        return None if self._opened is None else self._opened.gathering()

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._ranks.close()
        if self._lanes is not None:
            self._lanes.close()
        if self._collective is not None:
            self._collective.close()

    def _over(
        self, parts: Transfer, backing: HostBacking, device: Device, lanes: Lanes, session: Session
    ) -> GatherTransfer | ChoosingTransfer:
        ranks, count = self._ranks, len(backing.blocks)
        first = count if self._choose else 0
        gathered = GatherTransfer(backing, device, parts, first, lanes, session, ranks.rank, ranks.size)
        if not self._choose:
            return gathered
        if self._rounds is None:
            self._rounds = Rounds(device, lanes.gathers, session, count)
        return ChoosingTransfer(parts, gathered, self._rounds)

    def _meet(self, backing: HostBacking, device: Device) -> None:
        if self._lanes is not None:
            text = "an attach over this group failed before; join a new group on all ranks"
            raise error(Stage.TRANSPORT, Code.GROUP_BROKEN, text)
        self._lanes = Lanes(device.stream("gathers"), device.stream("arrivals"))
        with torch.inference_mode(mode=False):
            self._collective = open_collective(self._ranks, device.torch_device, self._left_s(), self._budget)
            slots = min(self._slots or LEAST_SLOTS, len(backing.blocks))
            same = {"slots": slots, "choose": int(self._choose)}
            self._session = open_session(self._ranks, self._collective, backing.blocks, self._ask, same, self._weights)

    def _ask(self, row: Sequence[int]) -> list[tuple[int, ...]]:
        return self._ranks.exchange(row, "attaching", self._left_s(), self._budget)

    def _left_s(self) -> float:
        return max(self._until_s - time.monotonic(), self._ranks.deadline_s)
