"""Disks that fill up and turn read-only, files that are harmed at any moment, users that change, clocks that jump.

Bounded in the suite; ``make torture`` does ten times as much.
"""

import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from child_kit import Child, run_child
from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.lease import ArtifactLease
from hostweights.messages.failure import Code, HostWeightsError
from small_disk import small_disk_at
from store_kit import (
    PAYLOAD,
    assert_right_values,
    build,
    hit,
    make_identity,
    names_under,
    open_store,
    published,
)
from torture import KEYS, ROUNDS, TALLIES, assert_sound, full_lookup, let_run, live, moment, probe

pytestmark = pytest.mark.timeout(120 + 20 * ROUNDS)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB of its own."""
    with small_disk_at(tmp_path / "disk") as mount:
        yield mount


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


def _leave(disk: Path, free_bytes: int) -> None:
    """Fill the disk until so much is free."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, _free(disk) - free_bytes))


def test_T33_at_each_level_of_a_disk_a_build_is_whole_or_refused_and_leaves_nothing(disk: Path) -> None:
    counts = TALLIES["a disk with ever less room"]
    store = open_store(disk / "root")
    levels = range(0, 96 * 1024, 4096)
    for number, free_bytes in enumerate(levels):
        _leave(disk, free_bytes)
        identity = make_identity(f"acme/level-{number}")
        try:
            lease = build(store, identity=identity).lease
        except HostWeightsError as refused:
            counts[f"refused with {refused.code}, {'' if refused.failure.retryable else 'not '}to be tried again"] += 1
            kept = {name for name in names_under(disk / "root") if name.endswith((".safetensors", "READY.json"))}
            assert kept == set()
        else:
            assert isinstance(lease, ArtifactLease)
            assert_right_values(lease)
            lease.verify(PlainBudget())
            lease.close()
            counts["built"] += 1
            assert store.collect(PlainBudget(), max_store_bytes=0) > 0
        assert names_under(disk / "root" / "staging") == set()
    assert counts["built"] > 0
    assert not any("not to be tried again" in what for what in counts)
    assert sum(counts.values()) == len(levels)
    (disk / "ballast").unlink()
    store.close()
    assert_sound(disk / "root")


def test_T33_processes_on_a_disk_that_fills_and_empties_are_refused_and_never_wrong(disk: Path) -> None:
    counts = TALLIES["processes on a disk that fills and empties"]
    with ExitStack() as stack:
        children = [stack.enter_context(Child(_PATIENT, disk / "root", seed)) for seed in range(4)]
        for _ in range(ROUNDS * 4):
            _leave(disk, random.randrange(0, 200_000))
            counts["levels"] += 1
            for child in children:
                child.tell()
            for child in children:
                counts[child.line()] += 1
        for child in children:
            child.write("end")
            child.end()
    (disk / "ballast").unlink()
    assert_sound(disk / "root")


_PATIENT = """
    import random
    from hostweights.messages.failure import Code, HostWeightsError
    root, seed = Path(sys.argv[1]), int(sys.argv[2])
    random.seed(seed)
    store = None
    while sys.stdin.readline().strip() == "go":
        try:
            store = store or open_store(root)
            lease = build(store, identity=make_identity(f"acme/{random.randrange(3)}")).lease
            assert_right_values(lease)
            lease.verify(PlainBudget())
            lease.close()
            store.collect(PlainBudget(), max_store_bytes=random.choice([0, 100_000]))
            said = "right"
        except HostWeightsError as refused:
            assert refused.failure.retryable, refused
            said = f"refused with {refused.code}"
        say(said)
"""


def _remount(mount: Path, how: str) -> None:
    done = subprocess.run(["mount", "-o", f"remount,{how}", str(mount)], capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"remounting is not permitted here: {done.stderr.decode()}")


def test_T30_a_disk_that_turns_read_only_under_a_store_serves_on_and_builds_again_later(disk: Path) -> None:
    counts = TALLIES["a disk that turns read-only and back"]
    store = open_store(disk / "root")
    held = published(store)
    for number in range(ROUNDS):
        _remount(disk, "ro")
        counts["remounts"] += 1
        before = names_under(disk / "root")
        for opened in (store, open_store(disk / "root")):
            lease = hit(opened)
            assert_right_values(lease)
            lease.close()
            with pytest.raises(HostWeightsError) as caught:
                build(opened, identity=make_identity(f"acme/new-{number}"))
            counts[f"builds refused with {caught.value.code}"] += 1
            assert caught.value.code is Code.READ_ONLY
        assert_right_values(held)
        held.verify(PlainBudget())
        assert names_under(disk / "root") == before
        _remount(disk, "rw")
        assert build(store, identity=make_identity(f"acme/new-{number}")).built
        counts["builds afterwards"] += 1
        store.collect(PlainBudget(), max_store_bytes=0)
    held.close()
    store.close()
    assert_sound(disk / "root")


def _flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(random.randrange(path.stat().st_size))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ (1 << random.randrange(8))]))


def _cut(path: Path) -> None:
    os.truncate(path, random.randrange(path.stat().st_size))


def _zero(path: Path) -> None:
    begin = random.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(bytes(min(512, path.stat().st_size - begin)))


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-1] + b"\xaa")
    other.rename(path)


def _longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


HARMS: dict[str, Callable[[Path], None]] = {
    "a bit flipped": _flip,
    "cut": _cut,
    "zeroes written": _zero,
    "another file": _replace,
    "made longer": _longer,
    "removed": Path.unlink,
}


@pytest.mark.parametrize("harm", sorted(HARMS))
def test_A7_whatever_is_done_to_a_file_at_full_validation_nobody_is_served_wrong_bytes(root: Path, harm: str) -> None:
    counts = TALLIES[f"files harmed: {harm}"]
    store = open_store(root)
    for _ in range(ROUNDS * 2):
        lease = published(store)
        path = lease.directory / random.choice([PAYLOAD, PAYLOAD, "manifest.json", "READY.json"])
        lease.close()
        for each in (path.parent, path):
            each.chmod(0o755 if each.is_dir() else 0o644)
        HARMS[harm](path)
        counts["harmed"] += 1
        found = full_lookup(store)
        if found is None:
            counts["found and not served"] += 1
        else:  # a bit of white space in a record, or a zero over a zero
            counts["harmless"] += 1
            assert_right_values(found)
            found.close()
        with suppress(HostWeightsError):
            store.collect(PlainBudget(), max_store_bytes=0)
    assert counts["found and not served"] > 0
    store.close()
    assert_sound(root)


def test_A6_files_replaced_under_a_lease_change_nothing_for_its_holder(root: Path) -> None:
    counts = TALLIES["files replaced under a lease"]
    store = open_store(root)
    for _ in range(ROUNDS * 2):
        lease = published(store)
        lease.directory.chmod(0o755)
        for name in (PAYLOAD, "manifest.json"):
            HARMS[random.choice(["another file", "removed"])](lease.directory / name)
            counts["replaced or removed"] += 1
        assert_right_values(lease)
        again = build(store).lease
        assert isinstance(again, ArtifactLease)
        assert again.generation != lease.generation
        assert_right_values(again)
        again.verify(PlainBudget())
        again.close()
        lease.close()
        store.collect(PlainBudget(), max_store_bytes=0)
    store.close()
    assert_sound(root)


_OTHER_USER = """
    from hostweights.messages.failure import Code, HostWeightsError
    store = open_store(Path(sys.argv[1]))
    lease = build(store).lease
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    assert_right_values(lease)
    lease.verify(PlainBudget())
    calls = {
        "lookup": lambda: hit(store, Validation.FULL),
        "build": lambda: build(store, identity=make_identity("acme/other")),
        "condemn": lambda: store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "test"),
        "collect": lambda: store.collect(PlainBudget(), max_store_bytes=0),
        "remove": lambda: store.remove(lease.manifest.key, lease.generation),
        "open": lambda: open_store(Path(sys.argv[1])),
    }
    for name, call in calls.items():
        try:
            call()
        except HostWeightsError as refused:
            say(f"{name}: {refused.code}")
        else:
            say(f"{name}: done")
    assert_right_values(lease)
    lease.close()
"""


def test_T29_a_process_that_becomes_another_user_keeps_its_lease_and_is_refused_the_rest(root: Path) -> None:
    counts = TALLIES["a process that becomes another user"]
    said = dict(line.split(": ") for line in run_child(_OTHER_USER, root).splitlines())
    for name, result in said.items():
        counts[f"{name} {result}"] += 1
    assert len(said) == 6
    assert "done" not in {said[name] for name in ("build", "condemn", "remove", "open")}
    store = open_store(root)
    lease = hit(store)
    assert_right_values(lease)
    lease.close()
    assert [each.condemned for each in store.list_stored()] == [False]
    store.close()
    assert_sound(root)


_JUMPING = """
    import random, time
    from hostweights.messages.failure import Code, HostWeightsError
    root, seed, rounds = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    random.seed(seed)
    real, real_ns, offset_s = time.time, time.time_ns, [0.0]
    time.time = lambda: real() + offset_s[0]
    time.time_ns = lambda: real_ns() + int(offset_s[0] * 1e9)
    store = open_store(root)
    for number in range(rounds):
        offset_s[0] = random.choice([-1, 1]) * random.choice([0.0, 3600.0, 86400.0 * 365, 86400.0 * 365 * 40])
        lease = build(store, identity=make_identity(f"acme/{random.randrange(3)}")).lease
        assert_right_values(lease)
        if number % 3 == 0:
            offset_s[0] = -offset_s[0]
            store.condemn(lease.manifest.key, lease.generation, Code.CHECKSUM_MISMATCH, "test")
        lease.close()
        store.lookup(make_identity("acme/0"), Validation.FULL, PlainBudget(5.0), lease_id="l")
        store.collect(PlainBudget(), max_store_bytes=random.choice([0, 50_000]))
    if seed == 0:
        from hostweights.hwr.locks import LockHandle
        lease = build(store, identity=make_identity("acme/held")).lease
        lease.close()
        try:
            store.remove(lease.manifest.key, lease.generation)
        except HostWeightsError as gone:  # the others collect it in between, now and then
            assert gone.code is Code.ARTIFACT_MISSING
        with LockHandle(root / "locks" / f"{lease.manifest.key}.build.lock", os.O_RDONLY) as held:
            assert held.try_lock(exclusive=True)
            budget = PlainBudget(0.2)
            offset_s[0] = -86400.0 * 365 * 40  # a deadline by this clock would pass in forty years
            try:
                store.build(make_identity("acme/held"), FixedProducer(), Validation.METADATA, budget, lease_id="b")
            except HostWeightsError as ended:
                say(ended.code)
    say("end")
"""


def test_A11_clocks_that_jump_by_years_move_no_deadline_and_lose_nothing(root: Path) -> None:
    counts = TALLIES["clocks that jump"]
    with ExitStack() as stack:
        children = [stack.enter_context(Child(_JUMPING, root, seed, ROUNDS * 6)) for seed in range(3)]
        assert children[0].line() == Code.BUILD_BUSY
        for child in children:
            assert child.end() == "end"
            counts["jumps"] += ROUNDS * 6
    assert_sound(root)


def test_A7_files_harmed_while_processes_work_are_found_by_a_full_check(root: Path) -> None:
    counts = TALLIES["files harmed under processes at work"]
    with ExitStack() as stack:
        children = [stack.enter_context(live(root, seed)) for seed in range(2)]
        for _ in range(ROUNDS * 2):
            let_run(children[0], moment())
        for child in children:
            child.signal(9)
            child.wait()
    store = open_store(root)
    for identity in KEYS:
        build(store, identity=identity).lease.close()
    for path in root.rglob(PAYLOAD):
        path.chmod(0o644)
        _flip(path)
        counts["harmed"] += 1
    probe(root, counts)
    assert counts["hit"] < len(KEYS)
    assert_sound(root)
