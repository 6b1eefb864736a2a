"""Drives a slot ring: issues the copies it asks for, orders them against compute, shows slots to parameters.

Per block there are two event operations and one copy. Nothing here knows the device: the order between copies and
compute is made of events alone.
"""

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..messages.budget import Budget
from ..messages.failure import Code, HostWeightsError, Stage, error
from ..messages.plan import BlockPlan
from ..messages.transport import RegistrationPolicy, RingStats
from .binding import BlockBinding
from .contract import Device, Event, HostBacking
from .layout import views
from .packed.contract import UnpackingBacking, UnpackingTransfer
from .ring import Fill, Ring, Use
from .slots import FailedEvent, SlotState, copy_failed, end_of_compute, forked, inside_block, not_handed_back
from .stalls import StallMeter
from .timeline import Timeline
from .transfer import Transfer, Way, settle
from .tuner import WARM_FORWARDS, Tuner
from .values import apart_from

_LOG = logging.getLogger("hostweights")

DRAIN_POLL_S = 0.05


class RingDriver:
    """The ring of one attached model. Safe to call from any thread.

    ``enter`` and ``leave`` are the hot path; a thread waits for a copy without holding the lock, so ``stats``,
    ``announce`` and ``rebase`` never wait for one. They may wait for other ranks where those choose together how blocks
    travel: the order of the copies is theirs in common.
    """

    def __init__(
        self,
        device: Device,
        backing: HostBacking,
        bindings: Sequence[BlockBinding],
        *,
        slots: int,
        slot_bytes: int,
        registration: RegistrationPolicy,
        way: Way,
        depth: str,
        tuner: Tuner | None = None,
    ) -> None:
        self._device = device
        self._way = way
        self._slot_bytes = slot_bytes
        self._tuner = tuner
        self._depth = depth
        self._process = os.getpid()
        self._registration = registration
        self._bindings = tuple(bindings)
        self._ring = Ring(len(self._bindings), slots)
        self._lock = threading.RLock()  # a state dict may be taken at rest
        self._idle = threading.Condition(self._lock)
        self._closed = False
        self._stalls = StallMeter(device)
        self._copied_bytes = 0
        self._freed = False
        self._timeline: Timeline | None = None
        self._threads: dict[int, int] = {}  # of the uses under way, by the use's id
        self._views: dict[tuple[int, int], Sequence[torch.Tensor]] = {}
        self._plans, parked = self._arranged(backing)
        self._slots = [SlotState(device.allocate(slot_bytes)) for _ in range(slots)]
        self._copies = device.stream("copies")
        try:
            self._transfer = self._open_transfer(backing)
        except BaseException:
            self._copies.close()
            raise
        self._open = [(self._transfer, backing)]  # what still reads host memory, or may
        for binding, tensors in zip(self._bindings, parked, strict=True):
            binding.move_home(tensors)

    def enter(self, use: Use) -> None:
        """Show the block's slot to its parameters and order compute after its copy; ``leave`` must follow always.

        While other threads hold every slot, waits until one of them is through with its block. Does nothing once the
        driver is closed. Raises HostWeightsError: copy_failed (retryable) if the block's bytes could not be brought;
        slots_exhausted if the thread itself holds blocks and no slot is left; unsupported if the block's parameters
        were changed meanwhile, or in a forked process; not_attached (retryable) while a closed driver has not handed
        back the values of packed parameters.
        """
        self._refuse_fork()
        with self._lock:
            self._wait_for_slot(use.block)
            if self._closed:
                if self._slots and self._unpacking() is not None:
                    raise not_handed_back(self._bindings[use.block].path)
                return
            binding = self._bindings[use.block]
            binding.check_untouched()
            self._device.compute_ready()
            fill = self._ring.acquire(use)
            self._threads[id(use)] = threading.get_ident()
            state = self._slots[fill.slot]
            if fill.must_copy or state.block != fill.block:
                use.asked = self._device.compute_record()
                self._issue(fill)
            self._prefetch()
            filled = state.filled
            timeline = self._timeline
        if use.asked is None:
            use.asked = self._device.compute_record()
        self._wait(use, binding, filled)
        if timeline is not None:
            use.began = self._device.compute_record()
        with self._lock:
            if filled is not None:
                self._stalls.add(use.asked, filled)
            binding.bind(state.views)

    def leave(self, use: Use) -> None:
        """End a use: mark where compute stops reading the slot and, after the last use, show the host tensors.

        Harmless for a use that holds nothing, so it can be repeated when an interrupt tears it. A device that failed
        keeps no slot, and its error does not take the place of the block's own.
        """
        if use.slot is None:
            return
        event = end_of_compute(self._device)
        with self._lock:
            slot = use.slot
            if event is not None:
                self._slots[slot].read_until(event)
            self._threads.pop(id(use), None)
            if self._timeline is not None and event is not None and use.asked is not None and use.began is not None:
                self._timeline.add("stall", use.block, use.asked, use.began)
                self._timeline.add("compute", use.block, use.began, event)
            if self._ring.release(use):
                if self._ring.holder(use.block) in (slot, None):
                    self._bindings[use.block].park()
                self._idle.notify_all()

    def hand_out(self, use: Use, result: object) -> object:
        """The result of a use that is about to end: what lies in the slot, which other blocks overwrite, is copied."""
        return result if use.slot is None else apart_from(self._slots[use.slot].memory, result)

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        self._refuse_fork()
        with self._lock:
            self._ring.order.begin()
            try:
                if self._tuner is not None and self._ring.order.outermost and not self._closed:
                    self._tune(self._tuner)
            except BaseException:  # no end follows a begin that raised
                self._ring.order.end(False)
                raise

    def end_forward(self, completed: bool) -> None:
        """It ended. After one that failed nothing is fetched ahead: what was wrong then must not fail the next one."""
        with self._lock:
            if self._tuner is not None and self._tuner.measuring and self._ring.order.outermost:
                self._timeline = None
                self._tuner.end(completed)
            self._ring.order.end(completed)
            if completed:
                self._prefetch()

    def prefetch(self) -> None:
        """Start the copies of the blocks that are expected first."""
        with self._lock:
            self._prefetch()

    def announce(self, forwards: int) -> None:
        """Say how many forwards will begin from now on."""
        with self._lock:
            self._ring.order.announce(forwards)

    def stats(self) -> RingStats:
        """The counters, all of one moment."""
        with self._lock:
            ring = self._ring
            self._stalls.settle()
            return RingStats(
                forwards=ring.order.forwards,
                copies=ring.copies,
                hits=ring.hits,
                stalls=self._stalls.count,
                wrong_guesses=ring.wrong_guesses,
                copied_bytes=self._copied_bytes,
                stall_s=self._stalls.seconds,
                registration=self._transfer.registration(),
                slots=len(self._slots),
                depth=self._depth,
                packing=self._transfer.packing() if isinstance(self._transfer, UnpackingTransfer) else None,
                gathering=self._way.gathering(),
            )

    def start_recording(self) -> Timeline:
        """Time every copy and every use from now on."""
        with self._lock:
            if self._tuner is not None and self._tuner.measuring:
                self._tuner.drop()
                self._timeline = None
            if self._timeline is not None:
                text = "the model's timeline is being recorded already; end that recording first"
                raise error(Stage.TRANSPORT, Code.UNSUPPORTED, text)
            self._timeline = Timeline(self._device, [binding.path for binding in self._bindings])
            return self._timeline

    def stop_recording(self) -> None:
        """Time nothing any more."""
        with self._lock:
            self._timeline = None

    def host_values(self, block: int, state_dict: dict[str, object], prefix: str) -> None:
        """Replace tensors over a slot in a state dict by the host tensors of equal value, which stay valid."""
        with self._lock:
            binding, unpacking = self._bindings[block], self._unpacking()
            if unpacking is not None:
                binding.restore_values(state_dict, prefix, lambda: unpacking.restored(block))
            elif binding.bound:
                for name, value in state_dict.items():
                    if name.startswith(prefix) and isinstance(value, torch.Tensor):
                        state_dict[name] = binding.at_home(value)

    def rebase(self, backing: HostBacking) -> None:
        """Take later copies from ``backing``, which holds equal bytes, and close the old backing after its last copy.

        Blocks that are in a slot or on their way stay there. The caller has checked that the blocks fit.
        """
        self._refuse_closed()
        plans, parked = self._arranged(backing)
        transfer = self._open_transfer(backing)
        with self._lock:
            with _closing_on_error(transfer):
                self._refuse_closed()
                for binding in self._bindings:
                    binding.check_untouched()
            old = self._open[-1]
            if isinstance(old[0], UnpackingTransfer):
                self._settle_slots()  # the new transfer's streams do not know of what the old one unpacks
            self._transfer = transfer
            self._open.append((transfer, backing))
            self._plans = plans
            self._views.clear()
            for binding, tensors in zip(self._bindings, parked, strict=True):
                binding.move_home(tensors)
            last_copy = self._copies.record()
        settle(last_copy)
        try:
            self._let_go(*old)
        except HostWeightsError as kept:  # the re-bind stands; the old memory is asked for again by ``close``
            _LOG.warning("%s", kept.failure.text)

    @contextmanager
    def at_rest(self, budget: Budget) -> Iterator[None]:
        """Wait until no block is in use and keep it so inside; parameters show host tensors there."""
        with self._lock:
            while self._ring.in_use():
                budget.check()
                self._idle.wait(DRAIN_POLL_S)
            for binding in self._bindings:
                if binding.bound:
                    binding.park()
            yield

    def close(self, terminal: bool, budget: Budget | None) -> None:
        """Wait until no block is in use, drain, show host tensors (or drop them) and free the slots.

        Blocks entered meanwhile are not streamed. Idempotent; after an error from the budget it can be called again.
        """
        self._refuse_fork()
        with self._lock:
            if not self._freed:
                self._stop(budget)
        self._copies.close()
        self._settle_slots()
        for state in self._slots:
            for event in state.readers:
                settle(event)
        unpacking = self._unpacking()
        for block, binding in enumerate(self._bindings):
            if terminal:
                binding.drop()
            elif unpacking is not None:
                binding.park()
                shown = zip(binding.names, binding.parameters, strict=True)
                unpacking.hand_back(block, {name: each for name, each in shown if isinstance(each, nn.Parameter)})
            elif binding.bound:
                binding.park()  # an interrupt tore the leave after the slot was given back
        self._slots, self._views = [], {}
        while self._open:
            self._let_go(*self._open[-1])

    def abandon(self) -> None:
        """End what the driver started, without closing the backing: the attach that made it failed."""
        with self._lock:
            self._closed = self._freed = True
        self._copies.close()
        self._transfer.close()

    def _unpacking(self) -> UnpackingBacking | None:
        """The backing, if it is one whose parked tensors only stand in for values."""
        backings = [backing for _, backing in self._open[-1:] if isinstance(backing, UnpackingBacking)]
        return backings[0] if backings else None

    def _settle_slots(self) -> None:
        """Wait for what is on its way into the slots."""
        for state in self._slots:
            if state.filled is not None:
                settle(state.filled)

    def _stop(self, budget: Budget | None) -> None:
        if threading.get_ident() in self._threads.values():
            raise inside_block()
        self._closed = True
        while self._ring.in_use():
            if budget is not None:
                budget.check()
            self._idle.wait(DRAIN_POLL_S)
        self._freed = True

    def _tune(self, tuner: Tuner) -> None:
        """Between two forwards: add the slots that the measured forward asks for, or measure this one."""
        depth = tuner.answer()
        if depth is not None:
            self._tuner, self._depth = None, depth.reason
            self._grow(depth.slots)
            return
        registration = self._transfer.registration()
        steady = self._ring.order.forwards > WARM_FORWARDS and (registration is None or registration.state != "running")
        if steady and not tuner.waiting and self._timeline is None and not self._ring.order.last_announced:
            self._timeline = tuner.begin(self._device, [binding.path for binding in self._bindings])

    def _grow(self, slots: int) -> None:
        try:
            self._device.compute_ready()
            with torch.inference_mode(mode=False):
                while len(self._slots) < slots:
                    self._slots.append(SlotState(self._device.allocate(self._slot_bytes)))
                    self._ring.grow()
        except Exception as refused:  # noqa: BLE001 - the device's error type; two slots are enough to go on
            self._depth = f"{len(self._slots)} slots: {slots} would be faster, and the device refused: {refused}"

    def _refuse_fork(self) -> None:
        if os.getpid() != self._process:
            raise forked()

    def _let_go(self, transfer: Transfer, backing: HostBacking) -> None:
        """Close a backing after its transfer; one whose pages the driver keeps stays open, and here."""
        transfer.close()
        backing.close()
        self._open.remove((transfer, backing))

    def _refuse_closed(self) -> None:
        if self._closed:
            raise error(
                Stage.TRANSPORT, Code.NOT_ATTACHED, "the model is not attached any more; attach it again to stream it"
            )

    def _open_transfer(self, backing: HostBacking) -> Transfer:
        with torch.inference_mode(mode=False):
            return self._way.open(backing, self._device, self._copies, self._registration)

    def _arranged(self, backing: HostBacking) -> tuple[list[BlockPlan], list[Sequence[torch.Tensor]]]:
        """The backing's plans and host tensors in the order of the bindings' parameters."""
        pairs = [
            binding.arrange(plan, backing.parked(block))
            for block, (binding, plan) in enumerate(zip(self._bindings, backing.blocks, strict=True))
        ]
        return [plan for plan, _ in pairs], [parked for _, parked in pairs]

    def _prefetch(self) -> None:
        while not self._closed and (fill := self._ring.prefetch()) is not None:
            self._issue(fill)
        if not self._closed and self._transfer.ahead:
            try:
                self._transfer.expect(self._ring.expected(self._transfer.ahead))
            except Exception as refused:  # noqa: BLE001 - a guess must not fail the block that happens to run
                _LOG.debug("nothing is prepared ahead: %s", refused)
                self._transfer.forget()

    def _issue(self, fill: Fill) -> None:
        """Start the copy of a block; a failure is kept for whoever wants the block."""
        state = self._slots[fill.slot]
        state.block = None
        try:
            state.views = self._slot_views(fill)
            began: list[Event] = []
            marker = None if self._timeline is None else began.append
            state.filled = self._transfer.issue(fill.block, state.memory, state.readers, marker)
            if self._timeline is not None and began:
                self._timeline.add("copy", fill.block, began[0], state.filled)
        except Exception as exc:  # noqa: BLE001 - a prefetch must not fail the block that happens to run
            state.filled = FailedEvent(exc)
        else:
            state.readers = []
            self._copied_bytes += self._plans[fill.block].size_bytes
        state.block = fill.block

    def _slot_views(self, fill: Fill) -> Sequence[torch.Tensor]:
        key = (fill.block, fill.slot)
        made = self._views.get(key)
        if made is None:
            with torch.inference_mode(mode=False):
                tensors = views(self._slots[fill.slot].memory, self._plans[fill.block])
                made = self._bindings[fill.block].adapt(tensors)
            self._views[key] = made
        return made

    def _wait_for_slot(self, block: int) -> None:
        """A thread that holds blocks must not wait: two such threads could wait for each other."""
        while not self._closed and self._ring.full_for(block):
            if threading.get_ident() in self._threads.values():
                return
            self._idle.wait(DRAIN_POLL_S)  # an interrupt can tear a leave before it notifies

    def _wait(self, use: Use, binding: BlockBinding, filled: Event | None) -> None:
        if filled is None:
            return
        try:
            self._device.compute_wait(filled)
        except Exception as exc:
            with self._lock:
                if use.slot is not None and self._slots[use.slot].filled is filled:
                    self._ring.forget(use.slot)
                    self._ring.forget_idle()  # fetched under the same circumstances
                    self._transfer.forget()
            if isinstance(exc, HostWeightsError) and exc.code in (Code.GROUP_BROKEN, Code.GROUP_MISMATCH):
                raise HostWeightsError(exc.failure) from exc  # the next forward would fare no better
            raise copy_failed(binding.path, exc) from exc


@contextmanager
def _closing_on_error(transfer: Transfer) -> Iterator[None]:
    try:
        yield
    except BaseException:
        transfer.close()
        raise
