"""How often and how long compute waited for blocks, by the device's clock; nothing waits for the measurement."""

from collections import deque
from typing import Final

from .contract import Device, Event

_UNSEEN: Final = 64


class StallMeter:
    """Of one ring; the driver's lock guards it. ``count`` and ``seconds`` are of the waits that were settled.

    A use adds one event and asks the device nothing: while pages are registered, each further call of the driver's
    would hold the forward up. Only waits long past are settled beside others.
    """

    def __init__(self, device: Device) -> None:
        self.count = 0
        self.seconds = 0.0
        self._device = device
        self._open: deque[tuple[Event, Event]] = deque()

    def add(self, asked: Event, filled: Event) -> None:
        """Compute wants from ``asked`` on what is there from ``filled`` on; neither may have passed yet."""
        self._open.append((asked, filled))
        if len(self._open) > _UNSEEN and self._settle_oldest():
            self._settle_oldest()

    def settle(self) -> None:
        """Count the waits that have ended."""
        while self._settle_oldest():
            pass

    def _settle_oldest(self) -> bool:
        if not self._open or not all(event.done() for event in self._open[0]):
            return False
        waited_s = self._device.elapsed_s(*self._open.popleft())
        if waited_s > 0.0:  # else the block was there first
            self.count += 1
            self.seconds += waited_s
        return True
