"""D1: chaos over the four actors, a bounded number of rounds; ``python tests/helpers/chaos.py`` runs more of them."""

import pytest

import chaos
from chaos_world import Broken, FakeStore
from hostweights.actors.store import StoreActor
from hostweights.messages.store import Leased, Missed, Released


@pytest.mark.parametrize("seed", range(40))
def test_D1_chaos_breaks_no_rule(seed: int) -> None:
    done, _ = chaos.run_round(seed)
    assert sum(done.ends.values()) > 50


def test_D1_a_seed_is_the_same_chaos_each_time() -> None:
    first, second = chaos.run_round(7)[0], chaos.run_round(7)[0]
    assert (first.ends, first.world.failures, first.world.crashes) == (
        second.ends,
        second.world.failures,
        second.world.crashes,
    )


def rounds(count: int) -> None:
    for seed in range(count):
        chaos.run_round(seed)


def no_undo(self: StoreActor, outcome: Leased | Missed) -> None:
    """Forgets to close a lease that a cancelled request took."""


def unchecked_close(self: FakeStore, lease_id: str) -> Released:
    """Closes a lease under whoever reads it."""
    self.world.leases.pop(lease_id, None)
    return Released(lease_id=lease_id, known=True)


@pytest.mark.parametrize("guard", ["undo", "lease in use"])
def test_D1_chaos_finds_a_guard_that_is_gone(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if guard == "undo":
        monkeypatch.setattr(StoreActor, "_undo", no_undo)
    else:
        monkeypatch.setattr(FakeStore, "close", unchecked_close)
    with pytest.raises(Broken):
        rounds(40)
