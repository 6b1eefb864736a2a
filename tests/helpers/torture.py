"""What the torture tests share: how often, what was done to whom, and what must hold afterwards."""

import os
import random
from collections import Counter, defaultdict
from pathlib import Path

from child_kit import Child
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import Validation, WaitPolicy
from hostweights.messages.failure import HostWeightsError
from store_kit import FixedProducer, assert_right_values, make_identity, names_under, nobody_locks, open_store

ROUNDS = int(os.environ.get("HOSTWEIGHTS_TORTURE_ROUNDS", "5"))
KEYS = tuple(make_identity(f"acme/{number}") for number in range(3))

TALLIES: dict[str, Counter[str]] = defaultdict(Counter)
"""Shown at the end of the tests: for each test what was done, and what came of it."""

LIFE = """
    import random
    root, seed = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(seed)
    store = open_store(root)
    identities = [make_identity(f"acme/{number}") for number in range(3)]
    say("lives")
    while True:
        identity = random.choice(identities)
        what = random.choice(["build", "build", "build", "lease", "condemn", "collect"])
        if what == "build":
            lease = build(store, identity=identity).lease
        elif what == "collect":
            store.collect(PlainBudget(), max_store_bytes=random.choice([0, 50_000]))
            continue
        else:
            lease = store.lookup(identity, Validation.FULL, PlainBudget(), lease_id="l")
            if not isinstance(lease, ArtifactLease):
                continue
            if what == "condemn":
                store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "test")
        assert_right_values(lease)
        lease.verify(PlainBudget())
        lease.close()
"""
"""A process that builds, leases, condemns and collects until it is killed, and fails at the first wrong byte."""


def live(root: Path, seed: int) -> Child:
    """One such process, at work."""
    child = Child("from hostweights.messages.failure import Code\n" + _dedented(LIFE), root, seed)
    assert child.line() == "lives"
    return child


def _dedented(code: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in code.splitlines())


def let_run(child: Child, seconds: float) -> None:
    """Let a child run for so long; it must not end meanwhile."""
    assert not child.ends_within(seconds), f"the child ended by itself with {child.wait()}"


def moment() -> float:
    """A random moment, in seconds: shorter ones more often, since a publication takes a few milliseconds."""
    return random.random() ** 3 * 0.2


def probe(root: Path, counts: Counter[str], wait_s: float = 20.0) -> None:
    """Get every key by a budget: the right bytes, or a typed refusal that may be tried again."""
    store = open_store(root, WaitPolicy(domain_s=wait_s, lookup_s=wait_s, build_s=wait_s))
    for identity in KEYS:
        try:
            result = store.build(identity, FixedProducer(), Validation.FULL, PlainBudget(wait_s), lease_id="p")
        except HostWeightsError as refused:
            if not refused.failure.retryable:
                raise
            counts[f"refused with {refused.code}"] += 1
            continue
        counts["built" if result.built else "joined" if result.joined else "hit"] += 1
        assert isinstance(result.lease, ArtifactLease)
        assert_right_values(result.lease)
        result.lease.verify(PlainBudget())
        result.lease.close()
    store.close()


def assert_sound(root: Path) -> None:
    """With nobody at work: all keys can be had, nothing is left over, nobody holds a lock, and the sums are right."""
    counts: Counter[str] = Counter()
    probe(root, counts)
    assert sum(counts[how] for how in ("built", "joined", "hit")) == len(KEYS), counts
    store = open_store(root)
    usage = store.usage(PlainBudget())
    assert usage.reserved_bytes == 0
    assert names_under(root / "staging") == set()
    stored = store.list_stored()
    assert not any(generation.leased for generation in stored)
    assert usage.held_bytes == sum(generation.size_bytes for generation in stored)
    assert all(nobody_locks(path) for path in (root / "locks").iterdir())
    (root / "account.json").unlink()
    assert store.usage(PlainBudget()) == usage
    store.close()


def full_lookup(store: LocalStore) -> ArtifactLease | None:
    """The first key's newest sound generation, every byte checked."""
    found = store.lookup(KEYS[0], Validation.FULL, PlainBudget(20.0), lease_id="f")
    return found if isinstance(found, ArtifactLease) else None
