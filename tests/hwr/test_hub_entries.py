"""S: a transformers configuration makes nobody ask a hub, nor read a file that was not looked at."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from hostweights.hwr.hub_entries import refuse_hub
from hostweights.messages.failure import Code
from loader_models import refused

FILE = Path("folder/config.json")
ELSEWHERE = {"backbone": "somebody/backbone", "backbone_config": None}
OF_TIMM = {"backbone": "resnet50", "backbone_config": None, "use_timm_backbone": True}
TIMM = {"model_type": "timm_backbone", "backbone": "resnet50"}


@pytest.mark.parametrize(
    "entries",
    [
        {"attn_implementation": "somebody/kernel"},
        {"_attn_implementation": "somebody/kernel:forward"},
        {"attn_implementation": {"": "sdpa", "text_config": "somebody/kernel"}},
        {"text_config": {"experts_implementation": "somebody/kernel"}},
        {"configs": [{"attn_implementation": "somebody/kernel"}]},
        {"vision_config": {"architecture": "hf-hub:somebody/kernel"}},
    ],
)
def test_S_a_configuration_that_names_code_on_a_hub_is_refused(entries: dict[str, object]) -> None:
    with refused(Code.UNSUPPORTED, "names code to fetch and run", "somebody/kernel", str(FILE)):
        refuse_hub(FILE, entries, "bert")


@pytest.mark.parametrize(
    ("entries", "model_type"),
    [
        ({**ELSEWHERE, "use_timm_backbone": False, "use_pretrained_backbone": True}, "detr"),
        ({**ELSEWHERE, "use_timm_backbone": True}, "detr"),
        ({**OF_TIMM, "use_timm_backbone": False}, "detr"),
        ({**OF_TIMM, "backbone_kwargs": {"out_indices": [1]}}, "detr"),
        (OF_TIMM, "upernet"),  # looks for a repository of that name first
        ({**OF_TIMM, "model_type": "timm_backbone"}, "upernet"),
        ({**OF_TIMM, "model_type": "detr"}, "maskformer"),
        ({"backbone": "hf-hub:gpt2", "use_timm_backbone": True}, "detr"),
        ({**TIMM, "backbone": "hf-hub:gpt2"}, "timm_backbone"),
        ({"backbone_config": {**TIMM, "backbone": "hf-hub:gpt2"}}, "detr"),
        ({"backbone": "/srv/another/model"}, "detr"),
        ({"text_config": ELSEWHERE}, "bert"),
        ({"text_config": TIMM}, "bert"),
    ],
)
def test_S_a_configuration_that_names_a_backbone_on_a_hub_is_refused(
    entries: dict[str, object], model_type: str
) -> None:
    with refused(Code.UNSUPPORTED, "ask a hub", "put the backbone's own configuration into backbone_config"):
        refuse_hub(FILE, entries, model_type)


@pytest.mark.parametrize(
    ("entries", "model_type"),
    [
        (OF_TIMM, "detr"),
        ({"backbone": "resnet50"}, "table-transformer"),
        (TIMM, "timm_backbone"),
        ({"backbone": None, "backbone_config": TIMM}, "upernet"),
        ({"backbone": "somebody/backbone", "backbone_config": {"model_type": "resnet"}}, "upernet"),
        ({"backbone": {"layers": 3}}, "upernet"),
        ({"architecture": "resnet50.a1_in1k", "configuration_files": []}, "timm_wrapper"),
        ({"attn_implementation": "sdpa", "_attn_implementation": None}, "bert"),
    ],
)
def test_S_what_is_here_is_no_reason_to_refuse(entries: dict[str, object], model_type: str) -> None:
    refuse_hub(FILE, entries, model_type)


def test_S_other_files_in_the_place_of_the_configuration_are_refused() -> None:
    with refused(Code.UNSUPPORTED, "configuration_files", "nobody has looked at", "take the entry out"):
        refuse_hub(FILE, {"configuration_files": ["config.4.0.0.json"]}, "bert")


@pytest.mark.parametrize("version", [2, 3, 4, 5])
def test_S_a_flash_attention_that_only_a_hub_has_is_refused(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    entries = {"attn_implementation": f"flash_attention_{version}"}
    for absent in ("kernels", "flash_attn", "flash_attn.cute", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, absent, None)
    refuse_hub(FILE, entries, "llama")  # transformers says itself that it is not installed
    _install(monkeypatch, "kernels")
    with refused(Code.UNSUPPORTED, f"attn_implementation flash_attention_{version}", "take the entry out"):
        refuse_hub(FILE, entries, "llama")
    for own in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        _install(monkeypatch, own)
    if version < 5:
        refuse_hub(FILE, entries, "llama")


def _install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    module = ModuleType(name)
    module.__spec__ = sys.__spec__
    module.__path__ = []
    monkeypatch.setitem(sys.modules, name, module)
