"""Which modules of a model are its blocks, and which of their parameters travel.

A declaration by the caller is first, the class attribute ``_hostweights_blocks`` next, a guess last.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..messages.failure import Code, HostWeightsError, Stage, error
from .layout import why_not_streamable
from .parts import parts_of

CLASS_ATTRIBUTE = "_hostweights_blocks"
SMALLEST_STACK = 1 / 16
"""A guessed stack holds at least this share of the largest one's bytes; smaller lists stay resident."""


@dataclass(frozen=True, slots=True)
class Block:
    """A module whose parameters travel together: its path and theirs, in definition order, relative to the root.

    A parameter that is made of other tensors is named part by part, as artifacts name them.
    """

    path: str
    parameters: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockMap:
    """A model's blocks in definition order; ``resident`` names block parameters that do not travel, with the reason.

    Buffers and everything outside the blocks are resident too and are not listed. ``kept`` are the paths of the blocks
    that ``keeping`` took out.
    """

    blocks: tuple[Block, ...]
    resident: tuple[tuple[str, str], ...]
    found_by: str
    kept: tuple[str, ...] = ()

    def keeping(self, count: int) -> "BlockMap":
        """The map without its first ``count`` blocks, whose parameters stay resident.

        Raises HostWeightsError(invalid_config) if no block would be left to stream.
        """
        if count >= len(self.blocks):
            raise error(
                Stage.PLANNING,
                Code.INVALID_CONFIG,
                f"{count} of {len(self.blocks)} blocks are to stay resident, which leaves none to stream; keep fewer, "
                "or move the whole model to the device instead",
            )
        kept = [(name, "is kept resident") for block in self.blocks[:count] for name in block.parameters]
        paths = (*self.kept, *(block.path for block in self.blocks[:count]))
        return BlockMap(self.blocks[count:], (*self.resident, *kept), self.found_by, paths)


def discover(module: nn.Module, declared: Sequence[str] = ()) -> BlockMap:
    """Find the blocks of ``module``; changes nothing.

    A declared path names a list of blocks (ModuleList, ModuleDict, Sequential) or one block. A member that is itself
    a ModuleList or ModuleDict, and so is never called, stands for its members. Blocks without a parameter of their
    own are left out.

    Raises HostWeightsError: blocks_not_found says what was looked for; ownership_ambiguous if one block lies in
    another.
    """
    if declared:
        stacks, found_by = _declared(module, "", declared), "declaration"
    elif by_class := _by_class(module):
        stacks, found_by = by_class, f"class attribute {CLASS_ATTRIBUTE}"
    else:
        stacks, found_by = _guess(module), "the largest lists of modules"
    paths = _blocks_of(module, stacks)
    _refuse_nested(paths)
    blocks, resident = _ownership(module, paths)
    if not blocks:
        looked = ", ".join(repr(stack) for stack in stacks) or "every ModuleList"
        raise error(
            Stage.PLANNING,
            Code.BLOCKS_NOT_FOUND,
            f"{type(module).__name__} has no block with parameters of its own: looked by {found_by} at {looked}; "
            f"declare the paths of its block lists or set {CLASS_ATTRIBUTE} on its class",
            looked_at=looked,
        )
    return BlockMap(blocks=blocks, resident=resident, found_by=found_by)


def _declared(module: nn.Module, prefix: str, declared: Sequence[str]) -> list[str]:
    """Check that the paths exist and make them relative to the root."""
    for path in declared:
        try:
            found = module.get_submodule(path) if path else None
        except AttributeError:
            found = None
        if found is None:
            children = ", ".join(name for name, _ in module.named_children()) or "none"
            raise error(
                Stage.PLANNING,
                Code.BLOCKS_NOT_FOUND,
                f"{type(module).__name__} has no module at the declared path {path!r}; its children are: {children}",
                path=path,
            )
    return [f"{prefix}{path}" for path in declared]


def _by_class(module: nn.Module) -> list[str]:
    """What the root's class declares, or else all that its parts' classes declare."""
    stacks: list[str] = []
    for path, part in module.named_modules():
        declared: object = getattr(type(part), CLASS_ATTRIBUTE, None)
        if declared is None:
            continue
        if not isinstance(declared, list | tuple) or not all(isinstance(entry, str) for entry in declared):
            raise error(
                Stage.PLANNING,
                Code.BLOCKS_NOT_FOUND,
                f"{type(part).__name__}.{CLASS_ATTRIBUTE} is {declared!r}; a tuple of module paths was expected",
            )
        stacks += _declared(part, f"{path}." if path else "", [str(entry) for entry in declared])
        if not path:
            break
    return stacks


def _guess(module: nn.Module) -> list[str]:
    """The outermost module lists that hold a fair share of the parameters."""
    sizes: dict[str, int] = {}
    for path, part in module.named_modules():
        inside = any(outer in sizes for outer in _around(path))
        if path and isinstance(part, nn.ModuleList) and not inside:
            sizes[path] = sum(leaf.nbytes for each in part.parameters() for _, leaf in parts_of("", each))
    largest = max(sizes.values(), default=0)
    return [path for path, size in sizes.items() if size and size >= largest * SMALLEST_STACK]


def _blocks_of(module: nn.Module, stacks: Sequence[str]) -> list[str]:
    paths: list[str] = []
    for stack in stacks:
        part = module.get_submodule(stack)
        if isinstance(part, nn.Sequential):
            paths += [f"{stack}.{name}" for name, _ in _members(part)]
        else:
            paths += _expand(stack, part)
    return paths


def _expand(path: str, part: nn.Module, above: tuple[nn.Module, ...] = ()) -> Iterator[str]:
    if isinstance(part, nn.ModuleList | nn.ModuleDict):
        for name, member in _members(part):
            if not any(member is outer for outer in (*above, part)):
                yield from _expand(f"{path}.{name}", member, (*above, part))
    else:
        yield path


def _members(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children with their names; a child that stands at two places is given twice."""
    children: dict[str, nn.Module | None] = vars(part)["_modules"]
    return ((name, member) for name, member in children.items() if member is not None)


def all_parameters(
    module: nn.Module, lead: str = "", above: frozenset[int] = frozenset()
) -> Iterator[tuple[str, Tensor]]:
    """Parameters under all their names, in definition order.

    A module that lies in itself, as a child that keeps its parent, is not entered again there: artifacts name their
    tensors so.
    """
    own: dict[str, Tensor | None] = vars(module)["_parameters"]
    yield from ((lead + name, parameter) for name, parameter in own.items() if parameter is not None)
    above |= {id(module)}
    for name, member in _members(module):
        if id(member) not in above:
            yield from all_parameters(member, f"{lead}{name}.", above)


def _around(path: str) -> Iterator[str]:
    """The paths of what a path lies in, from the outermost to the innermost."""
    names = path.split(".")
    return (".".join(names[:end]) for end in range(1, len(names)))


def _refuse_nested(paths: Sequence[str]) -> None:
    known = frozenset(paths)
    for inner in paths:
        for outer in _around(inner):
            if outer in known:
                raise _ambiguous(f"block {inner!r} lies inside block {outer!r}; declare one of them")
    if len(set(paths)) != len(paths):
        raise _ambiguous(f"a block is declared twice: {', '.join(paths)}")


def _ownership(module: nn.Module, paths: Sequence[str]) -> tuple[tuple[Block, ...], tuple[tuple[str, str], ...]]:
    """Give each parameter to the one block that has it alone; the others stay resident."""
    outside = 0
    owners: dict[int, set[int]] = {}
    by_path = {path: id(module.get_submodule(path)) for path in paths}
    held: dict[str, dict[int, tuple[str, Tensor]]] = {path: {} for path in paths}
    """By block, its parameters under their first names there."""
    for name, parameter in all_parameters(module):
        block = next((outer for outer in _around(name) if outer in by_path), None)
        owners.setdefault(id(parameter), set()).add(outside if block is None else by_path[block])
        if block is not None:
            held[block].setdefault(id(parameter), (name, parameter))
    blocks: list[Block] = []
    resident: list[tuple[str, str]] = []
    seen: set[int] = set()
    for path in paths:
        if by_path[path] in seen:
            continue  # the same block at two places: one block, used twice
        seen.add(by_path[path])
        travelling: list[str] = []
        for name, parameter in held[path].values():
            shared = len(owners[id(parameter)]) > 1
            for leaf_name, leaf in parts_of(name, parameter):
                reason = "is shared" if shared else why_not_streamable(leaf.data)
                if reason is None:
                    travelling.append(leaf_name)
                else:
                    resident.append((leaf_name, reason))
        if travelling:
            blocks.append(Block(path, tuple(travelling)))
    return tuple(blocks), tuple(resident)


def _ambiguous(text: str) -> HostWeightsError:
    return error(Stage.PLANNING, Code.OWNERSHIP_AMBIGUOUS, text)
