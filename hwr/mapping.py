"""Tensors over an artifact's pages, through two mappings of the same files.

The shared mapping is read-only: one physical copy for all processes, and it can be registered with a driver. The
private one is copy-on-write and made on first use: reading it shares the same pages, a stray write costs one page.

Lifetime: a torch storage keeps the memoryview it was made from, the memoryview keeps the mmap, and neither is ever
released or closed by hand. Pages are therefore unmapped exactly when the last tensor over them is gone: never under a
living view, at once if there is none.
"""

import errno
import mmap
import threading
import warnings
from pathlib import Path
from typing import Final

import torch

from ..messages.dtypes import ITEM_SIZE_BYTES, DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.manifest import BlockEntry, Manifest, TensorEntry
from .dtypes import torch_dtype
from .filesystem import files
from .native import populate_read
from .packed.logical import packed_by_name, unpacked
from .store_files import Place, os_failure

_CANNOT_POPULATE: Final = frozenset({errno.EINVAL, errno.ENOSYS})


class FileMapping:
    """One file mapped once; hands out views."""

    def __init__(self, fd: int, path: Path, *, shared: bool) -> None:
        self.path = path
        try:
            self._map = (
                mmap.mmap(fd, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                if shared
                else mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)
            )
        except OSError as failure:
            failure.filename = str(path)
            raise os_failure(failure, Stage.LOOKUP, f"map {path}") from failure
        self._view = memoryview(self._map)
        self._bytes = _tensor_over(self._view)
        self._typed: dict[DType, tuple[torch.Tensor, int]] = {}

    @property
    def view(self) -> memoryview:
        """All bytes of the file; must not be released by the caller."""
        return self._view

    def extent(self, offset: int, size_bytes: int) -> torch.Tensor:
        """A range of the file: uint8, one dimension."""
        return self._bytes.narrow(0, offset, size_bytes)

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor that an entry describes."""
        try:
            base, item = self._typed[entry.dtype]
        except KeyError:
            base, item = self._typed[entry.dtype] = self._as(entry.dtype)
        return base.as_strided(entry.shape, entry.stride, entry.offset // item)

    def populate(self, offset: int, size_bytes: int) -> None:
        """Bring a range into memory now, so that a disk error is an error here and no signal at the first access.

        ``offset`` is a multiple of the page size. Raises HostWeightsError(io_error); does nothing before kernel 5.14.
        """
        try:
            populate_read(self._bytes.data_ptr() + offset, min(size_bytes, len(self._view) - offset))
        except OSError as failure:
            if failure.errno not in _CANNOT_POPULATE:
                failure.filename = str(self.path)
                raise os_failure(
                    failure, Stage.VALIDATION, f"read bytes {offset} to {offset + size_bytes} of {self.path}"
                ) from failure

    def _as(self, dtype: DType) -> tuple[torch.Tensor, int]:
        """The file's bytes as items of this dtype, and the bytes of one."""
        item = ITEM_SIZE_BYTES[dtype]
        return self._bytes[: self._bytes.numel() // item * item].view(torch_dtype(dtype)), item


class ArtifactMapping:
    """All files of one generation. Safe to use from any thread."""

    def __init__(self, manifest: Manifest, place: Place, fds: dict[str, int]) -> None:
        """Map the shared side; takes over ``fds`` (payload file name to open descriptor), also when it raises."""
        self._fds = fds
        self._directory = place.path
        self._mutex = threading.Lock()
        self._entries = {entry.name: entry for entry in manifest.tensors}
        aliases = [(alias.name, alias.target) for alias in manifest.aliases]
        self._packed = packed_by_name(manifest.packed, aliases)
        self._entries.update({name: self._entries[target] for name, target in aliases if target in self._entries})
        self._blocks = manifest.blocks
        self._private: dict[str, FileMapping] = {}
        try:
            self._shared = {name: FileMapping(fd, place.path / name, shared=True) for name, fd in fds.items()}
        except BaseException:
            self._close_fds()
            raise

    def extent(self, block: int) -> torch.Tensor:
        """The whole extent of a block in the shared mapping."""
        if not 0 <= block < len(self._blocks):
            raise _unknown(f"block {block}", self._directory, f"it has {len(self._blocks)} blocks, counted from 0")
        entry: BlockEntry = self._blocks[block]
        return self._shared[entry.file].extent(entry.offset, entry.size_bytes)

    def shared(self, name: str) -> torch.Tensor:
        """A tensor in the shared mapping; a packed one is unpacked into memory of its own."""
        entry = self._entries.get(name)
        if entry is None:
            return self._unpacked(name)
        return self._shared[entry.file].tensor(entry)

    def private(self, name: str) -> torch.Tensor:
        """A tensor in the copy-on-write mapping; a packed one is unpacked into memory of its own."""
        entry = self._entries.get(name)
        if entry is None:
            return self._unpacked(name)
        mapping = self._private.get(entry.file)
        if mapping is None:
            mapping = self._map_private(entry.file)
        return mapping.tensor(entry)

    def files(self) -> dict[str, FileMapping]:
        """The shared mappings by file name."""
        return self._shared

    def file_sizes(self) -> dict[str, int]:
        """Sizes in bytes of the mapped files as they are now."""
        return {name: files().fstat(fd).st_size for name, fd in self._fds.items()}

    def forget(self) -> None:
        """Drop everything this object holds; pages without living views are unmapped. Idempotent."""
        with self._mutex:
            self._shared, self._private = {}, {}
            self._close_fds()

    def _unpacked(self, name: str) -> torch.Tensor:
        packed = self._packed.get(name)
        if packed is None:
            names = len(self._entries) + len(self._packed)
            raise _unknown(f"tensor {name!r}", self._directory, f"it has {names} names")
        return unpacked(packed, self.shared)

    def _map_private(self, file: str) -> FileMapping:
        with self._mutex:
            if file not in self._private:
                self._private[file] = FileMapping(self._fds[file], self._directory / file, shared=False)
            return self._private[file]

    def _close_fds(self) -> None:
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            files().close(fd)

    def __del__(self) -> None:
        self._close_fds()


def _tensor_over(view: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def _unknown(what: str, directory: Path, has: str) -> HostWeightsError:
    return error(Stage.RESTORATION, Code.ARTIFACT_MISSING, f"{what} is not in the artifact {directory}: {has}")
