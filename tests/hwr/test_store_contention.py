"""Many processes on few keys that build, join, lease, condemn, collect and die.

Twelve rounds each by default; more with ``HOSTWEIGHTS_CONTENTION_ROUNDS=200 pytest --timeout=1800``.
"""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from child_kit import Child
from hostweights.hwr.budget import PlainBudget
from store_kit import nobody_locks, open_store

PROCESSES = 16
ROUNDS = int(os.environ.get("HOSTWEIGHTS_CONTENTION_ROUNDS", "12"))

_ROUNDS = """
    import fcntl, random
    from hostweights.messages.failure import Code, HostWeightsError
    root, number, first, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
    store = open_store(root)
    identities = [make_identity(f"acme/{key}") for key in range(4)]

    def die_sometimes(chance):
        if random.random() < chance:
            os.kill(os.getpid(), 9)

    class Alone(FixedProducer):
        def __init__(self, key):
            super().__init__()
            self.key = key
        def produce(self, budget):
            fd = os.open(root.parent / f"producing-{self.key}", os.O_RDONLY | os.O_CREAT)
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails if another process produces this key now
            for tensor in super().produce(budget):
                die_sometimes(0.02)
                yield tensor
            os.close(fd)

    def use(lease):
        assert_right_values(lease)
        lease.verify(PlainBudget())
        die_sometimes(0.05)
        lease.close()

    for round in range(first, rounds):
        say(round)
        random.seed(number * 1_000_003 + round)
        key = random.randrange(4)
        what = random.choice(["build", "build", "lease", "lease", "condemn", "collect"])
        if what == "build":
            result = store.build(identities[key], Alone(key), Validation.METADATA, PlainBudget(), lease_id="b")
            say(f"{'built' if result.built else 'joined' if result.joined else 'hit'} {result.lease.publication_id}")
            use(result.lease)
        elif what == "lease":
            found = store.lookup(identities[key], Validation.FULL, PlainBudget(), lease_id="l")
            if isinstance(found, ArtifactLease):
                use(found)
        elif what == "condemn":
            found = store.lookup(identities[key], Validation.METADATA, PlainBudget(), lease_id="c")
            if isinstance(found, ArtifactLease):
                store.condemn(found.manifest.key, found.generation, Code.CHECKSUM_MISMATCH, "test")
                use(found)
        else:
            store.collect(PlainBudget(), max_store_bytes=random.choice([0, 50_000, 10_000_000]))
    say("end")
"""


def _run_slot(root: Path, number: int) -> tuple[list[str], int]:
    """One of the processes, started again after each death; what it said, and how often it was killed."""
    said: list[str] = []
    killed, following = 0, 0
    while True:
        with Child(_ROUNDS, root, number, following, ROUNDS) as child:
            while line := child.line():
                if line == "end":
                    return said, killed
                if line.isdigit():
                    following = int(line) + 1
                said.append(line)
            assert child.wait() == -signal.SIGKILL, said[-3:]
            killed += 1


@pytest.mark.timeout(120 + 10 * ROUNDS)
def test_A5_sixteen_processes_that_build_lease_condemn_collect_and_die_leave_a_sound_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    begin = time.monotonic()
    with ThreadPoolExecutor(PROCESSES) as pool:
        results = list(pool.map(lambda number: _run_slot(root, number), range(PROCESSES)))
    lines = [line for said, _ in results for line in said]
    built = [line.split()[1] for line in lines if line.startswith("built")]
    used = {line.split()[1] for line in lines if line.startswith(("joined", "hit"))}
    killed = sum(killed for _, killed in results)
    with capsys.disabled():
        sys.stdout.write(
            f"\n{PROCESSES} processes, {ROUNDS} rounds each: {len(built)} publications, {len(used)} of them used by "
            f"others, {killed} processes killed, {time.monotonic() - begin:.0f} s"
        )
    assert len(built) == len(set(built)) > 4
    assert used
    assert killed > 0
    _check_sound(root)


def _check_sound(root: Path) -> None:
    store = open_store(root)
    usage = store.usage(PlainBudget())
    assert usage.reserved_bytes == 0
    assert list((root / "staging").iterdir()) == []
    stored = store.list_stored()
    assert not any(generation.leased for generation in stored)
    assert usage.held_bytes == sum(generation.size_bytes for generation in stored)
    assert all(nobody_locks(path) for path in (root / "locks").iterdir())
    (root / "account.json").unlink()
    assert store.usage(PlainBudget()) == usage
    assert store.collect(PlainBudget(), max_store_bytes=0) == usage.held_bytes
    assert list(root.rglob("*.safetensors")) == []
    store.close()
