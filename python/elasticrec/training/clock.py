"""Time spent in each stage of the training loop."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Sums the seconds of each stage. Stages do not nest; shares refer to the total time of all parallel `lanes`."""

    def __init__(self, lanes: int = 1) -> None:
        self.seconds: dict[str, float] = {}
        self.lanes = lanes
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self._lap_start = 0.0
        self._lap_seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, lanes: int = 1) -> Iterator[None]:
        """Time the body of a `with` that blocks this number of lanes."""
        start = self.now()
        try:
            yield
        finally:
            self.add(name, (self.now() - start) * lanes)

    @staticmethod
    def now() -> float:
        """Return the current time of the clock."""
        return time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        """Add seconds measured elsewhere, such as in the reader's threads."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was created."""
        return time.perf_counter() - self._start

    def shares(self) -> dict[str, float]:
        """Return the share of the time since the start, by stage."""
        whole = max(self.elapsed * self.lanes, 1e-9)
        # Copy first, because other threads may add stages.
        return {name: seconds / whole for name, seconds in dict(self.seconds).items()}

    def lap(self) -> dict[str, float]:
        """Return the share of the time since the last lap, by stage, and start a new lap."""
        now = self.elapsed
        whole = max((now - self._lap_start) * self.lanes, 1e-9)
        shares = {name: (seconds - self._lap_seconds.get(name, 0.0)) / whole for name, seconds in self.seconds.items()}
        self._lap_start, self._lap_seconds = now, dict(self.seconds)
        return shares
