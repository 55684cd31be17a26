"""Where the time of a training goes, stage by stage."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Adds up the seconds spent in each stage of the loop. Stages do not nest: their shares are of one whole, which is
    the time of all `lanes` that go on side by side."""

    def __init__(self, lanes: int = 1) -> None:
        self.seconds: dict[str, float] = {}
        self.lanes = lanes
        self._lock = threading.Lock()
        self._start = time.perf_counter()
        self._lap_start = 0.0
        self._lap_seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, lanes: int = 1) -> Iterator[None]:
        """Time the body of a `with`, in which so many lanes stand still."""
        start = self.now()
        try:
            yield
        finally:
            self.add(name, (self.now() - start) * lanes)

    @staticmethod
    def now() -> float:
        """Seconds of the clock that stages are timed with."""
        return time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere, such as those of the reader's threads."""
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start

    def shares(self) -> dict[str, float]:
        """Share of the time since the start, by stage."""
        whole = max(self.elapsed * self.lanes, 1e-9)
        # a copy, which another thread may look at while a stage is added
        return {name: seconds / whole for name, seconds in dict(self.seconds).items()}

    def lap(self) -> dict[str, float]:
        """Share of the time since the last lap, by stage."""
        now = self.elapsed
        whole = max((now - self._lap_start) * self.lanes, 1e-9)
        shares = {name: (seconds - self._lap_seconds.get(name, 0.0)) / whole for name, seconds in self.seconds.items()}
        self._lap_start, self._lap_seconds = now, dict(self.seconds)
        return shares
