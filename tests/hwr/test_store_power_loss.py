"""Crashes and power loss at every single change on the disk, for every operation that changes a store."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from crash_model import STATES, CutPoint, FailingFiles, after_crash, materialise, recorded
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.filesystem import replaced
from hostweights.hwr.lease import ArtifactLease
from hostweights.hwr.store import LocalStore
from hostweights.messages.config import CapacityPolicy, Validation, WaitPolicy
from hostweights.messages.failure import Code, HostWeightsError
from store_kit import FixedProducer, assert_right_values, make_identity, open_store

EVERY = int(os.environ.get("HOSTWEIGHTS_FAIL_EVERY", "4"))
"""Errors are injected into every n-th call; 1 tries all of them, which takes a minute."""

ONE, TWO = make_identity("acme/one"), make_identity("acme/two")


def build(store: LocalStore, identity: object = ONE) -> ArtifactLease:
    result = store.build(
        TWO if identity is TWO else ONE, FixedProducer(), Validation.METADATA, PlainBudget(), lease_id="x"
    )
    assert isinstance(result.lease, ArtifactLease)
    return result.lease


def published(root: Path, *identities: object) -> None:
    store = open_store(root)
    for identity in identities or (ONE,):
        build(store, identity).close()
    store.usage(PlainBudget())
    store.close()


def initialise(root: Path) -> None:
    open_store(root).close()


def publish(root: Path) -> None:
    store = open_store(root)
    build(store).close()
    store.close()


def condemn(root: Path) -> None:
    store = open_store(root)
    (found,) = store.list_stored()
    store.condemn(found.key, found.generation, Code.CHECKSUM_MISMATCH, "test")
    store.close()


def remove(root: Path) -> None:
    store = open_store(root)
    (found,) = store.list_stored()
    store.remove(found.key, found.generation)
    store.close()


def collect(root: Path) -> None:
    store = open_store(root)
    assert store.collect(PlainBudget(), max_store_bytes=0) > 0
    store.close()


def make_room(root: Path) -> None:
    """Publish the first artifact where only one fits and the second one stands."""
    store = LocalStore.open(root, WaitPolicy(), PlainBudget(), CapacityPolicy(max_store_bytes=70_000))
    build(store).close()
    store.close()


@pytest.fixture
def quick_disk(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: thousands of stores are made, and what is lost is decided here."""
    memory = Path("/dev/shm")  # noqa: S108  # a private directory is made in it
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="hostweights-") as directory:
        yield Path(directory)


SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "initialise": (lambda _: None, initialise),
    "first publication": (lambda _: None, publish),
    "publication beside another": (lambda root: published(root, TWO), publish),
    "condemnation": (published, condemn),
    "removal": (published, remove),
    "collection": (lambda root: published(root, ONE, TWO), collect),
    "collection for a build": (lambda root: published(root, TWO), make_room),
}


def reopen_and_check(root: Path, identity: object) -> bool:
    """Whether the artifact is there; fails unless it is absent or whole and the store works on, all bytes accounted."""
    wanted = TWO if identity is TWO else ONE
    store = open_store(root)
    found = store.lookup(wanted, Validation.FULL, PlainBudget(), lease_id="x")
    visible = isinstance(found, ArtifactLease)
    if isinstance(found, ArtifactLease):
        assert_right_values(found)
        found.close()
    lease = build(store, wanted)
    assert_right_values(lease)
    lease.verify(PlainBudget())
    lease.close()
    usage = store.usage(PlainBudget())
    assert usage.reserved_bytes == 0
    assert usage.held_bytes == sum(generation.size_bytes for generation in store.list_stored())
    assert list((root / "staging").iterdir()) == []
    (root / "account.json").unlink()
    assert store.usage(PlainBudget()) == usage, "a count of the tree differs from the account"
    assert store.collect(PlainBudget(), max_store_bytes=0) == usage.held_bytes
    assert payload_files(root) == []
    store.close()
    return visible


def payload_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.suffix == ".safetensors" or path.name == "manifest.json"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_T34_power_lost_at_any_change_leaves_each_artifact_absent_or_whole_and_no_space_lost(
    quick_disk: Path, scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, act = SCENARIOS[scenario]
    base = quick_disk / "disk"
    base.mkdir()
    prepare(base / "root")
    with recorded(base) as port:
        act(base / "root")
    cuts: list[CutPoint] = port.cuts
    seen: dict[str, list[bool]] = {state: [] for state in STATES}
    for number, cut in enumerate(cuts):
        for state in STATES:
            at = quick_disk / f"{number}-{state}"
            materialise(cut.trees[state], at)
            with replaced(after_crash(state)):
                seen[state].append(reopen_and_check(at / "root", ONE))
            shutil.rmtree(at)
    with capsys.disabled():
        sys.stdout.write(f"\n{scenario}: {len(cuts) * len(STATES)} cut points")
    assert len(cuts) > 2
    for found in seen.values():
        assert found in (sorted(found), sorted(found, reverse=True)), "an artifact came and went"
        if act in (publish, make_room):
            assert found[-1], "a build that returned must survive"
        if act in (remove, collect, condemn):
            assert found[0]
            assert not found[-1], "what returned must be durable"


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_T34_an_error_of_any_call_is_typed_and_leaves_each_artifact_absent_or_whole(
    quick_disk: Path, scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, act = SCENARIOS[scenario]
    failed, at, calls, reached = 0, 1, 0, True
    while reached:
        root = quick_disk / str(at) / "root"
        root.parent.mkdir()
        prepare(root)
        with replaced(port := FailingFiles(at)):
            try:
                act(root)
            except HostWeightsError as failure:
                assert failure.code is Code.IO_ERROR, f"{port.failed}: {failure}"  # noqa: PT017  # not each call is needed
                failed += 1
        reopen_and_check(root, ONE)
        shutil.rmtree(root)
        calls, reached = port.calls, port.calls >= at
        at += EVERY
    with capsys.disabled():
        sys.stdout.write(f"\n{scenario}: every {EVERY}th of {calls} calls failed, {failed} of them ended it")
    assert failed > 5
