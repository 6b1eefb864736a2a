"""A warm start by directory: what the store remembers of a source, so that none of its weight files is opened."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hostweights import Code, Config, HostWeights, Mode, describe_directory, load_transformers, open_sync, warm
from hostweights.hwr import directories, source_memory
from hostweights.hwr.checkpoint import Checkpoint, open_checkpoint
from hostweights.hwr.directories import model_source
from hostweights.hwr.source_memory import SourceMemory, source_fingerprint
from hostweights.hwr.stored_dtypes import stored_dtypes
from hostweights.messages.dtypes import DType
from loader_models import refused, same_state, save, save_index

BERT = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 8,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 32,
}


@pytest.fixture(autouse=True)
def _settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are as new as their tests."""
    monkeypatch.setattr(source_memory, "SETTLED_NS", -1)


COLD = """
import sys
from pathlib import Path
import torch, transformers
from diffusers import Flux2Transformer2DModel

def flux2():
    return Flux2Transformer2DModel(
        num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32,
        timestep_guidance_channels=32, in_channels=16, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False,
    ).bfloat16()

models = Path(sys.argv[1])
flux2().save_pretrained(models / "file")
flux2().save_pretrained(models / "shards", max_shard_size="60KB")
fused = flux2()
fused.fuse_qkv_projections()
fused.save_pretrained(models / "fused")
bert = transformers.BertConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2)
transformers.BertModel(bert).save_pretrained(models / "bert")
"""

LOAD = """
import asyncio, json, sys
from pathlib import Path
import torch
from hostweights import Config, HostWeights, Mode, load_diffusers, load_transformers
from hostweights.hwr import source_memory

models, root = sys.argv[1], sys.argv[2]
source_memory.SETTLED_NS = -1
opened = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".safetensors"):
        opened.extend([arguments[0]] * arguments[0].startswith(models))
sys.addaudithook(hook)

async def main():
    found = {}
    for folder in sorted(Path(models).iterdir()):
        load = load_transformers if folder.name == "bert" else load_diffusers
        for dtype in (None, torch.float16):
            async with HostWeights(Config(root=root)) as host:
                opened.clear()
                model = await load(host, folder, dtype=dtype)
                if not model.warm:
                    await host.adopt(model)
                found[f"{folder.name} {dtype}"] = (model.warm, sorted(set(opened)))
    print(json.dumps(found))
asyncio.run(main())
"""


def child(script: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_B8_warm_start_by_directory_opens_no_weight_file(tmp_path: Path) -> None:
    for library in ("diffusers", "transformers"):
        pytest.importorskip(library, reason="the extra 'models' is not installed")
    models, root = tmp_path / "models", tmp_path / "store"
    child(COLD, models)
    cold, warm = (json.loads(child(LOAD, models, root).splitlines()[-1]) for _ in range(2))
    assert {name.partition(" ")[0] for name in cold} == {"file", "shards", "fused", "bert"}
    assert len(cold["shards None"][1]) > 2
    for name, (was_warm, opened) in cold.items():
        assert not was_warm, name
        assert opened, name
    assert warm == {name: [True, []] for name in cold}


# --- what is remembered ---------------------------------------------------------------------------------------------


def bert(transformers: Any, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(seed)
    model = transformers.BertModel(transformers.BertConfig(**BERT)).to(dtype)
    model.save_pretrained(folder)
    return model


@pytest.fixture(name="transformers", scope="module")
def _transformers() -> Any:
    return pytest.importorskip("transformers", reason="the extra 'models' is not installed")


@pytest.fixture(name="opened")
def _opened(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints that describing a directory opens."""
    found: list[Path] = []

    def opening(path: Path) -> Checkpoint:
        found.append(path)
        return open_checkpoint(path)

    monkeypatch.setattr(directories, "open_checkpoint", opening)
    return found


def dtype_of(folder: Path, memory: SourceMemory) -> torch.dtype:
    return next(model_source(folder, memory=memory).factory().parameters()).dtype


def test_B8_directory_is_described_from_memory_until_a_file_changes(
    transformers: Any, tmp_path: Path, opened: list[Path]
) -> None:
    memory = SourceMemory(tmp_path / "memory")
    folder = tmp_path / "model"
    bert(transformers, folder)
    assert dtype_of(folder, memory) is torch.float32
    assert len(opened) == 1
    assert dtype_of(folder, memory) is torch.float32
    assert len(opened) == 1
    bert(transformers, folder, dtype=torch.float16)
    assert dtype_of(folder, memory) is torch.float16
    assert len(opened) == 2


def emptied(content: bytes) -> bytes:
    return content[:0]


def cut(content: bytes) -> bytes:
    return content[:-2]


def older(content: bytes) -> bytes:
    return content.replace(b'"format":1', b'"format":0')


def of_another_source(content: bytes) -> bytes:
    return content.replace(json.loads(content)["fingerprint"].encode(), b"0" * 64)


def of_unknown_dtype(content: bytes) -> bytes:
    return content.replace(b'"main":"F32"', b'"main":"F33"')


def not_text(_: bytes) -> bytes:
    return b"\xff\xfe"


@pytest.mark.parametrize("damage", [emptied, cut, older, of_another_source, of_unknown_dtype, not_text])
def test_B8_damaged_or_older_memory_is_made_anew(
    transformers: Any, tmp_path: Path, opened: list[Path], damage: Callable[[bytes], bytes]
) -> None:
    memory = SourceMemory(tmp_path / "memory")
    folder = tmp_path / "model"
    bert(transformers, folder)
    dtype_of(folder, memory)
    (entry,) = (tmp_path / "memory").iterdir()
    whole = entry.read_bytes()
    assert damage(whole) != whole
    entry.write_bytes(damage(whole))
    assert dtype_of(folder, memory) is torch.float32
    assert len(opened) == 2
    assert json.loads(entry.read_bytes())["fingerprint"] == json.loads(whole)["fingerprint"]
    dtype_of(folder, memory)
    assert len(opened) == 2


def test_B8_source_that_changes_while_it_is_described_is_not_remembered(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = SourceMemory(tmp_path / "memory")
    folder = tmp_path / "model"
    bert(transformers, folder)

    def opening(path: Path) -> Checkpoint:
        checkpoint = open_checkpoint(path)
        bert(transformers, folder, dtype=torch.float16)
        return checkpoint

    monkeypatch.setattr(directories, "open_checkpoint", opening)
    model_source(folder, memory=memory)
    assert not (tmp_path / "memory").exists()


def test_B8_what_is_remembered_is_what_the_headers_say(tmp_path: Path) -> None:
    memory = SourceMemory(tmp_path / "memory")
    save(tmp_path / "one.safetensors", {"a": torch.ones(9).half(), "b": torch.ones(3, dtype=torch.int64)})
    save(tmp_path / "two.safetensors", {"a": torch.ones(3), "c": torch.ones(2)})
    save_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    found = stored_dtypes(open_checkpoint(tmp_path))
    assert found.main is DType.F16
    assert found.floats == frozenset({DType.F16, DType.F32})
    assert [found.of(key) for key in "abcd"] == [DType.F16, DType.I64, DType.F32, None]
    fingerprint = source_fingerprint(tmp_path)
    memory.keep_dtypes(fingerprint, found)
    assert memory.find_dtypes(fingerprint) == found
    assert memory.find(fingerprint) is None


@pytest.mark.asyncio
async def test_B8_changed_directory_is_another_model_and_disabled_leaves_no_memory(
    transformers: Any, tmp_path: Path
) -> None:
    folder, root = tmp_path / "model", tmp_path / "store"
    first = bert(transformers, folder)
    async with HostWeights(Config(root=str(root))) as host:
        private = await load_transformers(host, folder, mode=Mode.DISABLED)
        assert same_state(private.module, first)
        assert not root.exists()
        await host.adopt(await load_transformers(host, folder))
        assert (await load_transformers(host, folder)).warm
        second = bert(transformers, folder, seed=1, dtype=torch.bfloat16)
        changed = await load_transformers(host, folder)
        assert not changed.warm
        assert same_state(changed.module, second)


def test_B8_first_load_of_what_was_warmed_opens_no_weight_file(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config = tmp_path / "model", Config(root=str(tmp_path / "store"))
    saved = bert(transformers, folder)
    found = describe_directory(folder)
    assert warm(config, found.factory, found.source, record=found.record, name=found.name).built

    def refuse(path: Path) -> Checkpoint:
        raise AssertionError(f"opens {path}")

    for module in ("hostweights.hwr.directories", "hostweights.actors.ports.sources"):
        monkeypatch.setattr(f"{module}.open_checkpoint", refuse)
    with open_sync(config) as host:
        model = host.load_transformers(folder)
        assert model.warm
        assert same_state(model.module, saved)
        host.unload(model)


@pytest.mark.asyncio
async def test_B8_closed_host_opens_no_store_to_describe_a_directory(tmp_path: Path) -> None:
    root = tmp_path / "store"
    async with HostWeights(Config(root=str(root))) as host:
        pass
    with refused(Code.ACTOR_STOPPED, "not open"):
        await load_transformers(host, tmp_path)
    assert not root.exists()
