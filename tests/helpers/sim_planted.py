"""Ten bugs that the simulation must find: each takes one mechanism out of the product, by one small wrong function."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest.mock import patch

from hostweights.actors.kernel import delivery, handling, states
from hostweights.actors.kernel.blocking import CallBudget, Job, WorkerPool
from hostweights.actors.store import StoreActor
from hostweights.dlo.driver import RingDriver
from hostweights.dlo.ring import Fill, Ring
from hostweights.dlo.transfer import RegisteredTransfer
from hostweights.hwr import locks, publication, store, verified, writer
from hostweights.hwr.filesystem import files
from hostweights.hwr.publication import publish
from hostweights.messages.base import Message
from hostweights.messages.budget import Budget

T = TypeVar("T")


@dataclass(frozen=True)
class Planted:
    """A bug: the mechanism that it takes away, and what is put in which place."""

    name: str
    removes: str
    patches: tuple[tuple[object, str, object], ...]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The product has the bug during the block."""
        with ExitStack() as stack:
            for target, attribute, value in self.patches:
                stack.enter_context(patch.object(target, attribute, value))
            yield


# --- missing fsync: the payload is on the disk before it can be seen --------------------------------------------------


class _Unsynced:
    """The file port whose fsync of a payload does nothing."""

    def __getattr__(self, name: str) -> object:
        return getattr(files(), name)

    def fsync(self, fd: int) -> None:
        """Forgotten."""


# --- early READY: the marker comes after the last byte ----------------------------------------------------------------

_publish = publish


def _publish_early(artifacts: Any, staging: Any, staged: Any, manifest: Any, **more: Any) -> object:
    fd = files().open(manifest.files[0].name, os.O_RDWR | os.O_CLOEXEC, dir_fd=staged.fd)
    try:
        last = files().pread(fd, 16, manifest.files[0].size_bytes - 16)
        files().pwrite(fd, memoryview(bytes(byte ^ 1 for byte in last)), manifest.files[0].size_bytes - len(last))
        lease = _publish(artifacts, staging, staged, manifest, **more)
        files().pwrite(fd, memoryview(last), manifest.files[0].size_bytes - len(last))
        files().fsync(fd)
        return lease
    finally:
        files().close(fd)


# --- lock unlinked: a lock file stays, so that all lock the same one --------------------------------------------------

_build_lock = store.LocalStore._build_lock


def _build_lock_unlinked(self: store.LocalStore, workshop: Any, key: str, budget: Budget) -> locks.LockHandle:
    lock = _build_lock(self, workshop, key, budget)
    files().unlink(f"{key}.build.lock", dir_fd=workshop.locks.fd)
    return lock


# --- wrong slot index: a block is shown the slot that its copy went to ------------------------------------------------

_acquire = Ring.acquire


def _acquire_wrong(self: Ring, use: Any) -> Fill:
    fill = _acquire(self, use)
    return fill if fill.must_copy else Fill(fill.block, (fill.slot + 1) % len(self._slots), False, None)


# --- missing event wait: compute comes after the copy -----------------------------------------------------------------


def _wait_not(self: RingDriver, use: object, binding: object, filled: object) -> float:
    del self, use, binding, filled
    return 0.0


# --- unmap before unregister: a mapping outlives its registration -----------------------------------------------------


def _let_go_early(self: RingDriver, transfer: Any, backing: Any) -> None:
    backing.close()  # the hold on the lease, and with it the mapping
    if isinstance(transfer, RegisteredTransfer):
        transfer._direct.close()
        transfer._registration._keep = None
    transfer.close()
    self._open.remove((transfer, backing))


# --- cancel in commit: blocking work is awaited to its end ------------------------------------------------------------


async def _run_abandoned(
    pool: WorkerPool, budget: CallBudget, call: Callable[[Budget], T], undo: Callable[[T], None] | None
) -> T:
    del undo
    job = Job(lambda: call(budget))
    pool.submit(job)
    await job.done.wait()  # a cancel goes on its way while the call still runs
    return job.result()


# --- stale verified record: what was verified is what is there now ----------------------------------------------------


def _remembers_anything(key_directory: Any, generation: str, record: object) -> bool:
    del record
    try:
        files().stat(f"{generation}.verified.json", dir_fd=key_directory.fd)
    except FileNotFoundError:
        return False
    return True


# --- lost reply: each ask ends ----------------------------------------------------------------------------------------

_succeed = delivery.Delivery.succeed


def _succeed_not_always(self: delivery.Delivery, reply: Message) -> None:
    if self.id % 16 == 0:
        self.state = states.DONE
        return
    _succeed(self, reply)


# --- leaked lease: what a cancelled request took is given back --------------------------------------------------------


def _undo_nothing(self: StoreActor, outcome: object) -> None:
    del self, outcome


PLANTED = (
    Planted(
        "missing fsync", "payload files are synced before they are published", ((writer, "files", lambda: _Unsynced()),)
    ),
    Planted(
        "early READY", "the marker becomes visible after the last byte", ((publication, "publish", _publish_early),)
    ),
    Planted(
        "lock unlinked",
        "lock files are never unlinked",
        ((store.LocalStore, "_build_lock", _build_lock_unlinked),),
    ),
    Planted("wrong slot index", "a block is shown the slot of its copy", ((Ring, "acquire", _acquire_wrong),)),
    Planted("missing event wait", "compute waits for the copy's event", ((RingDriver, "_wait", _wait_not),)),
    Planted(
        "unmap before unregister",
        "a mapping stays until the driver let its pages go",
        ((RingDriver, "_let_go", _let_go_early),),
    ),
    Planted(
        "cancel in commit",
        "blocking work is awaited to its end, cancelled or not",
        ((handling, "run_blocking", _run_abandoned),),
    ),
    Planted(
        "stale verified record",
        "a verified record counts for this boot and these files",
        ((verified, "is_remembered", _remembers_anything),),
    ),
    Planted("lost reply", "every ask ends", ((delivery.Delivery, "succeed", _succeed_not_always),)),
    Planted("leaked lease", "a cancelled request gives its lease back", ((StoreActor, "_undo", _undo_nothing),)),
)


def planted(name: str) -> Planted:
    """The bug of that name."""
    return next(each for each in PLANTED if each.name == name)
