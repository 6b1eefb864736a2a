"""Limits, reservations, collection, and the account behind them."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from child_kit import Child
from hostweights.hwr.account import Account, AccountRecord
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.capacity import Candidate, Usage, in_collection_order
from hostweights.hwr.contract import ProductionPlan
from hostweights.hwr.layout import lay_out, reservation_bytes
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import CapacityPolicy, WaitPolicy
from hostweights.messages.dtypes import DType
from hostweights.messages.failure import Code, Failure, HostWeightsError
from store_kit import FixedProducer, assert_right_values, build, make_identity, spec

LARGE = (spec("w", (400_000,), DType.U8),)
PLAN = ProductionPlan(LARGE, ())
RESERVED = reservation_bytes(lay_out(PLAN))


def open_limited(root: Path, **limits: int) -> LocalStore:
    return LocalStore.open(root, WaitPolicy(), PlainBudget(), CapacityPolicy(**limits))


def publish(store: LocalStore, model: str) -> ArtifactLease:
    lease = build(store, FixedProducer(PLAN), make_identity(model)).lease
    assert isinstance(lease, ArtifactLease)
    return lease


def refused(store: LocalStore, model: str) -> Failure:
    with pytest.raises(HostWeightsError) as caught:
        publish(store, model)
    assert caught.value.code is Code.CAPACITY_EXCEEDED
    return caught.value.failure


def stored_keys(store: LocalStore) -> set[str]:
    return {generation.key for generation in store.list_stored()}


def used_long_ago(lease: ArtifactLease, age_s: int) -> None:
    now = (lease.directory / "READY.json").stat().st_mtime
    os.utime(lease.directory / "READY.json", (now - age_s, now - age_s))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


_EIGHT = """
    from hostweights.messages.config import CapacityPolicy
    from hostweights.messages.failure import HostWeightsError
    class Waiting(FixedProducer):
        def produce(self, budget):
            say("reserved")
            wait_for_parent()
            yield from super().produce(budget)
    limits = CapacityPolicy(max_store_bytes=int(sys.argv[3]))
    large = (spec("w", (400_000,), DType.U8),)
    store = LocalStore.open(Path(sys.argv[1]), WaitPolicy(), PlainBudget(), limits)
    try:
        lease = build(store, Waiting(ProductionPlan(large, ())), make_identity(sys.argv[2])).lease
    except HostWeightsError as failure:
        say(f"{failure.code} {failure.failure.retryable} {failure.failure.stage}")
    else:
        assert_right_values(lease, large)
        say("built")
        wait_for_parent()
"""


def test_A8_of_eight_builders_the_five_that_fit_succeed_and_the_limit_is_never_exceeded(root: Path) -> None:
    limit = 5 * RESERVED + RESERVED // 2
    store = open_limited(root)
    with ExitStack() as stack:
        children = [stack.enter_context(Child(_EIGHT, root, f"acme/{number}", limit)) for number in range(8)]
        answers = [child.line() for child in children]
        assert sorted(answers) == ["capacity_exceeded True capacity"] * 3 + ["reserved"] * 5
        usage = store.usage(PlainBudget())
        assert usage.reserved_bytes == 5 * RESERVED
        builders = [child for child, answer in zip(children, answers, strict=True) if answer == "reserved"]
        for child in builders:
            child.tell()
            assert child.line() == "built"
            usage = store.usage(PlainBudget())
            assert usage.held_bytes + usage.reserved_bytes <= limit
        assert usage.reserved_bytes == 0
        assert usage.held_bytes == sum(generation.size_bytes for generation in store.list_stored())
        for child in builders:
            child.tell()
            child.end()
    assert len(store.list_stored()) == 5


def test_A8_a_killed_builder_gives_its_reservation_back_at_once(root: Path) -> None:
    store = open_limited(root, max_store_bytes=RESERVED)
    with Child(_EIGHT, root, "acme/killed", RESERVED) as builder:
        assert builder.line() == "reserved"
        assert refused(store, "acme/next").retryable
        builder.signal(signal.SIGKILL)
        builder.wait()
        publish(store, "acme/next").close()
    assert store.usage(PlainBudget()).reserved_bytes == 0


def test_A8_an_artifact_larger_than_its_limit_is_refused_before_anything_is_made(root: Path) -> None:
    store = open_limited(root, max_artifact_bytes=10_000)
    large = FixedProducer(ProductionPlan((spec("w", (10_000,), DType.U8),), ()))
    with pytest.raises(HostWeightsError, match="max_artifact_bytes is 10000") as caught:
        build(store, large)
    assert (caught.value.code, caught.value.failure.retryable) == (Code.CAPACITY_EXCEEDED, False)
    assert large.runs == 0
    assert not refused(open_limited(root, max_store_bytes=RESERVED - 1), "acme/x").retryable


def test_A8_a_build_collects_the_generation_whose_last_lease_is_longest_ago(root: Path) -> None:
    store = open_limited(root, max_store_bytes=4 * RESERVED)
    leases = {name: publish(store, name) for name in ("acme/a", "acme/b", "acme/c")}
    for age, lease in enumerate(leases.values(), start=1):
        used_long_ago(lease, 10_000 // age)
        lease.close()
    again = publish(store, "acme/a")
    again.close()
    small = open_limited(root, max_store_bytes=3 * RESERVED)
    made = publish(small, "acme/d")
    assert stored_keys(store) == {again.manifest.key, leases["acme/c"].manifest.key, made.manifest.key}


def test_A8_collection_never_takes_a_leased_or_pinned_generation(root: Path) -> None:
    store = open_limited(root)
    leased, pinned, idle = (publish(store, name) for name in ("acme/leased", "acme/pinned", "acme/idle"))
    for lease in (leased, pinned, idle):
        used_long_ago(lease, 9_999)
    pinned.close()
    idle.close()
    store.pin(pinned.manifest.key)
    store.pin(pinned.manifest.key)
    assert store.collect(PlainBudget(), max_store_bytes=0) > 0
    assert stored_keys(store) == {leased.manifest.key, pinned.manifest.key}
    assert [g.pinned for g in store.list_stored() if g.key == pinned.manifest.key] == [True]
    failure = refused(open_limited(root, max_store_bytes=2 * RESERVED), "acme/more")
    assert failure.retryable
    assert int(failure.details["held_bytes"]) > RESERVED
    assert stored_keys(store) == {leased.manifest.key, pinned.manifest.key}
    store.pin(pinned.manifest.key, pinned=False)
    assert store.collect(PlainBudget(), max_store_bytes=0) > 0
    assert stored_keys(store) == {leased.manifest.key}
    assert_right_values(leased, LARGE)


def test_A8_nothing_is_collected_for_a_build_that_does_not_fit_anyway(root: Path) -> None:
    store = open_limited(root)
    kept = publish(store, "acme/kept")
    publish(store, "acme/idle").close()
    refused(open_limited(root, max_store_bytes=RESERVED), "acme/new")
    assert len(stored_keys(store)) == 2
    kept.close()


def test_A8_a_limit_below_what_is_stored_is_a_normal_setting(root: Path) -> None:
    store = open_limited(root)
    for name in ("acme/a", "acme/b", "acme/c"):
        publish(store, name).close()
    lowered = open_limited(root, max_store_bytes=2 * RESERVED)
    assert lowered.collect(PlainBudget()) > 0
    assert lowered.usage(PlainBudget()).held_bytes <= 2 * RESERVED
    assert lowered.collect(PlainBudget()) == 0
    publish(open_limited(root, max_store_bytes=10 * RESERVED), "acme/d").close()


def test_T26_condemned_generations_make_room_and_those_still_leased_are_named_in_the_refusal(root: Path) -> None:
    store = open_limited(root, max_store_bytes=2 * RESERVED)
    old = publish(store, "acme/tiny")
    for _ in range(5):
        store.condemn(old.manifest.key, old.generation, Code.CHECKSUM_MISMATCH, "test")
        old.close()
        old = publish(store, "acme/tiny")
    store.condemn(old.manifest.key, old.generation, Code.CHECKSUM_MISMATCH, "test")
    other = publish(store, "acme/other")
    failure = refused(store, "acme/tiny")
    assert int(failure.details["condemned_bytes"]) > 0
    assert "condemned" in failure.text
    old.close()
    publish(store, "acme/tiny").close()
    other.close()


def test_T26_the_quota_bounds_what_is_kept_of_condemned_generations(root: Path) -> None:
    store = open_limited(root, max_condemned_bytes=RESERVED)
    for _ in range(4):
        lease = publish(store, "acme/tiny")
        lease.close()
        store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "test")
    assert publish(store, "acme/tiny").generation == "00000005"
    assert 0 < store.usage(PlainBudget()).condemned_bytes <= RESERVED


def test_T26_no_sound_generation_pays_for_condemned_ones_that_are_leased(root: Path) -> None:
    store = open_limited(root)
    bad = [publish(store, f"acme/bad{number}") for number in range(2)]
    for lease in bad:
        store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "test")
    for number in range(4):
        publish(store, f"acme/{number}").close()
    sound = stored_keys(store) - {lease.manifest.key for lease in bad}

    assert store.collect(PlainBudget()) == 0
    assert len(stored_keys(store)) == 6
    limited = open_limited(root, max_store_bytes=6 * RESERVED, max_condemned_bytes=0)
    publish(limited, "acme/new").close()
    assert len(sound & stored_keys(store)) == 3, "the one whose place the new one took"
    bad[0].close()
    assert limited.collect(PlainBudget()) > 0
    assert len(sound & stored_keys(store)) == 3
    assert bad[1].manifest.key in stored_keys(store)
    bad[1].close()


def test_A8_a_lost_or_damaged_account_is_counted_anew(root: Path) -> None:
    store = open_limited(root)
    publish(store, "acme/a").close()
    true = store.usage(PlainBudget())
    assert true.held_bytes > 8192
    account = root / "account.json"
    record = msgspec.json.decode(account.read_bytes(), type=AccountRecord)
    for damaged in (b"", b"{", msgspec.json.encode(msgspec.structs.replace(record, boot_id="other", holdings=()))):
        account.write_bytes(damaged)
        assert store.usage(PlainBudget()) == true
    account.unlink()
    assert store.usage(PlainBudget()) == true


def test_A8_counting_anew_never_searches_what_it_has_counted(root: Path) -> None:
    """Searching it for every key made the count of a large store quadratic."""

    class Unsearched(dict[tuple[str, str], int]):
        def __iter__(self) -> Iterator[tuple[str, str]]:
            raise AssertionError("searched")

    store = open_limited(root)
    for model in ("acme/a", "acme/b"):
        publish(store, model).close()
    account = Account(holdings=Unsearched())
    account.recount(store._domain.artifacts)

    assert account.held_bytes == store.usage(PlainBudget()).held_bytes
    assert len(account.holdings) == 2


def test_A8_what_others_deleted_by_hand_is_no_reason_to_refuse(root: Path) -> None:
    store = open_limited(root, max_store_bytes=RESERVED)
    lease = publish(store, "acme/a")
    store.usage(PlainBudget())
    lease.directory.rename(root / "elsewhere")
    publish(store, "acme/b").close()
    lease.close()


def test_A8_free_space_is_kept_and_made_by_collection(small_disk: Path) -> None:
    store = open_limited(small_disk / "root", min_free_bytes=512 * 1024)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(50 * 1024))
    first = publish(store, "acme/a")
    failure = refused(store, "acme/b")
    assert failure.retryable
    assert int(failure.details["free_bytes"]) > 0
    first.close()
    second = publish(store, "acme/b")
    assert stored_keys(store) == {second.manifest.key}
    second.close()
    store.close()


def test_A8_the_order_of_collection_is_condemned_then_last_lease_and_pins_hold_only_sound_ones() -> None:
    def candidate(name: str, at: int, *, condemned: bool = False, pinned: bool = False) -> Candidate:
        return Candidate(name, "00000001", 1, condemned, pinned, at)

    given = [
        candidate("new", 3),
        candidate("old", 1),
        candidate("bad", 2, condemned=True),
        candidate("kept", 0, pinned=True),
        candidate("bad-kept", 5, condemned=True, pinned=True),
    ]
    assert [c.key for c in in_collection_order(given)] == ["bad", "bad-kept", "old", "new"]


def _fill(disk: Path) -> None:
    with (disk / "ballast").open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0


def test_T33_a_full_disk_keeps_nobody_from_counting_removing_and_collecting(small_disk: Path) -> None:
    store = open_limited(small_disk / "root")
    for model in ("acme/a", "acme/b"):
        publish(store, model).close()
    _fill(small_disk)
    first, second = store.list_stored()
    assert store.usage(PlainBudget()).held_bytes == first.size_bytes + second.size_bytes
    assert store.remove(first.key, first.generation) == first.size_bytes
    (small_disk / "ballast").unlink()
    _fill(small_disk)
    assert store.collect(PlainBudget(), max_store_bytes=0) == second.size_bytes
    assert store.usage(PlainBudget()) == Usage(0, 0, 0, 0)
    assert list((small_disk / "root").rglob("*.safetensors")) == []


def test_A8_a_build_makes_its_room_on_a_full_disk(small_disk: Path) -> None:
    store = open_limited(small_disk / "root", max_store_bytes=RESERVED)
    publish(store, "acme/a").close()
    (old,) = store.list_stored()
    _fill(small_disk)
    publish(store, "acme/b").close()
    (new,) = store.list_stored()
    assert new.key != old.key
    usage = store.usage(PlainBudget())
    assert (usage.held_bytes, usage.reserved_bytes) == (new.size_bytes, 0)


@pytest.mark.parametrize("lost", [Path.unlink, lambda account: account.write_bytes(b"{")])
def test_A8_a_living_builder_keeps_its_room_when_the_account_is_lost(root: Path, lost: Callable[[Path], None]) -> None:
    store = open_limited(root, max_store_bytes=RESERVED + RESERVED // 2)
    with Child(_EIGHT, root, "acme/builder", RESERVED) as builder:
        assert builder.line() == "reserved"
        lost(root / "account.json")
        assert store.usage(PlainBudget()).reserved_bytes >= 400_000
        assert refused(store, "acme/next").code is Code.CAPACITY_EXCEEDED
        builder.tell()
        assert builder.line() == "built"
        builder.tell()
        builder.end()
    usage = store.usage(PlainBudget())
    assert (usage.reserved_bytes, usage.generations) == (0, 1)
