"""Rates: how fast a count that members tell grew over the last seconds."""

from dataclasses import dataclass, field


@dataclass
class Rate:
    """Of a count that is heard of now and then."""

    window_s: float = 5.0
    _points: list[tuple[float, int]] = field(default_factory=list)

    def add(self, now: float, value: object) -> None:
        """The count as it is now."""
        if not isinstance(value, int):
            return
        if self._points and value < self._points[-1][1]:
            self._points = []
        # one from before the window stays: the rate is of all of it
        while len(self._points) > 1 and self._points[1][0] <= now - self.window_s:
            self._points.pop(0)
        self._points.append((now, value))

    def per_s(self, now: float) -> float:
        """Zero of a count that is not heard of any more."""
        if len(self._points) < 2 or self._points[-1][0] < now - self.window_s:
            return 0.0
        (first, before), (last, after) = self._points[0], self._points[-1]
        return (after - before) / max(last - first, 1e-9)
