"""Other loaders of safetensors or torch files; benchmarks/requirements-store.txt has them.

Each hands all its tensors, on the CPU, to ``use`` while they live. What is not installed, or refuses a machine without
a GPU, is left out with the reason as its row.
"""

import importlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load, load_file

Use = Callable[[dict[str, torch.Tensor]], None]
LOAD_FILE, SAFE_OPEN = "safetensors load_file", "safetensors safe_open + get_tensor"
OPTIONAL = frozenset({"fastsafetensors", "runai-model-streamer", "tensorizer", "instanttensor"})


def loaders(st_file: Path, torch_file: Path, tensorizer_file: Path, use: Use) -> dict[str, Callable[[], None]]:
    """All of them by name."""
    return {
        LOAD_FILE: lambda: use(load_file(st_file)),
        SAFE_OPEN: lambda: open_all(st_file, use),
        "safetensors load of bytes": lambda: use(load(st_file.read_bytes())),
        "torch.load(mmap=True)": lambda: use(torch.load(torch_file, mmap=True, weights_only=True)),
        "torch.load": lambda: use(torch.load(torch_file, weights_only=True)),
        "fastsafetensors": lambda: _fastsafetensors(st_file, use),
        "runai-model-streamer": lambda: _runai(st_file, use),
        "tensorizer": lambda: _tensorizer(tensorizer_file, use),
        "instanttensor": lambda: _instanttensor(st_file, use),
    }


def open_all(path: Path, use: Use) -> None:
    """The lazy way of safetensors, for all tensors."""
    with safe_open(path, framework="pt") as opened:
        use({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118  # it is no mapping


def tensorizer_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensorizer's own format."""
    serializer = importlib.import_module("tensorizer").TensorSerializer(str(path))
    serializer.write_state_dict(tensors)
    serializer.close()


def _fastsafetensors(path: Path, use: Use) -> None:
    library = importlib.import_module("fastsafetensors")
    loader = library.SafeTensorsFileLoader(library.SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [str(path)]})
    buffer = loader.copy_files_to_device()
    use({name: buffer.get_tensor(name) for name in loader.get_keys()})
    buffer.close()
    loader.close()


def _runai(path: Path, use: Use) -> None:
    with importlib.import_module("runai_model_streamer").SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        use(dict(streamer.get_tensors()))


def _tensorizer(path: Path, use: Use) -> None:
    with importlib.import_module("tensorizer").TensorDeserializer(str(path), device="cpu", lazy_load=False) as found:
        use(dict(found))


def _instanttensor(path: Path, use: Use) -> None:
    with importlib.import_module("instanttensor").safe_open(str(path), framework="pt", device="cpu") as opened:
        use(dict(opened.tensors()))
