"""Reports of a training: terminal lines, records of the metrics file, and the summary."""

import contextlib
import io
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from elasticrec.run import Run
from elasticrec.training.bottleneck import Shares
from elasticrec.training.checkpoint import Progress
from elasticrec.training.metrics import Metrics


@dataclass(frozen=True)
class Summary:
    """The result of a training."""

    run: Run
    progress: Progress
    train: dict[str, Metrics]
    """Metrics of the last epoch by label."""
    evaluation: dict[str, Metrics] | None
    rows: int
    samples_per_s: float
    """Speed of this process, without samples from before a resume."""
    shares: dict[str, float]
    """Share of the time by stage."""
    read: float | None = None
    """Utilization of the reading thread; None if not measured."""
    parse: float | None = None
    """Utilization of the parsing threads; None if not measured."""
    bottleneck: str | None = None
    """The bottleneck and advice, human-readable."""


class Reporter:
    """Prints progress and appends to the metrics file. On a terminal the progress line is overwritten.

    Any thread may print a line.
    """

    def __init__(
        self,
        path: Path | None,
        every_s: float,
        stream: TextIO | None = None,
        listener: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Open the metrics file; `listener` is called with every record."""
        self._path = path
        self._file = _append_to(path) if path else None
        self._every_s = every_s
        self._stream = stream or sys.stderr
        self._listener = listener
        self._overwrites = self._stream.isatty()
        self._has_open_line = False
        # A line of another thread must not land in a progress line; a signal handler may print during a line.
        self._lock = threading.RLock()
        self._last = time.monotonic()

    def start(self) -> None:
        """Start the interval of progress lines."""
        self._last = time.monotonic()

    def is_due(self) -> bool:
        """Return whether a progress line is due."""
        return time.monotonic() - self._last >= self._every_s

    def progress(self, text: str, record: dict[str, Any]) -> None:
        """Print a progress line and write its record."""
        self._last = time.monotonic()
        with self._lock:
            if self._overwrites:
                # Truncate the line: a wrapped line could not be overwritten.
                self._stream.write(f"\r\x1b[2K{text[: shutil.get_terminal_size().columns - 1]}")
                self._has_open_line = True
            else:
                self._stream.write(text + "\n")
            self._stream.flush()
        self.record(record)

    def say(self, text: str) -> None:
        """Print a line that is not overwritten."""
        with self._lock:
            if self._has_open_line:
                self._stream.write("\n")
                self._has_open_line = False
            self._stream.write(text + "\n")
            self._stream.flush()

    def record(self, values: dict[str, Any]) -> None:
        """Append a record to the metrics file."""
        if self._listener is not None:
            self._listener(values)
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"time": round(time.time(), 3), **values}) + "\n")
            self._file.flush()
        except OSError as error:
            error.filename = error.filename or str(self._path)
            raise

    def close(self) -> None:
        """End the progress line and close the file."""
        if self._has_open_line:
            self._stream.write("\n")
        if self._file:
            # Write errors were raised by `record` already.
            with contextlib.suppress(OSError):
                self._file.close()


def _append_to(path: Path) -> TextIO:
    """Open a file for appending; terminate a last line that a crash left incomplete."""
    file = open(path, "a+b")
    end = file.tell()
    if end:
        file.seek(end - 1)
        if file.read(1) != b"\n":
            file.write(b"\n")
    return io.TextIOWrapper(file, encoding="utf-8")


def describe(metrics: Metrics) -> str:
    """Format metrics such as `loss 0.4312 auc 0.7904 copc 1.01`, followed by custom ones."""
    values: list[tuple[str, float | None, int]] = [
        ("loss", metrics.log_loss, 4),
        ("auc", metrics.auc, 4),
        ("copc", metrics.copc, 2),
        *((name, value, 4) for name, value in metrics.own.items()),
    ]
    return " ".join(f"{name} {'-' if value is None else f'{value:.{digits}f}'}" for name, value, digits in values)


def describe_shares(shares: Shares) -> str:
    """Format the shares of the stages, largest first, and of the reader's threads."""
    stages = sorted(shares.stages.items(), key=lambda item: -item[1])
    text = ", ".join(f"{name} {share:.0%}" for name, share in stages if share >= 0.005)
    threads = [(name, share) for name, share in (("read", shares.read), ("parse", shares.parse)) if share is not None]
    readers = ", ".join(f"{name} {share:.0%}" for name, share in threads)
    return f"{text}; reader threads: {readers}" if readers else text


def worse_than_chance(metrics: Metrics) -> str | None:
    """Return a warning for an AUC significantly below 0.5, or None."""
    below = metrics.errors_below_chance()
    if below is None:
        return None
    return (
        f"auc {metrics.auc:.4f} is {below:.0f} standard errors below 0.5, worse than chance: are the labels of "
        "`data.train` or `data.eval` swapped, or do the two come from different times, formats or slots?"
    )


def summary_lines(summary: Summary) -> list[str]:
    """Format the summary as lines of text."""
    progress = summary.progress
    size = f"{summary.run.path}: {progress.samples:,} samples, {summary.rows:,} rows"
    speed = f"{summary.samples_per_s:,.0f} samples/s"
    lines = [f"trained {size}, {speed}" if summary.samples_per_s else f"nothing left to train in {size}"]
    for label, train in summary.train.items():
        text = f"  {label}: train {describe(train)}"
        if summary.evaluation:
            text += f" | eval {describe(summary.evaluation[label])}"
        lines.append(text)
    if progress.bad_records:
        lines.append(f"  bad records: {progress.bad_records:,} of {progress.records:,}")
    if progress.non_finite:
        lines.append(f"  batches with a non-finite gradient, counted but not applied: {progress.non_finite:,}")
    if progress.evicted:
        lines.append(f"  rows evicted at the ends of epochs: {progress.evicted:,}")
    if summary.shares:
        lines.append(f"  time: {describe_shares(Shares(summary.shares, summary.read, summary.parse))}")
    if summary.bottleneck:
        lines.append(f"  {summary.bottleneck}")
    return lines
