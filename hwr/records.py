"""Declarative model records: all that is known about one kind of model, as data.

The planner, the producers and the streaming all read the same record. Nothing here runs model code but the
validator.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import msgspec
from blake3 import blake3
from torch import nn

from ..messages.failure import Code, Stage, error


@dataclass(frozen=True, slots=True)
class Packing:
    """One checkpoint tensor that holds several tensors of the model, joined along ``dim`` in the given order.

    A name that ends in one of ``parts`` is cut out of the key whose ending is ``packed`` instead; where the cuts lie
    follows from the model's own shapes. Endings are matched at a dot.
    """

    packed: str
    parts: tuple[str, ...]
    dim: int = 0


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One kind of model.

    ``blocks`` are paths of the module lists whose items stream, in execution order. ``renames`` are pairs (prefix in
    the model, prefix in the checkpoint); each pair that fits a name gives a candidate key. ``ignored_keys`` are
    shell patterns of checkpoint keys that the model does not need. ``version`` rises whenever a change here could
    change published bytes. ``validator`` raises when a loaded model is not as the record wants it.
    """

    record_id: str
    version: int
    component: str
    blocks: tuple[str, ...]
    renames: tuple[tuple[str, str], ...] = (("", ""),)
    ignored_keys: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()
    validator: Callable[[nn.Module], None] | None = None

    def candidates(self, name: str) -> tuple[str, ...]:
        """The checkpoint keys under which a model name may stand, without repeats."""
        keys = [new + name[len(old) :] for old, new in self.renames if name.startswith(old)]
        return tuple(dict.fromkeys(keys))

    def ignores(self, key: str) -> bool:
        """Whether a checkpoint key is known to be unneeded."""
        return any(fnmatchcase(key, pattern) for pattern in self.ignored_keys)


def mapping_digest(record: ModelRecord) -> str:
    """BLAKE3 over what decides which bytes of a checkpoint go into which tensor, whatever the record calls itself."""
    packings = [(packing.packed, packing.parts, packing.dim) for packing in record.packings]
    return blake3(msgspec.json.encode((record.renames, packings))).hexdigest()


def block_names(module: nn.Module, record: ModelRecord) -> tuple[str, ...]:
    """Name of each block, in order; raises blocks_not_found when a path is no list of modules."""
    names: list[str] = []
    for path in record.blocks:
        try:
            blocks = module.get_submodule(path)
        except AttributeError as problem:
            text = f"{type(module).__name__} has no module {path}, which its record names as a list of blocks"
            raise error(Stage.PLANNING, Code.BLOCKS_NOT_FOUND, text, path=path) from problem
        if not isinstance(blocks, nn.ModuleList | nn.Sequential):
            text = f"{path} is a {type(blocks).__name__}, expected a ModuleList or Sequential of blocks"
            raise error(Stage.PLANNING, Code.BLOCKS_NOT_FOUND, text, path=path)
        names.extend(f"{path}.{name}" for name, _ in blocks.named_children())
    return tuple(names)


_MINOR_LIST_RATIO: Final = 10


def generic_record(module: nn.Module) -> ModelRecord:
    """A record by discovery, for a module whose names are the checkpoint's names.

    Blocks are the outermost module lists of at least two modules of one class that hold parameters; a list smaller
    than a tenth of the largest is left out, since it would only waste slots. Without any, nothing streams.
    """
    sizes = {path: size for path, size in _block_lists(module) if size > 0}
    largest = max(sizes.values(), default=0)
    blocks = tuple(path for path, size in sizes.items() if size * _MINOR_LIST_RATIO >= largest)
    return ModelRecord(record_id="generic", version=1, component=type(module).__name__, blocks=blocks)


def _block_lists(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Path and size in bytes of the outermost module lists that look like blocks."""
    inside: tuple[str, ...] = ()
    for path, candidate in module.named_modules():
        if not path or path.startswith(inside) or not isinstance(candidate, nn.ModuleList):
            continue
        inside += (f"{path}.",)
        if len(candidate) >= 2 and len({type(block) for block in candidate}) == 1:
            yield path, sum(p.numel() * p.element_size() for p in candidate.parameters())
