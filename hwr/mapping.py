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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch

from ..messages.dtypes import ITEM_SIZE_BYTES, DType
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.manifest import BlockEntry, Manifest, TensorEntry
from .dtypes import torch_dtype
from .filesystem import files
from .manifest_index import ManifestIndex
from .native import populate_read
from .packed.logical import packed_by_name, unpacked
from .store_files import Place, os_failure

_CANNOT_POPULATE: Final = frozenset({errno.EINVAL, errno.ENOSYS})


class FileMapping:
    """One file mapped once; hands out views."""

    def __init__(self, fd: int, path: str | Path, *, shared: bool) -> None:
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
            base, item = self._as(entry.dtype)
        return base.as_strided(entry.shape, entry.stride, entry.offset // item)

    def tensors(self, entries: Sequence[TensorEntry]) -> Sequence[torch.Tensor]:
        """The tensors of entries of one shape, stride and dtype."""
        first = entries[0]
        base, item = self._typed.get(first.dtype) or self._as(first.dtype)
        starts = [entry.offset // item for entry in entries]
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        if step > 0 and starts == list(range(starts[0], starts[0] + step * len(starts), step)):
            # Evenly spread, as the layers of a model are: torch makes all views in one call, in half the time.
            return base.as_strided((len(starts), *first.shape), (step, *first.stride), starts[0]).unbind()
        return [base.as_strided(first.shape, first.stride, start) for start in starts]

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
        found = self._bytes[: self._bytes.numel() // item * item].view(torch_dtype(dtype)), item
        self._typed[dtype] = found
        return found


class ArtifactMapping:
    """All files of one generation. Safe to use from any thread."""

    def __init__(self, manifest: Manifest, index: ManifestIndex, place: Place, fds: dict[str, int]) -> None:
        """Map the shared side; takes over ``fds`` (payload file name to open descriptor), also when it raises."""
        self._fds = fds
        self._directory = place.path
        self._mutex = threading.Lock()
        self._by_form = index.by_form
        self._aliases = [(alias.name, alias.target) for alias in manifest.aliases]
        self._packed = packed_by_name(manifest.packed, self._aliases)
        by_name = index.by_name
        more = {name: by_name[target] for name, target in self._aliases if target in by_name}
        self._entries = {**by_name, **more} if more else by_name
        self._blocks = manifest.blocks
        self._private: dict[str, FileMapping] = {}
        try:
            self._shared = {name: FileMapping(fd, place.path_of(name), shared=True) for name, fd in fds.items()}
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
        return self._private_file(entry.file).tensor(entry)

    def all_shared(self) -> dict[str, torch.Tensor]:
        """Every tensor that is stored as it is, by name and alias, in the shared mapping."""
        return self._all(self._shared.__getitem__)

    def all_private(self) -> dict[str, torch.Tensor]:
        """Every tensor that is stored as it is, by name and alias, in the copy-on-write mapping."""
        return self._all(self._private_file)

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

    def _all(self, mapping: Callable[[str], FileMapping]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for (file, *_), entries in self._by_form.items():
            for stripe in _stripes(entries):
                found.update(zip([entry.name for entry in stripe], mapping(file).tensors(stripe), strict=True))
        found.update([(name, found[target]) for name, target in self._aliases if target in found])
        return found

    def _private_file(self, file: str) -> FileMapping:
        mapping = self._private.get(file)
        if mapping is not None:
            return mapping
        with self._mutex:
            if file not in self._private:
                self._private[file] = FileMapping(self._fds[file], f"{self._directory}/{file}", shared=False)
            return self._private[file]

    def _close_fds(self) -> None:
        fds, self._fds = self._fds, {}
        for fd in fds.values():
            files().close(fd)

    def __del__(self) -> None:
        self._close_fds()


def _stripes(entries: Sequence[TensorEntry]) -> Iterator[Sequence[TensorEntry]]:
    """Tensors of one form, so parted that each part is likely to be evenly spread: one tensor of every block."""
    blocks = [entry.block for entry in entries]
    outside = blocks.count(None)
    if outside:
        yield entries[:outside]
    if outside < len(entries):
        per_block = blocks.count(blocks[-1])
        for first in range(outside, min(outside + per_block, len(entries))):
            yield entries[first::per_block]


def _tensor_over(view: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)


def _unknown(what: str, directory: str, has: str) -> HostWeightsError:
    return error(Stage.RESTORATION, Code.ARTIFACT_MISSING, f"{what} is not in the artifact {directory}: {has}")
