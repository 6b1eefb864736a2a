"""The vLLM loader, against the interface that vLLM publishes: as recorded below, and the real one where installed.

Recorded from vLLM 0.33.0: ``register_model_loader(format)`` decorates a subclass of ``BaseModelLoader``, which has the
abstract ``download_model(model_config)`` and ``load_weights(model, model_config)``, is made from a ``LoadConfig`` and
keeps it; ``get_model_loader`` makes one for a format; ``load_model`` makes the model, calls ``load_weights`` and
returns it in evaluation mode. A model's ``load_weights`` takes names and tensors and returns the names of what it set.
"""

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hostweights import Code, HostWeightsError, Mode
from hostweights.settings import read_config
from hostweights.vllm import LOAD_FORMAT, register, weights_of


class BaseModelLoader(ABC):
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: Any) -> None: ...

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: Any) -> None: ...

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        del prefix
        model: nn.Module = vllm_config.make_model()
        self.load_weights(model, model_config)
        return model.eval()


@pytest.fixture
def loaders(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[BaseModelLoader]]:
    """The recorded interface in vLLM's place; what was registered, by format."""
    registered: dict[str, type[BaseModelLoader]] = {}

    def register_model_loader(load_format: str) -> Callable[[type[BaseModelLoader]], type[BaseModelLoader]]:
        def keep(kind: type[BaseModelLoader]) -> type[BaseModelLoader]:
            assert issubclass(kind, BaseModelLoader)
            registered[load_format] = kind
            return kind

        return keep

    module = ModuleType("vllm.model_executor.model_loader")
    vars(module).update(register_model_loader=register_model_loader, BaseModelLoader=BaseModelLoader)
    for name in ("vllm", "vllm.model_executor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return registered


class Served(nn.Module):
    """As vLLM's models are: fused parameters that the checkpoint has apart, filled by ``load_weights``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(6, 4), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = set()
        for name, tensor in weights:
            if name == "model.norm.weight":
                self.norm.copy_(tensor)
                loaded.add("norm")
            elif name.startswith("model.layers.0."):
                row = 2 * "qkv".index(name.split(".")[3])
                self.qkv[row : row + 2].copy_(tensor)
                loaded.add("qkv")
        return loaded


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "served-model"
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    tensors = {f"model.layers.0.{part}.weight": torch.randn(2, 4, generator=generator) for part in "qkv"}
    tensors["model.norm.weight"] = torch.randn(4, generator=generator).to(torch.bfloat16)
    tensors["model.table"] = torch.arange(5)
    save_file(tensors, directory / "model.safetensors")
    return directory


def load(loaders: dict[str, type[BaseModelLoader]], model: str, extra: object, **more: Any) -> nn.Module:
    loader = loaders[LOAD_FORMAT](SimpleNamespace(load_format=LOAD_FORMAT, model_loader_extra_config=extra))
    model_config = SimpleNamespace(model=model, quantization=None, **more)
    loader.download_model(model_config)
    return loader.load_model(SimpleNamespace(make_model=Served), model_config)


def test_the_entry_point_leads_to_a_loader_that_may_be_registered_twice(
    loaders: dict[str, type[BaseModelLoader]],
) -> None:
    points = [each for each in metadata.entry_points(group="vllm.general_plugins") if each.name == "hostweights"]
    for point in points:  # none where the package runs from a checkout that was installed before the plugin was there
        assert point.load() is register

    register()
    register()

    assert set(loaders) == {"hostweights"}


def test_weights_come_cold_from_the_checkpoint_and_warm_from_the_store(
    loaders: dict[str, type[BaseModelLoader]], checkpoint: Path, tmp_path: Path
) -> None:
    register()
    stored = load_file(checkpoint / "model.safetensors")
    expected = torch.cat([stored[f"model.layers.0.{part}.weight"] for part in "qkv"])

    for mode in (Mode.PREFERRED, Mode.REQUIRED, Mode.REQUIRED):
        model = load(loaders, str(checkpoint), {"root": str(tmp_path / "store"), "mode": str(mode)})
        assert isinstance(model, Served)
        assert not model.training
        assert torch.equal(model.qkv, expected)
        assert torch.equal(model.norm, stored["model.norm.weight"])
    assert len(list((tmp_path / "store" / "artifacts").iterdir())) == 1


def test_tensors_outlive_the_host_that_gave_them(checkpoint: Path, tmp_path: Path) -> None:
    config = read_config(environment={}, values={"root": str(tmp_path / "store")})
    stored = load_file(checkpoint / "model.safetensors")

    found = dict(weights_of(checkpoint, config))

    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], stored[name]) for name in stored)


def test_a_checkpoint_of_several_files_is_read_by_its_index(checkpoint: Path, tmp_path: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(stored)
    files = {name: f"model-{number // 3}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: stored[name] for name in names if files[name] == file}, checkpoint / file)
    index = '{"weight_map": {' + ", ".join(f'"{name}": "{file}"' for name, file in files.items()) + "}}"
    (checkpoint / "model.safetensors.index.json").write_text(index)
    config = read_config(environment={}, values={"root": str(tmp_path / "store")})

    assert {name: tensor.tolist() for name, tensor in weights_of(checkpoint, config)} == {
        name: tensor.tolist() for name, tensor in stored.items()
    }


@pytest.mark.parametrize(
    ("extra", "code"),
    [({"rot": "/x"}, Code.INVALID_CONFIG), ("root", Code.INVALID_CONFIG), ({"root": 3}, Code.INVALID_CONFIG)],
)
def test_settings_that_are_none_are_refused(
    loaders: dict[str, type[BaseModelLoader]], checkpoint: Path, extra: object, code: Code
) -> None:
    register()
    with pytest.raises(HostWeightsError) as caught:
        load(loaders, str(checkpoint), extra)

    assert caught.value.code is code


def test_what_is_no_directory_of_safetensors_is_refused(
    loaders: dict[str, type[BaseModelLoader]], tmp_path: Path
) -> None:
    register()
    for model, words in (("acme/model", "downloads nothing"), (str(tmp_path), "holds no")):
        with pytest.raises(HostWeightsError, match=words) as caught:
            load(loaders, model, {"root": str(tmp_path / "store")})
        assert caught.value.code is Code.SOURCE_MISSING


def test_a_parameter_that_the_checkpoint_lacks_is_refused(
    loaders: dict[str, type[BaseModelLoader]], checkpoint: Path, tmp_path: Path
) -> None:
    register()
    stored = load_file(checkpoint / "model.safetensors")
    del stored["model.norm.weight"]
    save_file(stored, checkpoint / "model.safetensors")

    with pytest.raises(HostWeightsError, match="nothing for norm") as caught:
        load(loaders, str(checkpoint), {"root": str(tmp_path / "store")})

    assert caught.value.code is Code.COVERAGE_INCOMPLETE


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a")])
def test_names_that_make_no_module_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    save_file({name: torch.ones(2) for name in names}, tmp_path / "model.safetensors")
    config = read_config(environment={}, values={"root": str(tmp_path / "store")})

    with pytest.raises(HostWeightsError) as caught:
        list(weights_of(tmp_path, config))

    assert caught.value.code in (Code.UNSUPPORTED, Code.MODEL_FAILED)


def test_the_real_vllm_takes_the_loader() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    loaders = importlib.import_module("vllm.model_executor.model_loader")
    load_config = importlib.import_module("vllm.config.load").LoadConfig
    register()

    loader = loaders.get_model_loader(
        load_config(load_format=LOAD_FORMAT, model_loader_extra_config={"root": "/var/cache/hostweights"})
    )

    assert isinstance(loader, loaders.BaseModelLoader)
    assert type(loader).__name__ == "HostWeightsLoader"
