"""The store against a plain model: any order of publishing, leasing, condemning, pinning, collecting and reopening."""

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.contract import Miss, ProductionPlan
from hostweights.hwr.identity import artifact_key
from hostweights.hwr.layout import lay_out, reservation_bytes
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import CapacityPolicy, Validation, WaitPolicy
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import FixedProducer, assert_right_values, make_identity, spec

MODELS: tuple[str, ...] = ("acme/a", "acme/b", "acme/c")
SPECS = (spec("w", (9000,), DType.U8),)
PLAN = ProductionPlan(SPECS, ())
RESERVED = reservation_bytes(lay_out(PLAN))
KEYS = {model: artifact_key(make_identity(model)) for model in MODELS}
MODEL = st.sampled_from(MODELS)


@dataclass
class Generation:
    """One generation as the model knows it."""

    condemned: bool = False
    leases: list[ArtifactLease] = field(default_factory=list)


class StoreMachine(RuleBasedStateMachine):
    """The model: by key its generations by number, the highest number ever used, and the pins."""

    @initialize(limited=st.booleans())
    def begin(self, limited: bool) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="hostweights-machine-"))
        self.stored: dict[str, dict[str, Generation]] = {model: {} for model in MODELS}
        self.used = dict.fromkeys(MODELS, 0)
        self.pinned: set[str] = set()
        self.limit = 2 * RESERVED if limited else None
        self.store = self.open()

    def open(self) -> LocalStore:
        capacity = CapacityPolicy(max_store_bytes=self.limit)
        return LocalStore.open(self.place / "root", WaitPolicy(), PlainBudget(), capacity)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for model in MODELS:
                for generation in self.stored[model].values():
                    for lease in generation.leases:
                        lease.close()
            self.store.close()
            shutil.rmtree(self.place)

    def newest(self, model: str) -> str | None:
        usable = [name for name, each in self.stored[model].items() if not each.condemned]
        return max(usable, default=None)

    def hold(self, model: str, lease: ArtifactLease) -> None:
        assert lease.manifest.key == KEYS[model]
        assert_right_values(lease, SPECS)
        self.stored[model][lease.generation].leases.append(lease)

    @rule(model=MODEL)
    def lookup(self, model: str) -> None:
        found = self.store.lookup(make_identity(model), Validation.METADATA, PlainBudget(), lease_id="l")
        if isinstance(found, Miss):
            assert self.newest(model) is None
            return
        assert found.generation == self.newest(model)
        self.hold(model, found)

    @rule(model=MODEL)
    def publish(self, model: str) -> None:
        before = self.newest(model)
        try:
            made = self.store.build(
                make_identity(model), FixedProducer(PLAN), Validation.METADATA, PlainBudget(), lease_id="b"
            )
        except HostWeightsError as refused:
            if refused.code is not Code.CAPACITY_EXCEEDED or self.limit is None or before is not None:
                raise
            self.forget_collected()
            kept = [each for model in MODELS for each in self.stored[model].values()]
            assert len(kept) >= 1, "an empty store has room for one"
            assert all(self.must_stay(model, each) for model in MODELS for each in self.stored[model].values())
            return
        assert made.built is (before is None)
        assert isinstance(made.lease, ArtifactLease)
        if made.built:
            self.forget_collected(but=(model, made.lease.generation))
            self.used[model] += 1
            assert made.lease.generation == f"{self.used[model]:08d}"
            self.stored[model][made.lease.generation] = Generation()
        self.hold(model, made.lease)

    def must_stay(self, model: str, generation: Generation) -> bool:
        return bool(generation.leases) or (model in self.pinned and not generation.condemned)

    def forget_collected(self, but: tuple[str, str] | None = None) -> None:
        """What a build or a collection deleted: never what must stay."""
        left = {(stored.key, stored.generation) for stored in self.store.list_stored()}
        for model in MODELS:
            for name, generation in list(self.stored[model].items()):
                if (KEYS[model], name) not in left:
                    assert not self.must_stay(model, generation), (model, name)
                    del self.stored[model][name]
        expected = {(KEYS[model], name) for model in MODELS for name in self.stored[model]}
        assert left - expected <= ({(KEYS[but[0]], but[1])} if but else set())

    @precondition(lambda self: any(each.leases for model in MODELS for each in self.stored[model].values()))
    @rule(which=st.integers(0, 50))
    def release(self, which: int) -> None:
        holders = [each for model in MODELS for each in self.stored[model].values() if each.leases]
        leases = holders[which % len(holders)].leases
        leases.pop(which % len(leases)).close()

    @precondition(lambda self: any(self.stored.values()))
    @rule(which=st.integers(0, 50))
    def condemn(self, which: int) -> None:
        model, name = self.some(which)
        self.store.condemn(KEYS[model], name, Code.CHECKSUM_MISMATCH, "the machine says so")
        self.stored[model][name].condemned = True

    @precondition(lambda self: any(self.stored.values()))
    @rule(which=st.integers(0, 50))
    def remove(self, which: int) -> None:
        model, name = self.some(which)
        if self.stored[model][name].leases:
            with pytest.raises(HostWeightsError) as refused:
                self.store.remove(KEYS[model], name)
            assert refused.value.code is Code.LEASE_IN_USE
            return
        assert self.store.remove(KEYS[model], name) > 0
        del self.stored[model][name]

    def some(self, which: int) -> tuple[str, str]:
        all_of_them = [(model, name) for model in MODELS for name in self.stored[model]]
        return all_of_them[which % len(all_of_them)]

    @rule(model=MODEL, pinned=st.booleans())
    def pin(self, model: str, pinned: bool) -> None:
        self.store.pin(KEYS[model], pinned=pinned)
        (self.pinned.add if pinned else self.pinned.discard)(model)

    @rule(everything=st.booleans())
    def collect(self, everything: bool) -> None:
        freed_bytes = self.store.collect(PlainBudget(), 0 if everything else None)
        before = sum(map(len, self.stored.values()))
        self.forget_collected()
        left = [(model, each) for model in MODELS for each in self.stored[model].values()]
        assert (freed_bytes > 0) is (len(left) < before)
        for model, each in left:
            assert self.must_stay(model, each) or not (everything or each.condemned)

    @rule(tighter=st.booleans())
    def reopen(self, tighter: bool) -> None:
        self.store.close()
        if tighter:
            self.limit = 2 * RESERVED
        self.store = self.open()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "store"):
            return
        shown = {
            (each.key, each.generation): (each.condemned, each.pinned, each.leased) for each in self.store.list_stored()
        }
        assert shown == {
            (KEYS[model], name): (each.condemned, model in self.pinned, bool(each.leases))
            for model in MODELS
            for name, each in self.stored[model].items()
        }
        assert self.store.usage(PlainBudget()).generations == len(shown)
        assert list((self.place / "root" / "staging").iterdir()) == []


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestATheStoreAgreesWithAPlainModel = StoreMachine.TestCase
