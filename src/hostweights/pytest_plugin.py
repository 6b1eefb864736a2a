"""pytest plugin, on wherever the package is installed: the fixture ``replay`` for tests on recorded messages."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from pathlib import Path
    from types import UnionType

    import msgspec

    from hostweights.actors.kernel import Actor
    from hostweights.actors.kernel.replay import ReplayResult
    from hostweights.messages.base import Message


class Replay(Protocol):
    """What the fixture gives."""

    def __call__(
        self,
        journal: Path,
        actor: str,
        create: Callable[[msgspec.Raw], Actor] | None = None,
        union: type[Message] | UnionType | None = None,
    ) -> ReplayResult:
        """Replay one actor; the test fails, with a readable diff, when it does something else than it did.

        ``create`` builds an incarnation from its recorded settings and ``union`` decodes its messages; without them the
        actor is one of the library's own.
        """
        ...


@pytest.fixture
def replay() -> Replay:
    """Run an actor again from a journal and compare what it does with what it did."""
    from hostweights.actors.kernel.replay import replay as replay_actor
    from hostweights.actors.kernel.replay_diff import explained
    from hostweights.actors.replaying import replayable
    from hostweights.messages import AnyMessage

    def run(
        journal: Path,
        actor: str,
        create: Callable[[msgspec.Raw], Actor] | None = None,
        union: type[Message] | UnionType | None = None,
    ) -> ReplayResult:
        with ThreadPoolExecutor(1) as pool:  # a replay runs a loop of its own, and the test may run in one
            made = replayable(actor) if create is None else create
            result = pool.submit(replay_actor, journal, actor, made, AnyMessage if union is None else union).result()
            if result.difference is not None:
                pytest.fail(pool.submit(explained, journal, result).result(), pytrace=False)
        return result

    return run
