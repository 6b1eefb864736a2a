"""Opening checkpoints: which files count, what is refused, and reading."""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from safetensors.torch import load_file

from hostweights.hwr.budget import PlainBudget
from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.messages.failure import Code
from loader_models import budget, refused, save, save_index, tensor_content


def value(number: float) -> torch.Tensor:
    return torch.full((2, 3), number)


def sharded(folder: Path) -> Path:
    """Three shards with one tensor each, a to c with values 1 to 3."""
    for number, key in enumerate("abc", start=1):
        save(folder / f"model-0000{number}-of-00003.safetensors", {key: value(number)})
    save_index(folder, {key: f"model-0000{number}-of-00003.safetensors" for number, key in enumerate("abc", start=1)})
    return folder


def test_B2_single_file_and_lone_file_in_a_directory_open_alike(tmp_path: Path) -> None:
    path = save(tmp_path / "diffusion_pytorch_model.safetensors", {"a": value(1)})
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "._ghost.safetensors").write_bytes(b"junk")
    for source in (path, tmp_path):
        checkpoint = open_checkpoint(source)
        assert [file.name for file in checkpoint.files] == [path.name]
        assert torch.equal(checkpoint.read("a", budget()), value(1))


def test_T11_missing_shards_are_listed(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").mkdir()
    with refused(Code.SOURCE_MISSING, "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../x.safetensors", "/x.safetensors", "a/../../x.safetensors", "./x.safetensors", "a//x.safetensors",
     "a\\x.safetensors", "a\0.safetensors", "x.bin", "", 7, None],
)  # fmt: skip
def test_T11_shard_path_that_escapes_or_is_no_shard_is_refused(tmp_path: Path, name: str) -> None:
    save(tmp_path.parent / "x.safetensors", {"a": value(1)})
    save_index(tmp_path, {"a": name})
    with refused(Code.SOURCE_CORRUPT, "maps a to"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', "{", "[" * 100_000, "\udcff"])
def test_T11_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with refused(Code.SOURCE_CORRUPT, "model.safetensors.index.json"):
        open_checkpoint(tmp_path)


def test_T06_index_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    one, two = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{one}", "a": "{two}"}}}}')
    with refused(Code.SOURCE_CORRUPT, "names a twice"):
        open_checkpoint(tmp_path)


def test_T06_a_long_index_that_names_a_tensor_twice_is_refused_in_one_pass(tmp_path: Path) -> None:
    """Each name compared with each other one would take minutes."""
    pairs = ",".join(f'"k{number}":"a.safetensors"' for number in (*range(200_000), 199_999))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{pairs}}}}}')
    with refused(Code.SOURCE_CORRUPT, "names k199999 twice"):
        open_checkpoint(tmp_path)


def test_T11_key_that_is_absent_from_its_shard_is_refused(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_index(tmp_path, {"a": "model-00001-of-00003.safetensors", "ghost": "model-00002-of-00003.safetensors"})
    with refused(Code.SOURCE_CORRUPT, "ghost in model-00002-of-00003.safetensors"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_T12_value_comes_from_the_mapped_shard_whatever_the_order(tmp_path: Path, order: tuple[str, str]) -> None:
    right, stale = order
    save(tmp_path / f"{right}.safetensors", {"a": value(1)})
    save(tmp_path / f"{stale}.safetensors", {"a": value(9), "b": value(2), "extra": value(3)})
    save_index(tmp_path, {"a": f"{right}.safetensors", "b": f"{stale}.safetensors"})
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.read("a", budget()), value(1))
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.ignored_tensors == 2


def test_T13_only_files_named_by_the_index_are_opened(tmp_path: Path) -> None:
    sharded(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"another split, damaged")
    save(tmp_path / "model.safetensors", {"a": value(7)})
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.files) == 3
    assert torch.equal(checkpoint.read("a", budget()), value(1))


def test_T13_several_files_without_an_index_are_refused_with_their_names(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": value(1)})
    save(tmp_path / "copy.safetensors", {"a": value(2)})
    with refused(Code.SOURCE_AMBIGUOUS, "model.safetensors", "copy.safetensors"):
        open_checkpoint(tmp_path)


def test_T13_several_indexes_are_refused_unless_one_has_the_canonical_name(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_index(tmp_path, {"a": "nothing.safetensors"}, "model.fp16.safetensors.index.json")
    assert len(open_checkpoint(tmp_path).files) == 3
    (tmp_path / "model.safetensors.index.json").rename(tmp_path / "model.fp32.safetensors.index.json")
    with refused(Code.SOURCE_AMBIGUOUS, "model.fp16.safetensors.index.json", "model.fp32.safetensors.index.json"):
        open_checkpoint(tmp_path)


def test_B2_nothing_to_load_says_what_was_looked_for(tmp_path: Path) -> None:
    with refused(Code.SOURCE_MISSING, str(tmp_path), "model.safetensors", "index.json"):
        open_checkpoint(tmp_path)
    with refused(Code.SOURCE_MISSING, "gone.safetensors"):
        open_checkpoint(tmp_path / "gone.safetensors")
    (tmp_path / "weights.bin").write_bytes(b"")
    with refused(Code.SOURCE_MISSING, "weights.bin", ".safetensors"):
        open_checkpoint(tmp_path / "weights.bin")


def hub(tmp_path: Path) -> tuple[Path, Path]:
    """A hub cache: blobs, and a snapshot of relative links to them, the index being a link too."""
    repository = tmp_path / "models--me--model"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for number, key in enumerate("ab", start=1):
        save(blobs / f"{number}", {key: value(number)})
        (snapshot / f"{key}.safetensors").symlink_to(f"../../blobs/{number}")
    (blobs / "index").write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/index")
    return blobs, snapshot


def test_T37_hub_links_resolve_to_the_blobs(tmp_path: Path) -> None:
    blobs, snapshot = hub(tmp_path)
    checkpoint = open_checkpoint(snapshot)
    assert [file.stamp.path for file in checkpoint.files] == [str(blobs / "1"), str(blobs / "2")]
    assert torch.equal(checkpoint.read("b", budget()), value(2))
    checkpoint.verify_unchanged()


def test_T37_chain_of_links_and_two_links_to_one_blob_work(tmp_path: Path) -> None:
    blobs, snapshot = hub(tmp_path)
    save(blobs / "1", {"a": value(1), "b": value(2)})
    (snapshot / "b.safetensors").unlink()
    (snapshot / "middle").symlink_to("a.safetensors")
    (snapshot / "b.safetensors").symlink_to("middle")
    checkpoint = open_checkpoint(snapshot)
    assert torch.equal(checkpoint.read("b", budget()), value(2))
    assert len({file.stamp.inode for file in checkpoint.files}) == 1


@pytest.mark.parametrize("target", ["../../blobs/gone", "b.safetensors"])
def test_T37_dangling_and_looping_links_are_missing_shards(tmp_path: Path, target: str) -> None:
    _, snapshot = hub(tmp_path)
    (snapshot / "b.safetensors").unlink()
    (snapshot / "b.safetensors").symlink_to(target)
    with refused(Code.SOURCE_MISSING, "b.safetensors"):
        open_checkpoint(snapshot)
    with refused(Code.SOURCE_MISSING, "b.safetensors"):
        open_checkpoint(snapshot / "b.safetensors")


def test_B1_replaced_changed_and_removed_files_are_noticed(tmp_path: Path) -> None:
    path = save(tmp_path / "model.safetensors", {"a": value(1)})
    checkpoint = open_checkpoint(path)
    checkpoint.verify_unchanged()
    content = path.read_bytes()
    path.rename(tmp_path / "old")
    for make in (lambda: None, lambda: path.write_bytes(content), lambda: os.utime(path, ns=(1, 1))):
        make()
        with refused(Code.SOURCE_CHANGED, str(path)):
            checkpoint.verify_unchanged()
        with refused(Code.SOURCE_CHANGED, str(path)):
            checkpoint.read("a", budget())


def test_B1_link_that_leads_elsewhere_is_noticed_though_the_old_blob_stays(tmp_path: Path) -> None:
    _, snapshot = hub(tmp_path)
    checkpoint = open_checkpoint(snapshot)
    (snapshot / "b.safetensors").unlink()
    (snapshot / "b.safetensors").symlink_to("../../blobs/1")
    with refused(Code.SOURCE_CHANGED, "b.safetensors"):
        checkpoint.verify_unchanged()


def test_B2_reads_equal_the_stock_reader_for_any_shape_dtype_and_alignment(tmp_path: Path) -> None:
    tensors = {
        "u": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
        "f8": torch.arange(5).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 4),
        "wide": torch.arange(5_000_000, dtype=torch.float32).reshape(2, -1),
        "flags": torch.tensor([True, False]),
    }
    path = save(tmp_path / "model.safetensors", tensors)
    checkpoint = open_checkpoint(path)
    for name, expected in load_file(path).items():
        found = checkpoint.read(name, budget())
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert tensor_content(found) == tensor_content(expected)


def test_T07_misaligned_tensor_is_read_exactly_into_aligned_memory(tmp_path: Path) -> None:
    header = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [3, 11]},
    }
    text = json.dumps(header).encode()
    data = b"abc" + torch.tensor([1.5, -2.0]).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = open_checkpoint(tmp_path).read("w", budget())
    assert found.tolist() == [1.5, -2.0]
    assert found.data_ptr() % 4 == 0


def test_B2_unreadable_file_is_permission_denied() -> None:
    script = (
        "import os, sys; from pathlib import Path; from hostweights.hwr.checkpoint import open_checkpoint;"
        "from hostweights.messages.failure import HostWeightsError; os.setuid(65534)\n"
        "try: open_checkpoint(Path(sys.argv[1]))\n"
        "except HostWeightsError as problem: print(problem.code)"
    )
    with TemporaryDirectory() as folder:
        save(Path(folder) / "model.safetensors", {"a": value(1)}).chmod(0o600)
        Path(folder).chmod(0o755)
        done = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == Code.PERMISSION_DENIED


def test_B2_unknown_key_and_cancel_end_a_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path / "model.safetensors", {"a": value(1)}))
    with refused(Code.COVERAGE_INCOMPLETE, "ghost"):
        checkpoint.read("ghost", budget())
    spent = PlainBudget()
    spent.cancel()
    with refused(Code.CANCELLED):
        checkpoint.read("a", spent)
