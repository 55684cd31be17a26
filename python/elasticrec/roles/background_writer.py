"""Background writes of a shard: its parts of checkpoints and of versions, and the report for the next heartbeat."""

import threading
import time
from collections.abc import Callable
from typing import Any

from elasticrec.errors import ElasticRecError

Report = dict[str, Any]
"""State of a write, as a heartbeat carries it: the body of `Snapshot` or `PublishPart`."""


class BackgroundWriter:
    """Writes files of one kind, each on a separate thread; heartbeats report the newest."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self.report: Report | None = None
        """The report for the next heartbeat."""
        self.counts = {"written": 0, "failed": 0}
        self.seconds = 0.0
        """Time of all successful writes."""

    def forget(self) -> None:
        """Drop the report."""
        with self._lock:
            self.report = None

    def start(self, key: Report, write: Callable[[], Report]) -> None:
        """Run `write` on a thread, unless it was already started for `key`, which names the checkpoint or publish."""
        with self._lock:
            if self._is_reported(key):
                return
            self.report = {**key, "state": "writing"}
        threading.Thread(target=self._write, args=(key, write), name=self._name, daemon=True).start()

    def _is_reported(self, key: Report) -> bool:
        return self.report is not None and key.items() <= self.report.items()

    def _write(self, key: Report, write: Callable[[], Report]) -> None:
        started = time.monotonic()
        try:
            written = write()
        except (ElasticRecError, OSError) as error:
            self.counts["failed"] += 1
            self._set_report(key, "failed", error=str(error))
            return
        self.counts["written"] += 1
        self.seconds += time.monotonic() - started
        self._set_report(key, "written", **written)

    def _set_report(self, key: Report, state: str, **more: Any) -> None:
        with self._lock:
            # If a newer write has started meanwhile, keep its report.
            if self._is_reported(key):
                self.report = {**key, "state": state, **more}

    def figures(self) -> Report:
        """Return the figures for the metrics."""
        counts = {f"{self._name}_{result}": number for result, number in self.counts.items()}
        return {**counts, f"{self._name}_s": self.seconds}


def file_entry(size: int, digest: str) -> Report:
    """Return the entry of a file in a report."""
    return {"bytes": size, "sha256": digest}
