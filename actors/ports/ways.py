"""How an attached model's blocks travel: rank by rank, or gathered with other ranks."""

import time
from collections.abc import Callable

from ...dlo.gather.ranks import RankGroup
from ...dlo.gather.way import Gathering
from ...dlo.transfer import RankLocal, Way
from ...hwr.identity import weights_key
from ...messages.budget import Budget
from ...messages.identity import ArtifactIdentity
from ...messages.transport import Attach


def open_way(request: Attach, identity: ArtifactIdentity | None, budget: Budget) -> tuple[Way, Callable[[], None]]:
    """The way of an attach, and what ends it after the detach; meets the other ranks if there are any.

    Those must stream the same weights, by whatever name, where they know the ``identity`` of theirs.

    Waits for them no longer than the budget lasts. Raises HostWeightsError: group_broken, invalid_config, and what the
    budget raises.
    """
    policy = request.gather
    if policy is None or len(policy.ranks) == 1:
        return RankLocal(), _nothing
    until_s = time.monotonic() + policy.join_s
    ranks = RankGroup.join(
        policy.ranks, name="weights", deadline_s=policy.deadline_s, join_s=policy.join_s, budget=budget
    )
    way = Gathering(
        ranks,
        join_s=until_s - time.monotonic(),
        choose=policy.choose,
        weights=None if identity is None else weights_key(identity),
        slots=request.slots,
        budget=budget,
    )
    return way, way.close


def _nothing() -> None:
    """One rank alone leaves nobody."""
