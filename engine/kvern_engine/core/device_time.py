"""How busy a device was while there was work for it: pure sums over the results of steps.

A step's `idle` is the time between the end of the step before it on the device and its own begin there. It counts
unless the engine had nothing to do in between.
"""

WINDOW_SECONDS = 1.0


class DeviceTime:
    """Totals in seconds, and the share of idle time in the latest stretch of WINDOW_SECONDS of work."""

    def __init__(self) -> None:
        self.busy = 0.0
        self.idle = 0.0
        self.idle_fraction = 0.0
        self._since = (0.0, 0.0)
        self._first = -1

    def rest(self, next_step: int) -> None:
        """The engine has nothing to do; whatever passes before `next_step` is nobody's loss."""
        self._first = next_step

    def add(self, step: int, seconds: float, idle: float) -> None:
        """The result of `step`."""
        self.busy += seconds
        if step != self._first:
            self.idle += idle
        busy, idle = self.busy - self._since[0], self.idle - self._since[1]
        if busy + idle >= WINDOW_SECONDS:
            self.idle_fraction = idle / (busy + idle)
            self._since = (self.busy, self.idle)
