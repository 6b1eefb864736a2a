"""Fuzz target: the header parser and the index reader, on one input; see README.md beside this file."""

import sys
import tempfile
from math import prod
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["hostweights"]):
    from hostweights.hwr.checkpoint_files import select_files
    from hostweights.hwr.safetensors_header import read_header
    from hostweights.messages.dtypes import ITEM_SIZE_BYTES
    from hostweights.messages.failure import HostWeightsError

FOLDER = Path(tempfile.mkdtemp(prefix="hostweights-fuzz-"))
FILE = FOLDER / "model.safetensors"
INDEX = FOLDER / "model.safetensors.index.json"
SEED = b'{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},"__metadata__":{"k":"v"}}'


def check(data: bytes) -> None:
    """One input: as a whole file, as a header with a right length in front, and as an index."""
    for content in (data, len(data).to_bytes(8, "little") + data + bytes(8)):
        FILE.write_bytes(content)
        check_header(FILE)
    INDEX.write_bytes(data)
    try:
        selection = select_files(INDEX)
    except HostWeightsError:
        return
    for name, path in selection.files.items():
        inside = path.parent.resolve().is_relative_to(FOLDER.resolve())
        assert inside, f"the index leads out of the folder: {name}"


def check_header(path: Path) -> None:
    """Whatever is accepted keeps the parser's promises."""
    try:
        header = read_header(path)
    except HostWeightsError:
        return
    size_bytes = path.stat().st_size
    names = [tensor.name for tensor in header.tensors]
    assert len(set(names)) == len(names), "a name stands twice"
    end = None
    for tensor in header.tensors:
        assert prod(tensor.shape) * ITEM_SIZE_BYTES[tensor.dtype] == tensor.size_bytes, tensor
        assert end is None or tensor.offset == end, f"a gap or an overlap before {tensor.name}"
        end = tensor.offset + tensor.size_bytes
        assert end <= size_bytes, f"{tensor.name} ends outside the file"
    assert end is None or end == size_bytes, "bytes after the last tensor"


def main() -> None:
    """Run libFuzzer with the command line's options."""
    corpus = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    for folder in corpus:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "seed-header").write_bytes(SEED)
        (Path(folder) / "seed-file").write_bytes(len(SEED).to_bytes(8, "little") + SEED + bytes(8))
        (Path(folder) / "seed-index").write_bytes(b'{"weight_map":{"a":"model.safetensors"}}')
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
