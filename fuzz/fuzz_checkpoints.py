"""Checkpoints: the header of a safetensors file, the index of several, and the JSON of a model's directory."""

from math import prod

from fuzz_kit import Target, scratch
from hostweights.hwr.checkpoint_files import select_files
from hostweights.hwr.directories import component_names
from hostweights.hwr.safetensors_header import read_header
from hostweights.messages.dtypes import ITEM_SIZE_BYTES
from hostweights.messages.failure import HostWeightsError

_HEADER = b'{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"__metadata__":{"k":"v"}}'


def check_header(data: bytes) -> None:
    """As a whole file, and as a header with a right length in front; what is accepted covers the file exactly."""
    path = scratch() / "model.safetensors"
    for content in (data, len(data).to_bytes(8, "little") + data + bytes(8)):
        path.write_bytes(content)
        try:
            header = read_header(path)
        except HostWeightsError:
            continue
        names = [tensor.name for tensor in header.tensors]
        assert len(set(names)) == len(names), "a name stands twice"
        end = header.data_offset
        for tensor in header.tensors:
            assert prod(tensor.shape) * ITEM_SIZE_BYTES[tensor.dtype] == tensor.size_bytes, tensor
            assert tensor.offset == end, f"a gap or an overlap before {tensor.name}"
            end += tensor.size_bytes
        assert end == len(content), "the tensors end elsewhere than the file"


def check_index(data: bytes) -> None:
    """An index leads to files of its own folder."""
    index = scratch() / "indexed" / "model.safetensors.index.json"
    index.parent.mkdir(exist_ok=True)
    (index.parent / "model.safetensors").touch()
    index.write_bytes(data)
    try:
        selection = select_files(index)
    except HostWeightsError:
        return
    for name, path in selection.files.items():
        assert path.resolve().is_relative_to(index.parent.resolve()), f"the index leads out of the folder: {name}"


def check_pipeline(data: bytes) -> None:
    """A pipeline's components are folders of its own."""
    root = scratch() / "around" / "pipeline"
    (root / "unet").mkdir(parents=True, exist_ok=True)
    for folder in (root.parent, root / "unet"):
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").touch()
    (root / "model_index.json").write_bytes(data)
    try:
        names = component_names(root)
    except HostWeightsError:
        return
    for name in names:
        assert (root / name).resolve().parent == root.resolve(), f"a component outside of the pipeline: {name}"


def _headers() -> list[bytes]:
    empty = b'{"b":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}'
    return [_HEADER, len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(8), empty, b"{}"]


def _indexes() -> list[bytes]:
    return [b'{"metadata":{"total_size":8},"weight_map":{"a":"model.safetensors"}}', b'{"weight_map":{"a":"../x"}}']


def _pipelines() -> list[bytes]:
    whole = b'{"_class_name":"P","unet":["diffusers","UNet2DModel"],"tokenizer":["transformers","T"],"x":[null,null]}'
    return [whole, b'{"..":["diffusers","X"]}', b'{"unet":[{},"X"]}']


TARGETS = (
    Target("checkpoint-header", check_header, _headers),
    Target("checkpoint-index", check_index, _indexes),
    Target("model-index", check_pipeline, _pipelines),
)
