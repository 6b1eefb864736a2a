"""A model loader for vLLM: ``--load-format hostweights`` reads the checkpoint from the node's store.

The checkpoint's tensors are published once, as they are, and every worker of every engine on the host hands the same
mapped pages to the model's own ``load_weights``. Settings are those of ``hostweights config``, over which vLLM's
``--model-loader-extra-config '{"root": "/var/cache/hostweights"}'`` lays its own.
"""

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn

from hostweights.actors import open_sync
from hostweights.messages.config import Config
from hostweights.messages.failure import Code, HostWeightsError, Stage, error
from hostweights.settings import read_config

__all__ = ["LOAD_FORMAT", "register", "weights_of"]

LOAD_FORMAT: Final = "hostweights"

_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def register() -> None:
    """The entry point ``vllm.general_plugins``; vLLM calls it in every process, perhaps more than once."""
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    loaders.register_model_loader(LOAD_FORMAT)(_loader_class(loaders.BaseModelLoader))


def weights_of(directory: Path, config: Config) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a checkpoint, from the store, into which it is published first if it is not there.

    The tensors are host memory that all processes share; they may be used as long as anybody holds them, and are for
    reading. Raises HostWeightsError: source_missing, unsupported, and what ``HostWeights.load`` raises.
    """
    shapes = _shapes(directory)
    with open_sync(config) as host:
        loaded = host.load(lambda: _skeleton(shapes), directory, name=directory.resolve().name)
        for name, parameter in loaded.module.named_parameters():
            yield name, parameter.detach()


def _loader_class(base: type) -> type:
    class HostWeightsLoader(base):  # type: ignore[misc]  # vLLM's class, there when vLLM is
        """The interface of vLLM's ``BaseModelLoader``."""

        def __init__(self, load_config: Any) -> None:  # noqa: ANN401 - vLLM's LoadConfig
            super().__init__(load_config)
            self._config = _config(load_config.model_loader_extra_config)

        def download_model(self, model_config: Any) -> None:  # noqa: ANN401 - vLLM's ModelConfig
            """Nothing is downloaded: a directory that is not there is refused."""
            _directory(model_config.model)

        def load_weights(self, model: Any, model_config: Any) -> None:  # noqa: ANN401 - as above
            """Hand the checkpoint to the model, and refuse one that leaves parameters as they were made."""
            loaded = model.load_weights(weights_of(_directory(model_config.model), self._config))
            if loaded is not None and model_config.quantization is None:
                _refuse_missing(model, loaded)

    return HostWeightsLoader


def _config(extra: object) -> Config:
    """The settings of this machine, with vLLM's extra ones over them."""
    given = {} if extra is None else extra
    if not isinstance(given, dict):
        text = f"model_loader_extra_config is {type(given).__name__}; expected settings such as {{'root': '/path'}}"
        raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
    # A loader ends with the load: what is published must be there before.
    production = {"build_before_load": True, "publish_after_load": False, "adopt": False}
    own = given.get("production")
    return read_config(values={**given, "production": {**(own if isinstance(own, dict) else {}), **production}})


def _directory(model: str) -> Path:
    path = Path(model)
    if not path.is_dir():
        text = (
            f"{model} is no local directory, and load format {LOAD_FORMAT} downloads nothing; download the model first "
            "and give vLLM its directory"
        )
        raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, directory=model)
    return path


def _shapes(directory: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Every tensor of the checkpoint by name, from the headers."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for file in _files(directory):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                stored = opened.get_slice(name)
                dtype = _DTYPES.get(stored.get_dtype())
                if dtype is None:
                    text = f"{file} holds {name} as {stored.get_dtype()}; expected one of {', '.join(_DTYPES)}"
                    raise error(Stage.SOURCE, Code.UNSUPPORTED, text, tensor=name)
                found[name] = (tuple(stored.get_shape()), dtype)
    return found


def _files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        mapping: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return [directory / name for name in sorted(set(mapping.values()))]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        text = f"{directory} holds no *.safetensors; load format {LOAD_FORMAT} reads nothing else"
        raise error(Stage.SOURCE, Code.SOURCE_MISSING, text, directory=directory)
    return files


def _skeleton(shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> nn.Module:
    """Modules in modules, so that each parameter has the name that its tensor has in the checkpoint."""
    root = nn.Module()
    for name, (shape, dtype) in shapes.items():
        *path, last = name.split(".")
        at = root
        for part in path:
            if part not in at._modules:  # noqa: SLF001 - named_children is a walk
                if part in at._parameters:  # noqa: SLF001
                    raise _nested(name)
                at.add_module(part, nn.Module())
            child = at.get_submodule(part)
            at = child
        if last in at._modules:  # noqa: SLF001
            raise _nested(name)
        at.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
    return root


def _nested(name: str) -> HostWeightsError:
    text = f"the checkpoint has {name} and a tensor whose name begins or ends there; such names make no module"
    return error(Stage.SOURCE, Code.UNSUPPORTED, text, tensor=name)


def _refuse_missing(model: nn.Module, loaded: set[str]) -> None:
    """Parameters that a module's quantization method makes need not be in a checkpoint."""
    missing: list[str] = []
    for prefix, module in model.named_modules():
        if "quant_method" in vars(module):
            continue
        names = (f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters(recurse=False))
        missing += [name for name in names if name not in loaded]
    if missing:
        text = f"the checkpoint has nothing for {', '.join(missing[:5])} ({len(missing)} parameters of the model)"
        raise error(Stage.PLANNING, Code.COVERAGE_INCOMPLETE, text)
