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
        {"_attn_implementation": "somebody/kernel:forward"},
        {"attn_implementation": {"": "sdpa", "text_config": "somebody/kernel"}},
        {"text_config": {"experts_implementation": "somebody/kernel"}},
    ],
)
def test_S_a_configuration_that_names_code_on_a_hub_is_refused(tmp_path: Path, entries: dict[str, object]) -> None:
    save(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], **entries}))
    with refused(Code.UNSUPPORTED, "names code to fetch and run", "somebody/kernel"):
        model_source(tmp_path)


ELSEWHERE = {"backbone": "somebody/backbone", "backbone_config": None}
OF_TIMM = {"backbone": "resnet50", "backbone_config": None, "use_timm_backbone": True}


@pytest.mark.parametrize(
    "entries",
    [
        {**ELSEWHERE, "use_timm_backbone": False, "use_pretrained_backbone": True},
        {**ELSEWHERE, "use_timm_backbone": True},
        {**OF_TIMM, "use_timm_backbone": False},
        {**OF_TIMM, "backbone_kwargs": {"out_indices": [1]}},
        {"backbone": "/srv/another/model"},
        {"text_config": ELSEWHERE},
    ],
)
def test_S_a_configuration_that_names_a_backbone_on_a_hub_is_refused(
    tmp_path: Path, entries: dict[str, object]
) -> None:
    save(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DetrModel"], **entries}))
    with refused(Code.UNSUPPORTED, "ask a hub", "put the backbone's own configuration into backbone_config"):
        model_source(tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        OF_TIMM,
        {"model_type": "timm_backbone", "backbone": "resnet50"},
        {"backbone": None, "backbone_config": {"model_type": "timm_backbone", "backbone": "resnet50"}},
        {"backbone": "somebody/backbone", "backbone_config": {"model_type": "resnet"}},
        {"backbone": {"layers": 3}},
    ],
)
def test_S_a_backbone_that_is_here_is_no_reason_to_refuse(tmp_path: Path, entries: dict[str, object]) -> None:
    save(tmp_path / "model.safetensors", {"w": torch.ones(2)})
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchClass"], **entries}))
    with refused(Code.UNSUPPORTED, "does not have as a module"):  # the next reason
        model_source(tmp_path)
