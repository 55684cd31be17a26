"""Rates of counters that members report."""

from dataclasses import dataclass, field


@dataclass
class Rate:
    """The rate of a counter over the last seconds."""

    window_s: float = 5.0
    _points: list[tuple[float, int]] = field(default_factory=list)

    def add(self, now: float, value: object) -> None:
        """Add a reported value; start over if it is smaller than the previous value."""
        if not isinstance(value, int):
            return
        if self._points and value < self._points[-1][1]:
            self._points = []
        # Keep one point before the window, so that the rate covers all of the window.
        while len(self._points) > 1 and self._points[1][0] <= now - self.window_s:
            self._points.pop(0)
        self._points.append((now, value))

    def per_s(self, now: float) -> float:
        """Return the rate, 0 for a counter that is no longer reported."""
        if len(self._points) < 2 or self._points[-1][0] < now - self.window_s:
            return 0.0
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / max(last - first, 1e-9)
