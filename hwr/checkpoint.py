"""A checkpoint: named tensors in safetensors files, found, checked and read; never mapped, never changed."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from msgspec import Struct

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import FileStamp
from .checkpoint_files import resolve_link, select_files
from .dtypes import torch_dtype
from .safetensors_header import StoredTensor, read_header
from .source_files import allocate, open_unchanged, read_at, tensor_bytes, verify_stamp


class CheckpointFile(Struct, frozen=True):
    """One file: its name relative to the checkpoint's folder, the path that was looked at, and the resolved file."""

    name: str
    path: Path
    stamp: FileStamp


class CheckpointTensor(Struct, frozen=True):
    """A tensor of a checkpoint: where it lies (``file`` is an index into the files) and what it is."""

    file: int
    stored: StoredTensor


class Checkpoint(Struct, frozen=True):
    """An opened checkpoint. Holds no file open: each read opens its file and refuses one that is not the same.

    ``ignored_tensors`` counts tensors that a file holds but the index assigns elsewhere or not at all.
    """

    root: Path
    files: tuple[CheckpointFile, ...]
    tensors: Mapping[str, CheckpointTensor]
    ignored_tensors: int

    @property
    def stamps(self) -> tuple[FileStamp, ...]:
        """The stamp of each file, in order."""
        return tuple(file.stamp for file in self.files)

    @property
    def place(self) -> Path:
        """What a person knows it by: its file, or the folder of several."""
        return self.files[0].path if len(self.files) == 1 else self.root

    def verify_unchanged(self) -> None:
        """Raise source_changed when a file, or what its name leads to, is not what it was when it was opened."""
        for file in self.files:
            try:
                resolved = resolve_link(file.path)
            except HostWeightsError:
                resolved = None
            if str(resolved) != file.stamp.path:
                text = f"{file.path} no longer leads to {file.stamp.path}; open the checkpoint again"
                raise error(Stage.SOURCE, Code.SOURCE_CHANGED, text, file=file.path)
            verify_stamp(file.stamp)

    def find(self, key: str) -> CheckpointTensor:
        """The tensor of a key; raises coverage_incomplete when there is none."""
        found = self.tensors.get(key)
        if found is None:
            text = f"checkpoint {self.place} holds no tensor {key}"
            raise error(Stage.SOURCE, Code.COVERAGE_INCOMPLETE, text, tensor=key, file=self.place)
        return found

    def read(self, key: str, budget: Budget) -> torch.Tensor:
        """A tensor in private CPU memory, allocated once, aligned whatever the file's offset; the caller's own.

        Raises source_changed, io_error, no_space, coverage_incomplete for an unknown key, and what ``budget`` raises.
        """
        stored = self.find(key).stored
        tensor = allocate(stored.shape, torch_dtype(stored.dtype), f"checkpoint tensor {key}")
        self.read_ranges(key, [(0, tensor_bytes(tensor))], budget)
        return tensor

    def read_ranges(self, key: str, ranges: Iterable[tuple[int, memoryview]], budget: Budget) -> None:
        """Fill each memory from the key's bytes, starting so many bytes into them; the file is opened once.

        On an error the content of the memories is undefined. Raises like ``read``.
        """
        found = self.find(key)
        stamp = self.files[found.file].stamp
        with open_unchanged(stamp) as descriptor:
            for skip_bytes, memory in ranges:
                read_at(descriptor, memory, found.stored.offset + skip_bytes, stamp, budget)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a ``.safetensors`` file, an index, or a directory with an index or with exactly one such file.

    Reads the index and the headers, no tensor. Only files named by the index are opened, and each tensor comes from
    the file the index assigns it to. Links are followed once. Raises source_missing, source_ambiguous,
    source_corrupt or dtype_unsupported.
    """
    selection = select_files(path)
    files: list[CheckpointFile] = []
    tensors: dict[str, CheckpointTensor] = {}
    ignored = 0
    for index, (name, named_path) in enumerate(selection.files.items()):
        header = read_header(resolve_link(named_path))
        files.append(CheckpointFile(name, named_path, header.stamp))
        for stored in header.tensors:
            if selection.assignment is None or selection.assignment.get(stored.name) == name:
                tensors[stored.name] = CheckpointTensor(index, stored)
            else:
                ignored += 1
    _refuse_absent(path, selection.assignment, tensors)
    return Checkpoint(selection.root, tuple(files), tensors, ignored)


def _refuse_absent(path: Path, assignment: Mapping[str, str] | None, tensors: Mapping[str, object]) -> None:
    absent = [key for key in assignment or {} if key not in tensors]
    if assignment is not None and absent:
        shown = ", ".join(f"{key} in {assignment[key]}" for key in absent[:10])
        text = f"checkpoint {path}: the index places {len(absent)} tensors where they are not: {shown}"
        raise error(Stage.SOURCE, Code.SOURCE_CORRUPT, text, file=path, tensor=absent[0], missing=len(absent))
