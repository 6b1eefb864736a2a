"""What goes wrong in a simulation: one table. A new fault is a new line in it, and a branch where it is asked for."""

import errno
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from sim_fibers import Died, Process, Sim

_MAKING = frozenset({"create", "pwrite", "posix_fallocate", "mkdir", "rename", "link"})
# Calls that report no error (close, access, boot_id, start_writeback) stand in no set.
_ALL = frozenset(
    {"open", "create", "pread", "pwrite", "posix_fallocate", "fsync", "mkdir", "rename", "unlink", "rmdir"}
    | {"listdir", "stat", "fstat", "fstatvfs", "chmod", "fchmod", "touch", "flock", "link", "mmap"}
)


@dataclass(frozen=True)
class Fault:
    """A kind of fault: the calls that it can hit, and how often compared with others."""

    name: str
    calls: frozenset[str]
    weight: float
    number: int | None = None


DISK = (
    Fault("ENOSPC", _MAKING, 3, errno.ENOSPC),
    Fault("EIO", _ALL - {"flock", "fstatvfs"}, 3, errno.EIO),
    Fault("EMFILE", frozenset({"open", "create", "mmap"}), 3, errno.EMFILE),
    Fault("EINTR", frozenset({"flock"}), 6, errno.EINTR),
    Fault("slow disk", _ALL, 2),
    Fault("worker killed", _ALL, 1),
    Fault("power lost", _ALL, 0.7),
)
DEVICE = (
    Fault("registration refused", frozenset({"register"}), 10),
    Fault("unregister failed", frozenset({"unregister"}), 10),
    Fault("copy failed", frozenset({"copy"}), 1),
    Fault("slow copy", frozenset({"copy"}), 3),
    Fault("out of device memory", frozenset({"allocate"}), 4),
)
_DEVICE_CALLS = 8
"""A call of the disk comes so much more often than one of the device."""
KINDS = tuple(fault.name for fault in (*DISK, *DEVICE))


@dataclass
class SeededFaults:
    """Draws faults by the seed; ``calm`` stops them. Implements ``sim_files.Faults``."""

    sim: Sim
    rate: float
    kill: Callable[[Process], None]
    lose_power: Callable[[], None]
    calm: bool = False
    injected: Counter[str] = field(default_factory=Counter)
    cuts: Counter[str] = field(default_factory=Counter)
    """Calls at which a process or the host ended."""

    def at_call(self, call: str, process: Process) -> None:
        """Perhaps break one call of the file port."""
        match self._draw(DISK, call, self.rate):
            case None:
                return
            case Fault(name="slow disk"):
                self.sim.sleep(self.sim.random.uniform(0.1, 3.0))
            case Fault(name="worker killed"):
                self.cuts[call] += 1
                self.kill(process)
                raise Died
            case Fault(name="power lost"):
                self.cuts[call] += 1
                self.lose_power()
                raise Died
            case Fault(number=int(number)):
                raise OSError(number, os.strerror(number))

    def hits(self, name: str, call: str) -> bool:
        """Whether this kind of device fault hits this call."""
        fault = self._draw(DEVICE, call, min(0.3, self.rate * _DEVICE_CALLS))
        return fault is not None and fault.name == name

    def _draw(self, table: tuple[Fault, ...], call: str, rate: float) -> Fault | None:
        """A fault of the table that can hit the call, or None, which is usual."""
        if self.calm or rate == 0.0 or self.sim.random.random() >= rate:
            return None
        possible = [fault for fault in table if call in fault.calls]
        if not possible:
            return None
        weights = [fault.weight for fault in table if fault in possible]
        (fault,) = self.sim.random.choices(possible, weights)
        self.injected[fault.name] += 1
        return fault
