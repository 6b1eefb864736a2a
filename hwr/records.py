"""Declarative model records: all that is known about one kind of model, as data.

The planner, the producers and the streaming all read the same record. Nothing here runs model code but the
validator.
"""

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Final

import msgspec
from blake3 import blake3
from msgspec.structs import replace
from torch import nn

from ..messages.dtypes import DType
from ..messages.failure import Code, HostWeightsError, Stage, error


class Packing(msgspec.Struct, frozen=True):
    """One checkpoint tensor that holds several tensors of the model, joined along ``dim`` in the given order.

    A name that ends in one of ``parts`` is cut out of the key whose ending is ``packed`` instead; where the cuts lie
    follows from the model's own shapes. With ``group`` (a length for each part) the packed tensor repeats those
    lengths group by group. Endings are matched at a dot.
    """

    packed: str
    parts: tuple[str, ...]
    dim: int = 0
    group: tuple[int, ...] = ()


class Merge(msgspec.Struct, frozen=True):
    """A tensor of the model that joins several tensors of the checkpoint along ``dim``; endings, matched at a dot."""

    merged: str
    parts: tuple[str, ...]
    dim: int = 0


class Regroup(msgspec.Struct, frozen=True):
    """A tensor that the checkpoint stores in groups of ``sections``, and the model section by section.

    Grouped QKV with d rows a head and n query heads a group has the sections (n * d, d, d): the model gets all Q, then
    all K, then all V. ``name`` is an ending, matched at a dot.
    """

    name: str
    sections: tuple[int, ...]
    dim: int = 0


class Shard(msgspec.Struct, frozen=True):
    """A tensor of which each tensor-parallel rank holds an equal share along ``dim``.

    ``sections`` are the relative lengths of parts that are shared one by one: (1, 1) is gate and up. ``name`` is an
    ending, matched at a dot.
    """

    name: str
    dim: int
    sections: tuple[int, ...] = (1,)


class ModelRecord(msgspec.Struct, frozen=True):
    """One kind of model.

    ``blocks`` are paths of the module lists whose items stream, in execution order. ``renames`` are pairs (prefix in
    the model, prefix in the checkpoint); each pair that fits a name gives a candidate key, and another one with all
    ``replacements`` (text in the model, text in the checkpoint) made. ``ignored_keys`` are shell patterns of
    checkpoint keys that the model does not need. ``transposed`` are endings of matrices that the checkpoint stores
    transposed. ``casts`` are the pairs (stored dtype, wanted dtype) that may be converted; any other difference is
    refused. ``shards`` say what a tensor-parallel rank holds; ``tp_size`` and ``tp_rank`` are set by ``for_rank``, and
    the module's shapes are then the rank's own. ``version`` rises whenever a change here could change published
    bytes. ``assumptions`` are sentences for a person: what was taken for granted. ``validator`` raises when a loaded
    model is not as the record wants it. A variation of a record: ``msgspec.structs.replace``.
    """

    record_id: str
    version: int
    component: str
    blocks: tuple[str, ...]
    renames: tuple[tuple[str, str], ...] = (("", ""),)
    ignored_keys: tuple[str, ...] = ()
    packings: tuple[Packing, ...] = ()
    validator: Callable[[nn.Module], None] | None = None
    replacements: tuple[tuple[str, str], ...] = ()
    merges: tuple[Merge, ...] = ()
    regroups: tuple[Regroup, ...] = ()
    transposed: tuple[str, ...] = ()
    casts: tuple[tuple[DType, DType], ...] = ()
    shards: tuple[Shard, ...] = ()
    tp_size: int = 1
    tp_rank: int = 0
    assumptions: tuple[str, ...] = ()

    def candidates(self, name: str) -> tuple[str, ...]:
        """The checkpoint keys under which a model name may stand, without repeats."""
        keys: list[str] = []
        for old, new in self.renames:
            if name.startswith(old):
                key = replaced = new + name[len(old) :]
                for text, other in self.replacements:
                    replaced = replaced.replace(text, other)
                keys.extend((key, replaced))
        return tuple(dict.fromkeys(keys))

    def ignores(self, key: str) -> bool:
        """Whether a checkpoint key is known to be unneeded."""
        return any(fnmatchcase(key, pattern) for pattern in self.ignored_keys)

    def shard_of(self, names: Iterable[str]) -> Shard | None:
        """How ranks share the tensor that goes by all these names, or None when every rank holds all of it."""
        known = tuple(names)
        return next((shard for shard in self.shards if any(ends_with(name, shard.name) for name in known)), None)

    def for_rank(self, tp_size: int, tp_rank: int) -> "ModelRecord":
        """The record of one rank, whose modules have the rank's own shapes; it publishes an artifact of its own.

        Raises invalid_config for a rank outside the group, and for a record that declares no shards.
        """
        if not 0 <= tp_rank < tp_size:
            text = f"rank {tp_rank} is not in a tensor-parallel group of {tp_size}; ranks are 0 to {tp_size - 1}"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
        if tp_size > 1 and not self.shards:
            text = f"record {self.record_id} declares no shards, so that ranks cannot share the model; declare them"
            raise error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)
        return replace(self, tp_size=tp_size, tp_rank=tp_rank)


def check_record(record: ModelRecord) -> None:
    """Raise invalid_config, naming the field, for a record with one that is not what its type says.

    Nothing checks a record that is made in Python.
    """
    if not isinstance(record, ModelRecord):
        raise _refused(f"the record is {record!r}, expected a ModelRecord")
    if record.validator is not None and not callable(record.validator):
        raise _refused(f"the record's validator is {record.validator!r}, expected a function of the module, or None")
    rules = msgspec.to_builtins(replace(record, validator=None), enc_hook=repr)
    try:
        msgspec.convert(rules, ModelRecord)
    except msgspec.ValidationError as wrong:
        raise _refused(f"a field of the record is not what it must be: {wrong}") from wrong
    for field, value in rules.items():
        try:
            msgspec.json.encode(value)
        except UnicodeEncodeError:
            raise _refused(f"the record's {field} holds text that is not valid Unicode: {value!r}") from None


def _refused(text: str) -> HostWeightsError:
    return error(Stage.CONFIGURATION, Code.INVALID_CONFIG, text)


def ends_with(name: str, ending: str) -> bool:
    """Whether a name ends in an ending that starts at a dot, or is it."""
    return name == ending or name.endswith(f".{ending}")


def mapping_digest(record: ModelRecord) -> str:
    """BLAKE3 over what decides which bytes of a checkpoint go into which tensor, whatever the record calls itself."""
    rules = (
        [(rule.packed, rule.parts, rule.dim, rule.group) for rule in record.packings],
        [(rule.merged, rule.parts, rule.dim) for rule in record.merges],
        [(rule.name, rule.sections, rule.dim) for rule in record.regroups],
        [(rule.name, rule.dim, rule.sections) for rule in record.shards],
    )
    renames = (record.renames, record.replacements, record.transposed, record.casts)
    return blake3(msgspec.json.encode((renames, rules))).hexdigest()


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
    than a tenth of the largest is left out, since it would only waste slots. Without any, nothing streams. What was
    taken for granted stands in the record's ``assumptions``.
    """
    sizes = {path: size for path, size in _block_lists(module) if size > 0}
    largest = max(sizes.values(), default=0)
    blocks = tuple(path for path, size in sizes.items() if size * _MINOR_LIST_RATIO >= largest)
    small = [path for path in sizes if path not in blocks]
    assumptions = (
        "the checkpoint names every tensor as the model does, in the model's shape and dtype",
        f"blocks run in the order {', '.join(blocks)}"
        if blocks
        else "nothing streams: there is no list of equal blocks",
        *(f"{path} is too small to stream and stays resident" for path in small),
    )
    return ModelRecord(
        record_id="generic", version=1, component=type(module).__name__, blocks=blocks, assumptions=assumptions
    )


def _block_lists(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Path and size in bytes of the outermost module lists that look like blocks."""
    inside: tuple[str, ...] = ()
    for path, candidate in module.named_modules():
        if not path or path.startswith(inside) or not isinstance(candidate, nn.ModuleList):
            continue
        inside += (f"{path}.",)
        if len(candidate) >= 2 and len({type(block) for block in candidate}) == 1:
            yield path, sum(p.numel() * p.element_size() for p in candidate.parameters())
