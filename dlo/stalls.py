"""How often and how long compute waited for blocks, by the device's clock; nothing waits for the measurement."""

from collections import deque

from .contract import Device, Event


class StallMeter:
    """Of one ring; the driver's lock guards it. ``count`` and ``seconds`` are of the waits that have ended."""

    def __init__(self, device: Device) -> None:
        self.count = 0
        self.seconds = 0.0
        self._device = device
        self._open: deque[tuple[Event, Event]] = deque()

    def add(self, asked: Event, filled: Event) -> None:
        """Compute wants from ``asked`` on what is there from ``filled`` on; neither may have passed yet."""
        self._open.append((asked, filled))
        self.settle()

    def settle(self) -> None:
        """Count the waits that have ended."""
        while self._open and all(event.done() for event in self._open[0]):
            waited_s = self._device.elapsed_s(*self._open.popleft())
            if waited_s > 0.0:  # else the block was there first
                self.count += 1
                self.seconds += waited_s
