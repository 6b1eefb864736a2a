"""Attach a model to a ring, and everything that can be asked of it until it is detached."""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..messages.budget import Budget
from ..messages.failure import Code, Stage, error
from ..messages.transport import RegistrationPolicy, RingStats
from .binding import BlockBinding
from .component import Component, components
from .contract import Device, HostBacking
from .depth import LEAST_SLOTS, MOST_AUTOMATIC_SLOTS
from .discovery import BlockMap, discover
from .driver import RingDriver
from .hooks import BlockHook, ComponentHook, RootHook, close_off, guard, is_streamed, refuse_gone, replace_attribute
from .layout import capacity_bytes
from .parts import find_part, show_device
from .resident import Resident
from .sharded import refuse_sharded
from .timeline import Timeline
from .transfer import RankLocal, Way
from .tuner import Tuner

_LOG = logging.getLogger("hostweights")
_CLAIMING = threading.Lock()
_CLAIMED: set[int] = set()


@dataclass(frozen=True, slots=True)
class RingSizes:
    """``block_bytes``: of all blocks together; ``slot_bytes``: of one slot; ``direct``: copied as they lie."""

    paths: tuple[str, ...]
    slots: int
    block_bytes: int
    slot_bytes: int
    direct: bool
    kept: tuple[str, ...] = ()
    on_demand: tuple[str, ...] = ()


def _ring_sizes(
    modules: Sequence[nn.Module], bindings: Sequence[BlockBinding], backing: HostBacking, slots: int, way: Way
) -> RingSizes:
    """A slot holds the largest block in any layout: an artifact's extent also holds the block's buffers."""
    needs = [
        max(plan.size_bytes, capacity_bytes([*binding.parameters, *module.buffers()]))
        for module, binding, plan in zip(modules, bindings, backing.blocks, strict=True)
    ]
    return RingSizes(
        paths=tuple(binding.path for binding in bindings),
        slots=min(slots, len(bindings)),
        block_bytes=sum(plan.size_bytes for plan in backing.blocks),
        slot_bytes=way.slot_bytes(max(needs)),
        direct=all(backing.extent(block) is not None for block in range(len(bindings))),
    )


class Streamer:
    """A model whose blocks are streamed; made by ``attach``. Safe to call from any thread.

    Owns the backing and the slots until ``detach``; the device belongs to the caller and outlives it.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: list[nn.Module],
        device: Device,
        driver: RingDriver,
        resident: Resident,
        parts: Sequence[Component],
        hooks: ExitStack,
        rest: ExitStack,
        sizes: "RingSizes",
    ) -> None:
        self._module = module
        self._blocks = blocks
        self._device = device
        self._driver = driver
        self._resident = resident
        self._parts = tuple(parts)
        self._hooks = hooks
        self._rest = rest
        self._sizes = sizes
        self._changing = threading.Lock()
        self._detached = False

    @classmethod
    def attach(
        cls,
        module: nn.Module,
        blocks: BlockMap | Sequence[str],
        device: Device,
        backing: HostBacking,
        *,
        slots: int | None = LEAST_SLOTS,
        slot_limit_bytes: int | None = None,
        budget: Budget | None = None,
        registration: RegistrationPolicy | None = None,
        on_demand: Sequence[str] = (),
        way: Way = RankLocal(),  # noqa: B008  holds nothing
    ) -> "Streamer":
        """Stream ``module``'s blocks from ``backing`` through ``slots`` slots of ``device``.

        ``blocks`` is a discovery or declared paths. Parameters that ``backing`` does not hold, buffers and everything
        outside the blocks move to the device. Streamed parameters are frozen and show the backing's parked tensors
        between uses. Device memory taken, at every moment: the resident part and the slots. Fewer slots are made when
        there are fewer blocks. ``registration`` bounds what is registered with the device's driver. ``way`` says
        whether blocks come rank by rank or are gathered; gathering makes this call one that all ranks make together.

        ``slots`` None begins with two; after the first forwards were measured, between two forwards, more are added if
        they shorten a forward and all slots fit ``slot_limit_bytes``. What was decided is in ``stats().depth``.

        Blocks that the discovery keeps stay on the device until ``release``. Parts at the paths of ``on_demand``,
        outside the blocks, are there only while their ``forward`` runs.

        After any error the model is as it was and the backing still belongs to the caller; otherwise the backing is
        closed by ``detach`` or ``rebase``. Raises HostWeightsError: already_attached, not_attached (after a terminal
        detach), blocks_not_found, coverage_incomplete, shape_mismatch, invalid_config, or what the budget raises.
        """
        refuse_gone(module)
        refuse_sharded(module)
        asked, slots = slots, LEAST_SLOTS if slots is None else slots
        _refuse_below(slots, LEAST_SLOTS, f"a ring of {slots!r} slots cannot overlap; {LEAST_SLOTS} is the least")
        found = blocks if isinstance(blocks, BlockMap) else discover(module, blocks)
        modules = [module.get_submodule(block.path) for block in found.blocks]
        with _claimed(module, modules):
            _check_blocks([block.path for block in found.blocks], backing)
            bindings = _bindings(module, found, backing)
            sizes = replace(
                _ring_sizes(modules, bindings, backing, slots, way), kept=found.kept, on_demand=tuple(on_demand)
            )
            # Ranks would measure differently, and must gather the same blocks in the same order.
            alone = isinstance(way, RankLocal)
            tuner = _tuner(sizes, slot_limit_bytes) if asked is None and alone else None
            depth = f"{sizes.slots} slots: {_why(asked, sizes, tuner, alone)}"
            with (
                torch.inference_mode(mode=False),
                ExitStack() as rest,
                ExitStack() as failed,
                ExitStack() as hooks,
            ):
                streamed = {id(parameter) for binding in bindings for parameter in binding.parameters}
                parts = components(module, found.kept, on_demand, streamed, device)
                resident = Resident(module, streamed.union(id(each) for part in parts for each in part.parameters))
                resident.move(device, budget, rest)
                show_device(list(module.parameters()), device.torch_device, rest)
                for part in parts:
                    rest.callback(part.close)
                    if part.keep:
                        part.fetch(budget)
                _freeze(modules, rest)
                for binding in bindings:
                    failed.callback(binding.move_home, [parameter.data for parameter in binding.parameters])
                policy = RegistrationPolicy() if registration is None else registration
                driver = RingDriver(
                    device,
                    backing,
                    bindings,
                    slots=sizes.slots,
                    slot_bytes=sizes.slot_bytes,
                    registration=policy,
                    way=way,
                    depth=depth,
                    tuner=tuner,
                )
                failed.callback(driver.abandon)
                guard(module, modules, driver, rest)
                for index, block in enumerate(modules):
                    replace_attribute(block, "forward", BlockHook(driver, index, block), hooks)
                for part in parts:
                    replace_attribute(part.module, "forward", ComponentHook(part), hooks)
                replace_attribute(module, "forward", RootHook(driver, module), hooks)
                _check(budget)
                way.ready()
                driver.prefetch()
                failed.pop_all()
                return cls(module, modules, device, driver, resident, parts, hooks.pop_all(), rest.pop_all(), sizes)

    @property
    def sizes(self) -> "RingSizes":
        """Blocks, slots and their bytes."""
        return self._sizes

    def stats(self) -> RingStats:
        """A snapshot of the counters."""
        return self._driver.stats()

    def announce(self, forwards: int) -> None:
        """Say how many forwards will begin from now on: after the last one no block is fetched for another."""
        _refuse_below(forwards, 0, f"{forwards!r} forwards cannot follow; announce a number, 0 or more")
        self._driver.announce(forwards)

    @contextmanager
    def at_rest(self, budget: Budget) -> Iterator[None]:
        """Inside, no block is in use and every tensor of the model is a host tensor with its value.

        For who must see every weight at once, between two forwards. Waits by ``budget`` for the blocks in use; blocks
        that are called meanwhile wait. Keep it short, and call no block inside.
        """
        with self._changing, self._driver.at_rest(budget), self._homes_shown():
            yield

    def release(self) -> int:
        """Let the kept blocks leave the device, but for those in use; returns the bytes let go.

        The next forward brings them back, and they stay again.
        """
        with self._changing:
            return sum(part.release() for part in self._parts if part.keep)

    def _settle_device(self) -> None:
        """What is not streamed may still be computing, on any stream, from memory that is about to be let go."""
        try:
            self._device.synchronize()
        except Exception as failure:  # noqa: BLE001 - of work that whoever needed it was told of
            _LOG.debug("while the device came to rest: %s", failure)

    @contextmanager
    def record(self) -> Iterator[Timeline]:
        """Record when each block is copied, waited for and computed; the timeline can be read after the block.

        Costs four events a block. Raises HostWeightsError(unsupported) if a recording is under way.
        """
        timeline = self._driver.start_recording()
        try:
            yield timeline
        finally:
            self._driver.stop_recording()
            timeline.finish()

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """During the block, between two forwards, every tensor of the model is a host tensor that may be replaced.

        Afterwards the replacements are what ``detach`` brings back; what computes stays what it was.
        """
        with self._changing, self._homes_shown():
            yield

    @contextmanager
    def _homes_shown(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._resident.at_home())
            for part in self._parts:
                stack.enter_context(part.at_home())
            yield

    def rebase(self, backing: HostBacking, budget: Budget | None = None) -> None:
        """Between two blocks, take the weights from ``backing`` instead, which must hold equal bytes.

        Parameters show the new parked tensors when this returns (a block in use: after its use), and the old backing
        is closed after its last copy. After an error nothing has changed and ``backing`` still belongs to the caller.
        Raises HostWeightsError: not_attached, coverage_incomplete, shape_mismatch, or unsupported if a block does not
        fit the slots or parameters were written meanwhile.
        """
        _check_blocks(self._sizes.paths, backing)
        largest = max(backing.blocks, key=lambda plan: plan.size_bytes)
        if largest.size_bytes > self._sizes.slot_bytes:
            raise error(
                Stage.TRANSPORT,
                Code.UNSUPPORTED,
                f"block {largest.name!r} takes {largest.size_bytes} bytes in the new backing and a slot holds "
                f"{self._sizes.slot_bytes}; rebase to a staged backing, or detach and attach again",
                block=largest.name,
            )
        _check(budget)
        with self._changing:
            self._driver.rebase(backing)

    def detach(self, *, terminal: bool, budget: Budget | None = None) -> None:
        """Stop streaming: wait until no block is in use, drain, free the slots, close the backing.

        Afterwards the model computes from its host tensors (the last backing's parked ones), or, if ``terminal``, has
        no streamed tensors any more and refuses to be used. Idempotent; after an error, call it again. Raises
        HostWeightsError(unsupported) inside a streamed block, or what the budget raises.
        """
        with self._changing:
            if self._detached:
                return
            self._driver.close(terminal, budget)
            self._settle_device()
            self._resident.bring_back(self._device)
            with _claimed(self._module, self._blocks, leaving=True):
                self._hooks.close()
                self._rest.close()
                if terminal:
                    close_off(self._module, self._blocks)
            self._detached = True


def _refuse_below(value: object, least: int, text: str) -> None:
    """A count from an untyped caller is checked here: later it would fail a forward."""
    if not isinstance(value, int) or value < least:
        raise error(Stage.TRANSPORT, Code.INVALID_CONFIG, text)


def _tuner(sizes: RingSizes, slot_limit_bytes: int | None) -> Tuner | None:
    """What may add slots; None if there can be no more of them."""
    most = min(MOST_AUTOMATIC_SLOTS, len(sizes.paths))
    if slot_limit_bytes is not None:
        least_bytes = sizes.slots * sizes.slot_bytes
        text = f"{sizes.slots} slots take {least_bytes} bytes and {slot_limit_bytes!r} are allowed; allow more"
        _refuse_below(slot_limit_bytes, least_bytes, text)
        most = min(most, slot_limit_bytes // max(1, sizes.slot_bytes))
    return Tuner(most) if most > sizes.slots else None


def _why(asked: int | None, sizes: RingSizes, tuner: Tuner | None, alone: bool) -> str:
    if asked is not None:
        return "as asked" if sizes.slots == asked else "there are no more blocks"
    if tuner is not None:
        return "not measured yet"
    if sizes.slots == len(sizes.paths):
        return "there are no more blocks"
    return "memory allows no more" if alone else "ranks that gather keep the same number"


@contextmanager
def _claimed(module: nn.Module, blocks: Sequence[nn.Module], *, leaving: bool = False) -> Iterator[None]:
    """Keep other models that have some of these modules from being attached while this one is, or while it leaves.

    An attach puts its hooks on last and a detach takes them off first, so that hooks do not tell of either.
    """
    parts = (module, *blocks)
    ids = {id(part) for part in parts}
    with _CLAIMING:
        if not leaving and (ids & _CLAIMED or any(is_streamed(part) for part in parts)):
            text = f"{type(module).__name__} or one of its blocks is streamed already; detach it first"
            raise error(Stage.TRANSPORT, Code.ALREADY_ATTACHED, text)
        _CLAIMED.update(ids)
    try:
        yield
    finally:
        with _CLAIMING:
            _CLAIMED.difference_update(ids)


def _check_blocks(paths: Sequence[str], backing: HostBacking) -> None:
    if len(backing.blocks) != len(paths):
        raise error(
            Stage.TRANSPORT,
            Code.COVERAGE_INCOMPLETE,
            f"the backing holds {len(backing.blocks)} blocks and the model has {len(paths)} "
            f"({paths[0]!r} to {paths[-1]!r}); build it from the same discovery",
        )


def _bindings(module: nn.Module, blocks: BlockMap, backing: HostBacking) -> list[BlockBinding]:
    """One per block, of the block's parameters that the backing holds."""
    bindings: list[BlockBinding] = []
    for block, plan in zip(blocks.blocks, backing.blocks, strict=True):
        held = {tensor.name for tensor in plan.tensors}
        names = [name for name in block.parameters if name in held]
        if not names:
            raise error(
                Stage.TRANSPORT,
                Code.COVERAGE_INCOMPLETE,
                f"the backing's block {plan.name!r} holds no parameter of the model's block {block.path!r}; "
                "build it from the same discovery",
                block=block.path,
            )
        bindings.append(BlockBinding(block.path, names, [find_part(module, name) for name in names]))
    return bindings


def _freeze(modules: Sequence[nn.Module], undo: ExitStack) -> None:
    """Streamed blocks compute without autograd; what wants gradients afterwards was added later and is refused."""
    for parameter in {id(p): p for module in modules for p in module.parameters()}.values():
        if parameter.requires_grad and not parameter.is_inference():
            undo.callback(parameter.requires_grad_, True)
            parameter.requires_grad_(False)


def _check(budget: Budget | None) -> None:
    if budget is not None:
        budget.check()
