"""How often and how long compute waited for blocks, by the device's clock; nothing waits for the measurement."""

from collections import deque
from typing import Final

from .contract import Device, Event

_UNSEEN: Final = 64
"""Waits that a use leaves unsettled behind it, where the device has come that far."""


class StallMeter:
    """Of one ring; the driver's lock guards it. ``count`` and ``seconds`` are of the waits that were settled.

    A use costs one event. What ended long ago is settled beside later uses, and the rest when somebody looks.
    """

    def __init__(self, device: Device) -> None:
        self.count = 0
        self.seconds = 0.0
        self._device = device
        self._open: deque[tuple[Event, Event]] = deque()

    def add(self, asked: Event, filled: Event) -> None:
        """Compute wants from ``asked`` on what is there from ``filled`` on; neither may have passed yet."""
        self._open.append((asked, filled))
        while len(self._open) > _UNSEEN and self._settle_oldest():
            pass

    def settle(self) -> None:
        """Count the waits that have ended."""
        while self._settle_oldest():
            pass

    def _settle_oldest(self) -> bool:
        if not self._open or not all(event.done() for event in self._open[0]):
            return False
        try:
            waited_s = self._device.elapsed_s(*self._open.popleft())
        except Exception:  # noqa: BLE001 - the device's error type; a wait that a failed device did not time is not counted
            return True
        if waited_s > 0.0:  # else the block was there first
            self.count += 1
            self.seconds += waited_s
        return True
