"""A warm start that opens no weight file, and what makes it look again."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch

from child_kit import run_child
from hostweights import Code, Config, HostWeights, Mode
from hostweights.actors.ports.store import LocalStorePort
from hostweights.hwr import source_memory
from hostweights.hwr.digest_cache import SETTLED_NS
from hostweights.hwr.source_memory import SourceMemory, source_fingerprint
from hostweights.hwr.stored_dtypes import StoredDtypes
from hostweights.messages.budget import Budget
from hostweights.messages.dtypes import DType
from hostweights.messages.store import Leased, LookupArtifact, Missed
from loader_models import refused, same_state, save, save_index, seeded
from warm_model import Stack

HELPERS = Path(__file__).parent.parent / "helpers"


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are as new as their tests."""
    monkeypatch.setattr(source_memory, "SETTLED_NS", -1)


def weights(number: float = 1.0) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), number), "b": torch.ones(2)}


def sharded(folder: Path) -> Path:
    save(folder / "one.safetensors", {"a": torch.ones(3)})
    save(folder / "two.safetensors", {"a": torch.ones(3), "b": torch.ones(2)})
    save_index(folder, {"a": "one.safetensors", "b": "two.safetensors"})
    return folder


def test_B1_memory_gives_back_what_was_kept_for_the_same_files(tmp_path: Path) -> None:
    memory = SourceMemory(tmp_path / "memory")
    folder = sharded(tmp_path / "model")
    found = source_fingerprint(folder)
    assert memory.find(found) is None
    memory.keep(found, "1" * 64)
    assert memory.find(source_fingerprint(folder)) == "1" * 64


def test_T11_index_with_a_name_that_is_no_unicode_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = save_index(folder, {"a": "one.safetensors", "b": "two.safetensors", "\ud800": "one.safetensors"})
    with refused(Code.SOURCE_CORRUPT, str(folder), "no valid Unicode", "ud800"):
        source_fingerprint(folder)
    with refused(Code.SOURCE_CORRUPT, "no valid Unicode"):
        source_fingerprint(index)


def test_B1_memory_of_a_source_that_changes_again_and_again_does_not_grow(tmp_path: Path) -> None:
    memory, folder = SourceMemory(tmp_path / "memory"), tmp_path / "model"
    for number in range(3):
        sharded(folder)
        found = source_fingerprint(folder)
        assert memory.find(found) is None
        assert memory.find_dtypes(found) is None
        memory.keep(found, f"{number}" * 64)
        memory.keep_dtypes(found, StoredDtypes(DType.F32, {DType.F32: frozenset({"a", "b"})}))
        assert memory.find(found) == f"{number}" * 64
        assert len(list((tmp_path / "memory").iterdir())) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: os.utime(folder / "two.safetensors", ns=(1, 1)),
        lambda folder: save(folder / "two.safetensors", {"a": torch.ones(3), "b": torch.ones(2)}),
        lambda folder: save_index(folder, {"a": "two.safetensors", "b": "two.safetensors"}),
        lambda folder: save_index(folder, {"b": "one.safetensors", "a": "two.safetensors"}),
        lambda folder: (folder / "one.safetensors").chmod(0o600),
    ],
)
def test_T36_any_change_of_a_file_or_of_the_index_is_another_fingerprint(
    tmp_path: Path, change: Callable[[Path], object]
) -> None:
    folder = sharded(tmp_path)
    before = source_fingerprint(folder)
    change(folder)
    assert source_fingerprint(folder).digest != before.digest


def test_T37_link_that_leads_elsewhere_is_another_fingerprint(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save(tmp_path / f"{name}.safetensors", weights())
    link = tmp_path / "model" / "model.safetensors"
    link.parent.mkdir()
    link.symlink_to("../x.safetensors")
    before = source_fingerprint(link.parent)
    link.unlink()
    link.symlink_to("../y.safetensors")
    assert source_fingerprint(link.parent).digest != before.digest
    link.unlink()
    link.symlink_to("../nowhere.safetensors")
    with refused(Code.SOURCE_MISSING, "model.safetensors"):
        source_fingerprint(link)


def test_B1_source_that_changed_a_moment_ago_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_memory, "SETTLED_NS", SETTLED_NS)
    found = source_fingerprint(save(tmp_path / "model.safetensors", weights()))
    memory = SourceMemory(tmp_path / "memory")
    for age_ns, kept in ((SETTLED_NS - 1, None), (SETTLED_NS, "1" * 64)):
        memory.keep(msgspec.structs.replace(found, taken_ns=found.changed_ns + age_ns), "1" * 64)
        assert memory.find(found) == kept


def test_B1_source_is_as_old_as_it_was_when_somebody_began_to_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "model.safetensors", weights())
    memory, changed_ns = SourceMemory(tmp_path / "memory"), path.stat().st_ctime_ns
    monkeypatch.setattr(source_memory, "SETTLED_NS", SETTLED_NS)
    monkeypatch.setattr("time.time_ns", lambda: changed_ns + 1)
    found = source_fingerprint(path)
    monkeypatch.setattr("time.time_ns", lambda: changed_ns + 10 * SETTLED_NS)  # hashing takes its time
    assert source_fingerprint(path) == found
    memory.keep(found, "1" * 64)
    memory.keep_dtypes(found, StoredDtypes(DType.F32, {DType.F32: frozenset({"a", "b"})}))
    assert memory.find(found) is None
    assert memory.find_dtypes(found) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"fingerprint": "1", "digest": "2"}'])
def test_B1_entries_that_are_not_ours_are_ignored(tmp_path: Path, content: bytes) -> None:
    memory = SourceMemory(tmp_path / "memory")
    found = source_fingerprint(save(tmp_path / "model.safetensors", weights()))
    memory.keep(found, "1" * 64)
    (entry,) = (tmp_path / "memory").iterdir()
    entry.write_bytes(content)
    assert memory.find(found) is None
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    SourceMemory(blocked / "no" / "directory").keep(found, "1" * 64)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
@pytest.mark.parametrize("umask", ["077", "022"])
def test_T29_users_of_one_group_share_what_is_remembered(tmp_path: Path, umask: str) -> None:
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o755)
    root, source = tmp_path / "root", save(tmp_path / "model.safetensors", weights())
    source.chmod(0o644)
    (root / "digests").mkdir(parents=True, mode=0o755)  # as older versions made it
    for directory in (root, root / "digests"):
        os.chown(directory, 65533, 54321)
    root.chmod(0o2770)
    code = """
    from hostweights.hwr import digest_cache, source_memory
    from hostweights.hwr.checkpoint import open_checkpoint
    root, source = map(Path, sys.argv[1:3])
    os.setgroups([])
    os.setgid(54321)
    os.setuid(int(sys.argv[3]))
    os.umask(int(sys.argv[4], 8))
    digest_cache.SETTLED_NS = source_memory.SETTLED_NS = -1
    memory, cache = source_memory.SourceMemory.beside(root / "digests"), digest_cache.DigestCache(root / "digests")
    found, (stamp,) = source_memory.source_fingerprint(source), open_checkpoint(source).stamps
    say(memory.find(found))
    say(cache.digest(stamp, lambda: sys.argv[5]))
    memory.keep(found, sys.argv[5])
    """
    first, second = "1" * 64, "2" * 64
    assert run_child(code, root, source, 65533, umask, first).split() == ["None", first]
    assert run_child(code, root, source, 65534, umask, second).split() == [first, first]
    os.utime(source, ns=(1, 1))
    assert run_child(code, root, source, 65534, umask, second).split() == ["None", second]
    assert run_child(code, root, source, 65533, umask, first).split() == [second, second]


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_T29_what_is_remembered_is_as_open_as_the_root(tmp_path: Path, mode: int) -> None:
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(mode)
    SourceMemory.beside(root / "digests").keep(
        source_fingerprint(save(tmp_path / "model.safetensors", weights())), "1" * 64
    )
    (entry,) = (root / "digests" / "sources").iterdir()
    modes = [path.stat().st_mode & 0o7777 for path in (root / "digests", root / "digests" / "sources", entry)]
    assert modes == [mode, mode, mode & 0o644]


CHILD = """
import asyncio, json, os, sys
from hostweights import Config, HostWeights, Mode
from hostweights.hwr import source_memory
import warm_model

source, root = sys.argv[1], sys.argv[2]
source_memory.SETTLED_NS = -1
opened = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].startswith(source):
        opened.append(arguments[0])
sys.addaudithook(hook)

def private():
    with open("/proc/self/status") as stream:
        return next(int(line.split()[1]) for line in stream if line.startswith("RssAnon:")) * 1024

warm_model.Stack()
async def main():
    async with HostWeights(Config(root=root)) as host:
        cold = await host.load(warm_model.Stack, source)
        await cold.publication.wait()
        seen = len(opened)
        await cold.unload()
        del cold
        opened.clear()
        before = private()
        warm = await host.load(warm_model.Stack, source, mode=Mode.REQUIRED)
        print(json.dumps([seen, opened, private() - before, warm.warm]))
        await warm.unload()
asyncio.run(main())
"""


@pytest.mark.parametrize("layout", ["file", "index"])
def test_B8_warm_restore_opens_no_weight_file_and_takes_no_memory_for_parameters(tmp_path: Path, layout: str) -> None:
    state = seeded(Stack()).state_dict()
    source = save(tmp_path / "model" / "all.safetensors", state)
    if layout == "index":
        source = save_index(tmp_path / "model", dict.fromkeys(state, "all.safetensors")).parent
    done = subprocess.run(
        [sys.executable, "-c", CHILD, source, tmp_path / "store"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HELPERS), *sys.path])},
    )
    assert done.returncode == 0, done.stderr
    seen, opened, grown, warm = json.loads(done.stdout)
    assert warm
    assert seen > 0
    assert {Path(path).suffix for path in opened} <= {".json"}
    assert grown < 4 * 2**20  # the parameters take 48 MiB


@pytest.mark.asyncio
async def test_B1_source_that_changed_since_it_was_remembered_is_another_model(tmp_path: Path) -> None:
    source = save(tmp_path / "model.safetensors", seeded(Stack()).state_dict())
    async with HostWeights(Config(root=str(tmp_path / "store"))) as host:
        first = await host.load(Stack, source)
        assert first.publication is not None
        await first.publication.wait()
        await first.unload()
        again = await host.load(Stack, source)
        assert again.warm
        await again.unload()
        changed = seeded(Stack(), seed=1)
        save(source, changed.state_dict())
        with refused(Code.ARTIFACT_MISSING):
            await host.load(Stack, source, mode=Mode.REQUIRED)
        second = await host.load(Stack, source)
        assert not second.warm
        assert same_state(second.module, changed)
        await second.unload()


@pytest.mark.asyncio
@pytest.mark.parametrize("remembered", [False, True])
async def test_B1_source_that_changes_between_its_identity_and_the_load_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, remembered: bool
) -> None:
    source = save(tmp_path / "model.safetensors", seeded(Stack()).state_dict())
    root = tmp_path / "store"
    if remembered:
        async with HostWeights(Config(root=str(root))) as host:
            model = await host.load(Stack, source)
            assert model.publication is not None
            await model.publication.cancel()
            await model.unload()
    real = LocalStorePort.lookup

    def changing(port: LocalStorePort, effect: LookupArtifact, budget: Budget) -> Leased | Missed:
        save(source, seeded(Stack(), seed=1).state_dict())
        return real(port, effect, budget)

    monkeypatch.setattr(LocalStorePort, "lookup", changing)
    async with HostWeights(Config(root=str(root))) as host:
        with refused(Code.SOURCE_CHANGED, "model.safetensors"):
            await host.load(Stack, source, name="changing")
