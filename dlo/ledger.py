"""What is registered with a driver in this process: answered from our own books, so that the driver is never asked
twice for one range and never asked for a range it does not have.
"""

import threading
from dataclasses import dataclass

from ..messages.failure import Code, Stage, error
from .contract import HostMemory


@dataclass(slots=True)
class _Entry:
    size_bytes: int
    uses: int
    memory: HostMemory


class Ledger:
    """Registered ranges by their start, with how often each is used. Safe to use from any thread.

    One driver call at a time: registering from several threads gains nothing.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[int, _Entry] = {}

    @property
    def registered_bytes(self) -> int:
        """Bytes that the driver holds now."""
        with self._lock:
            return sum(entry.size_bytes for entry in self._entries.values())

    def register(self, memory: HostMemory, address: int, size_bytes: int) -> None:
        """Register a range, or count one more use of it.

        Raises HostWeightsError(register_failed) if another range overlaps it, or what the driver says.
        """
        with self._lock:
            entry = self._entries.get(address)
            if entry is not None and entry.size_bytes == size_bytes:
                entry.uses += 1
                return
            for start, other in self._entries.items():
                if address < start + other.size_bytes and start < address + size_bytes:
                    raise error(
                        Stage.TRANSPORT,
                        Code.REGISTER_FAILED,
                        f"{size_bytes} bytes at {address:#x} overlap {other.size_bytes} bytes at {start:#x} that are "
                        "registered already; they are copied through staging",
                    )
            memory.register(address, size_bytes)
            self._entries[address] = _Entry(size_bytes, 1, memory)

    def unregister(self, address: int) -> None:
        """Give one use of a range back; the last one unregisters it. Raises what the driver says, changing nothing."""
        with self._lock:
            entry = self._entries[address]
            if entry.uses == 1:
                entry.memory.unregister(address)
                del self._entries[address]
            else:
                entry.uses -= 1


PROCESS_LEDGER = Ledger()
"""The ledger of this process."""
