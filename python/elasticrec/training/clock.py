"""Where the time of a training goes, stage by stage."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StageClock:
    """Adds up the seconds spent in each stage of the loop."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body of a `with`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    @property
    def elapsed(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._start

    def shares(self) -> dict[str, float]:
        """Share of the time since the start, by stage."""
        elapsed = self.elapsed
        return {name: seconds / elapsed for name, seconds in self.seconds.items()}
