"""Registers the blocks of a mapping with the device driver, in the background, in the order of use.

Streaming begins at once: the block that a copy waits for is registered first, is awaited for a moment, and is copied as
it is if that takes long; one that never will be registered goes through staging.
"""

import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final

from ..messages.failure import Code, Stage, error
from ..messages.transport import RegistrationInfo, RegistrationPolicy
from .chunks import CHUNK_BYTES, Chunk, HostRange, plan_chunks
from .contract import Event, HostMemory
from .headroom import LockLimit, lies_in_memory, lock_limit, pinnable_bytes
from .ledger import PROCESS_LEDGER, Ledger
from .turns import file_turn

_LOG = logging.getLogger("hostweights")

PATIENCE_S = 0.25
"""How long a copy waits for its block while calls come back promptly; a slower driver is not waited for."""
QUIET_S = 0.02
"""With no copy under way for this long, blocks that none waits for are registered one after the other."""
POLL_S = 0.002

_KEPT: Final[set["Registration"]] = set()
"""Every registration that has pages: what it keeps mapped stays mapped, also when nobody else remembers it."""


class BlockState(Enum):
    """Of one block."""

    PENDING = "pending"
    REGISTERED = "registered"
    REFUSED = "refused"


class Registration:
    """The registration of one backing's blocks. Safe to use from any thread.

    ``keep`` is what keeps the ranges mapped; it is let go only after the driver let every page go. ``close`` ends it,
    after the last copy out of the ranges.
    """

    def __init__(
        self,
        memory: HostMemory,
        ranges: Sequence[HostRange],
        keep: object,
        policy: RegistrationPolicy,
        *,
        ledger: Ledger = PROCESS_LEDGER,
        page_bytes: int = mmap.PAGESIZE,
        chunk_bytes: int = CHUNK_BYTES,
        headroom: Callable[[], int | None] = pinnable_bytes,
        locks: Callable[[], LockLimit] = lock_limit,
    ) -> None:
        self._memory = memory
        self._chunks = plan_chunks(ranges, page_bytes, chunk_bytes)
        self._keep: object = keep
        self._policy = policy
        self._ledger = ledger
        self._headroom = headroom
        self._locks = locks
        self._room_bytes: int | None = None
        self._limit = LockLimit(None, 0)
        self._charges = False  # the driver charges pinned pages to the lock limit
        self._changed = threading.Condition()
        self._states = [BlockState.PENDING if each.size_bytes else BlockState.REFUSED for each in ranges]
        self._registered: list[Chunk] = []
        self._wanted: set[int] = set()  # blocks that a copy waits for
        self._used_s = time.monotonic()
        self._newest: Event | None = None
        self._slow = False
        self._stopping = False
        self._closed = False
        self._unsafe = False
        self._reason = ""
        self._began_s = time.monotonic()
        self._ended_s: float | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, on a thread of its own; what is known to be impossible is refused at once."""
        self._began_s = time.monotonic()
        refusal = self._why_not()
        if refusal is not None:
            self._finish(refusal)
            return
        self._thread = threading.Thread(target=self._run, name="hostweights-registration")
        self._thread.start()

    def use(self, block: int) -> BlockState:
        """A copy of the block is issued: whether its bytes are registered, will be, or will not be."""
        self._used_s = time.monotonic()
        return self._states[block]

    def issued(self, event: Event) -> None:
        """The newest copy out of the ranges, registered or not, ends at ``event``."""
        self._newest = event

    def refused(self, block: int) -> bool:
        """Whether a block will never be registered."""
        return self._states[block] is BlockState.REFUSED

    def settled(self, block: int) -> "Settled":
        """An event that passes when the block is not pending any more, or is not worth waiting for; never fails."""
        return Settled(self, block)

    def await_block(self, block: int) -> None:
        """Block the caller until then."""
        patient_until_s = time.monotonic() + PATIENCE_S
        with self._changed:
            self._wanted.add(block)
            self._changed.notify_all()
            while self._states[block] is BlockState.PENDING and not self._slow:
                left_s = patient_until_s - time.monotonic()
                if left_s <= 0.0:
                    self._slow = True
                    break
                self._changed.wait(left_s)
            self._used_s = time.monotonic()
            self._wanted.discard(block)

    def worth_waiting(self, block: int) -> bool:
        """Whether ``await_block`` would wait."""
        return self._states[block] is BlockState.PENDING and not self._slow

    def info(self) -> RegistrationInfo:
        """How far it is."""
        with self._changed:
            ended_s = time.monotonic() if self._ended_s is None else self._ended_s
            return RegistrationInfo(
                state=self._name(),
                blocks=self._states.count(BlockState.REGISTERED),
                wanted_bytes=sum(chunk.size_bytes for chunk in self._chunks),
                registered_bytes=sum(chunk.size_bytes for chunk in self._registered),
                seconds=ended_s - self._began_s,
                reason=self._reason,
                room_bytes=self._room_bytes,
                memlock_bytes=self._limit.left_bytes,
            )

    def close(self) -> None:
        """Stop, and unregister everything; no copy out of the ranges is under way any more.

        A driver call that has begun is waited for. Idempotent. Raises HostWeightsError(unregister_failed, retryable)
        when the driver keeps pages: what keeps them mapped is kept then, also after this object is forgotten. Those of
        a device that failed are kept as well, but nothing reads them any more, and that ends it.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
        self._finish("closed")
        failures = [failure for chunk in reversed(list(self._registered)) if (failure := self._unregister(chunk))]
        self._closed = True
        self._unsafe = bool(failures)
        if failures and self._memory.failed():
            # Other devices take the addresses for pinned: no other mapping may come to lie there.
            _LOG.warning(
                "%d ranges stay pinned until the process ends, since the device failed: %s", len(failures), failures[0]
            )
        elif failures:
            raise error(
                Stage.TRANSPORT,
                Code.UNREGISTER_FAILED,
                f"the driver did not let {len(failures)} of {len(self._chunks)} registered ranges go ({failures[0]}); "
                "their mapping and lease are kept, since the device may still read them: detach again, or end the "
                "process",
                retryable=True,
                ranges=len(failures),
            )
        else:
            self._keep = None
            _KEPT.discard(self)

    def _run(self) -> None:
        self._room_bytes, self._limit = self._group_limit(), self._locks()
        until_s = self._began_s + self._policy.deadline_s
        remaining = list(self._chunks)
        done_bytes = 0
        while remaining:
            chunk = self._choose(remaining)
            remaining.remove(chunk)
            done_bytes += chunk.size_bytes
            refusal = self._why_stop(done_bytes, until_s)
            if refusal is None:
                _LOG.debug("registering %d bytes, %d ranges after that", chunk.size_bytes, len(remaining))
                refusal = self._register(chunk, until_s)
            if refusal is not None:
                self._finish(refusal)
                return
        self._finish("")

    def _choose(self, remaining: Sequence[Chunk]) -> Chunk:
        """The chunk that a copy waits for; or the next in order, once no copy was under way for a moment.

        A driver that registers lets no copy run meanwhile and no other call of the process in: calls in a row starve
        a forward.
        """
        with self._changed:
            while not self._stopping:
                wanted = next((chunk for chunk in remaining if self._wanted.intersection(chunk.blocks)), None)
                if self._copying():
                    self._used_s = time.monotonic()
                quiet_s = time.monotonic() - self._used_s
                if wanted is not None or quiet_s >= QUIET_S:
                    return wanted or remaining[0]
                self._changed.wait(QUIET_S - quiet_s)
            return remaining[0]

    def _copying(self) -> bool:
        try:
            return self._newest is not None and not self._newest.done()
        except Exception:  # noqa: BLE001 - the device failed, which whoever computes will be told
            return False

    def _why_not(self) -> str | None:
        if not self._policy.enabled:
            return "switched off"
        if self._policy.budget_bytes == 0:
            return "the budget is 0 bytes"
        return self._memory.why_not()

    def _why_stop(self, done_bytes: int, until_s: float) -> str | None:
        if self._stopping:
            return "closed"
        if time.monotonic() >= until_s:
            return f"not done within {self._policy.deadline_s} s"
        for which, limit in (
            ("the budget", self._policy.budget_bytes),
            ("what the memory control group can pin beside other attachments", self._group_room()),
            ("what RLIMIT_MEMLOCK leaves, which this driver charges (see ulimit -l),", self._lock_room()),
        ):
            if limit is not None and done_bytes > limit:
                return f"{which} is {limit} bytes"
        return None

    def _group_limit(self) -> int | None:
        """None where pinning takes nothing from the group: its figures count the pages of files in memory anyway."""
        if all(lies_in_memory(file) for file in {chunk.file for chunk in self._chunks}):
            return None
        return self._headroom()

    def _group_room(self) -> int | None:
        """Pinned page cache still counts as room in the group's figures: what others registered of it is taken off."""
        if self._room_bytes is None:
            return None
        own_bytes = sum(chunk.size_bytes for chunk in self._registered)
        return max(0, self._room_bytes - (self._ledger.registered_bytes - own_bytes))

    def _lock_room(self) -> int | None:
        return self._limit.left_bytes if self._charges else None

    def _register(self, chunk: Chunk, until_s: float) -> str | None:
        """Register one chunk in its file's turn; returns why that was not possible."""
        with file_turn(chunk.file, lambda: self._pause(until_s)) as turn:
            if not turn:
                return "closed" if self._stopping else f"other processes kept registering {chunk.file}"
            began_s = time.monotonic()
            try:
                self._ledger.register(self._memory, chunk.address, chunk.size_bytes)
            except Exception as refused:  # noqa: BLE001 - the driver's error type is the device's
                return f"the driver refused {chunk.size_bytes} bytes of pinned host memory: {refused}{self._hint()}"
            prompt = time.monotonic() - began_s < PATIENCE_S
        if not self._registered and self._limit.left_bytes is not None:
            charged_bytes = self._locks().charged_bytes - self._limit.charged_bytes
            self._charges = charged_bytes >= chunk.size_bytes // 2
        with self._changed:
            _KEPT.add(self)
            self._registered.append(chunk)
            self._slow = not prompt
            for block in chunk.blocks:
                self._states[block] = BlockState.REGISTERED
            self._changed.notify_all()
        return None

    def _hint(self) -> str:
        left_bytes = self._limit.left_bytes
        if left_bytes is None or left_bytes >= sum(chunk.size_bytes for chunk in self._chunks):
            return ""
        return f"; RLIMIT_MEMLOCK leaves {left_bytes} bytes: raise it (ulimit -l, --ulimit memlock=-1) if that is why"

    def _pause(self, until_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, POLL_S)
            return not self._stopping and time.monotonic() < until_s

    def _finish(self, reason: str) -> None:
        """No further block will be registered; ``reason`` is empty when all are."""
        with self._changed:
            if self._ended_s is None:
                self._reason = reason
                self._ended_s = time.monotonic()
                if reason:
                    _LOG.info("blocks that are not registered go through staging: %s", reason)
            pending = BlockState.PENDING
            self._states = [BlockState.REFUSED if state is pending else state for state in self._states]
            self._changed.notify_all()

    def _unregister(self, chunk: Chunk) -> str | None:
        try:
            self._ledger.unregister(chunk.address)
        except Exception as kept:  # noqa: BLE001 - the driver's error type is the device's
            return f"{chunk.size_bytes} bytes at {chunk.address:#x} of {chunk.file}: {kept}"
        with self._changed:
            self._registered.remove(chunk)
        return None

    def _name(self) -> str:
        if self._unsafe:
            return "unsafe"
        if self._closed:
            return "closed"
        if self._ended_s is None:
            return "running"
        if self._reason:
            return "partial" if self._registered else "none"
        return "complete"


class Settled:
    """Implements ``contract.Event`` over a block's registration."""

    def __init__(self, registration: Registration, block: int) -> None:
        self._registration = registration
        self._block = block

    def done(self) -> bool:
        """Whether nobody would wait."""
        return not self._registration.worth_waiting(self._block)

    def synchronize(self) -> None:
        """Wait for it."""
        self._registration.await_block(self._block)
