"""What a shard writes beside its work, parts of checkpoints and of versions, and what it tells of the last one."""

import threading
import time
from collections.abc import Callable
from typing import Any

from elasticrec.errors import ElasticRecError

Answer = dict[str, Any]


class Writing:
    """Files of one kind. Each is written on a thread of its own; signs of life tell of the newest."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self.told: Answer | None = None
        """For the next sign of life."""
        self.counts = {"written": 0, "failed": 0}
        self.seconds = 0.0
        """Of those that were written."""

    def forget(self) -> None:
        """Tell of none."""
        with self._lock:
            self.told = None

    def start(self, whose: Answer, write: Callable[[], Answer]) -> None:
        """Have `write` write, unless this is known; `whose` names what it is of, and the incarnation."""
        with self._lock:
            if self._is_told_of(whose):
                return
            self.told = {**whose, "state": "writing"}
        threading.Thread(target=self._write, args=(whose, write), name=self._name, daemon=True).start()

    def _is_told_of(self, whose: Answer) -> bool:
        return self.told is not None and whose.items() <= self.told.items()

    def _write(self, whose: Answer, write: Callable[[], Answer]) -> None:
        started = time.monotonic()
        try:
            written = write()
        except (ElasticRecError, OSError) as error:
            self.counts["failed"] += 1
            self._tell(whose, "failed", error=str(error))
            return
        self.counts["written"] += 1
        self.seconds += time.monotonic() - started
        self._tell(whose, "written", **written)

    def _tell(self, whose: Answer, state: str, **more: Any) -> None:
        """Unless something else is written by now."""
        with self._lock:
            if self._is_told_of(whose):
                self.told = {**whose, "state": state, **more}

    def figures(self) -> Answer:
        """For the metrics."""
        counts = {f"{self._name}_{result}": number for result, number in self.counts.items()}
        return {**counts, f"{self._name}_s": self.seconds}


def file_entry(size: int, digest: str) -> Answer:
    """A file as a shard tells of it."""
    return {"bytes": size, "sha256": digest}
