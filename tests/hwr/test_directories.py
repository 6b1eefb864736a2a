"""Directories that diffusers or transformers could have written, as far as they are read without the libraries."""

import json
from pathlib import Path

import pytest
import torch

from hostweights.hwr.checkpoint import open_checkpoint
from hostweights.hwr.directories import component_names, model_source
from hostweights.messages.failure import Code
from loader_models import refused, save, save_index


def component(folder: Path, config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save(folder / "model.safetensors", {"w": torch.zeros(2)})
    return folder


def test_B9_directory_of_neither_library_says_what_was_looked_for(tmp_path: Path) -> None:
    with refused(Code.SOURCE_MISSING, "model_index.json", "config.json"):
        model_source(tmp_path)


def test_B9_what_is_no_directory_is_told_apart_and_the_way_out_named(tmp_path: Path) -> None:
    with refused(Code.SOURCE_MISSING, "has neither", "--factory"):
        model_source(tmp_path)
    with refused(Code.SOURCE_MISSING, "does not exist"):
        model_source(tmp_path / "nowhere")
    with refused(Code.SOURCE_MISSING, "is a file", "--factory"):
        model_source(save(tmp_path / "model.safetensors", {"w": torch.zeros(2)}))


def test_B9_a_pipeline_without_its_components_says_which_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "vae").mkdir()
    index = {"_class_name": "P", "transformer": ["diffusers", "X"], "vae": ["diffusers", "Y"], "custom": ["own", "W"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with refused(Code.SOURCE_MISSING, "a pipeline's directory", "none of transformer, vae is there"):
        model_source(tmp_path)
    (tmp_path / "model_index.json").write_text("{}")
    with refused(Code.SOURCE_MISSING, "a pipeline's directory", "names none"):
        model_source(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{", "null", '{"a": \xff}', "[" * 100_000])
def test_B9_configuration_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with refused(Code.SOURCE_CORRUPT, "config.json"):
        model_source(tmp_path)


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        ({}, Code.SOURCE_CORRUPT, "names no one class"),
        ({"architectures": []}, Code.SOURCE_CORRUPT, "names no one class"),
        ({"architectures": ["A", "B"]}, Code.SOURCE_CORRUPT, "names no one class"),
        ({"architectures": ["os.system"]}, Code.SOURCE_CORRUPT, "os.system"),
        ({"_class_name": 7}, Code.SOURCE_CORRUPT, "7"),
        ({"_class_name": "../x"}, Code.SOURCE_CORRUPT, "../x"),
    ],
)
def test_B9_class_that_is_no_plain_name_is_refused(tmp_path: Path, config: object, code: Code, words: str) -> None:
    with refused(code, words):
        model_source(component(tmp_path, config))


def test_B9_class_that_the_library_lacks_is_unsupported(tmp_path: Path) -> None:
    # Without the library the text says how to get it.
    with refused(Code.UNSUPPORTED, "NoSuchModel", "transformers"):
        model_source(component(tmp_path, {"architectures": ["NoSuchModel"]}))
    with refused(Code.UNSUPPORTED, "diffusers"):
        model_source(component(tmp_path, {"_class_name": "NoSuchModel"}))


def test_B9_pipeline_lists_components_with_weights_only(tmp_path: Path) -> None:
    component(tmp_path / "transformer", {"_class_name": "X"})
    (tmp_path / "vae").mkdir()
    index = {
        "_class_name": "P",
        "transformer": ["diffusers", "X"],
        "vae": ["diffusers", "Y"],
        "tokenizer": ["transformers", "Z"],
        "custom": ["my_module", "W"],
        "../outside": ["diffusers", "X"],
        "..": ["diffusers", "X"],
        "odd": [{}, "X"],
    }
    component(tmp_path.parent, {"_class_name": "X"})
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert component_names(tmp_path) == ("transformer",)
    with refused(Code.SOURCE_MISSING, "vae", "it has transformer"):
        model_source(tmp_path, "vae")


def test_B2_a_name_that_no_directory_can_have_is_no_component(tmp_path: Path) -> None:
    index = {"a" * 4096: ["diffusers", "X"], "b\0": ["diffusers", "X"], "nothing": ["diffusers", "X"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    assert component_names(tmp_path) == ()


def test_B2_index_may_be_named_itself(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", {"w": torch.ones(2)})
    save(tmp_path / "b.safetensors", {"w": torch.zeros(2)})
    for name in ("model.safetensors.index.json", "model.safetensors.index.fp16.json"):
        save_index(tmp_path, {"w": "a.safetensors"}, name)
        checkpoint = open_checkpoint(tmp_path / name)
        assert [file.name for file in checkpoint.files] == ["a.safetensors"]


@pytest.mark.parametrize(
    "entries",
    [
        {"attn_implementation": "somebody/kernel"},
        {"backbone": "somebody/backbone", "use_timm_backbone": True},
        {"configuration_files": ["config.4.0.0.json"]},
    ],
)
def test_S_a_configuration_by_which_a_hub_would_be_asked_is_refused(tmp_path: Path, entries: dict[str, object]) -> None:
    pytest.importorskip("transformers", reason="the extra 'models' is not installed")
    save(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DetrModel"], **entries}))
    with refused(Code.UNSUPPORTED, "config.json names", next(iter(entries))):
        model_source(tmp_path)
