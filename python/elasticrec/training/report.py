"""What a training says of itself: a line on the terminal, a line in a log, a line of JSON."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress
from elasticrec.training.metrics import Metrics


@dataclass(frozen=True)
class Summary:
    """What a training came to."""

    run: Run
    progress: Progress
    train: dict[str, Metrics]
    """By label, of the last epoch."""
    evaluation: dict[str, Metrics] | None
    rows: int
    samples_per_s: float
    """Of this process, without what it resumed from."""
    shares: dict[str, float]
    """Share of the time by stage."""


class Reporter:
    """Prints progress and appends to the metrics file. On a terminal the progress line is written over."""

    def __init__(self, path: Path | None, every_s: float, stream: TextIO | None = None) -> None:
        self._file = open(path, "a", encoding="utf-8") if path else None
        self._every_s = every_s
        self._stream = stream or sys.stderr
        self._overwrites = self._stream.isatty()
        self._open_line = False
        self._last = time.monotonic()

    def start(self) -> None:
        """The first progress line is due one interval from now."""
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether the next progress line is."""
        return time.monotonic() - self._last >= self._every_s

    def progress(self, text: str, record: dict[str, Any]) -> None:
        """A progress line and its record."""
        self._last = time.monotonic()
        if self._overwrites:
            self._stream.write(f"\r\x1b[2K{text}")
            self._open_line = True
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
        self.record(record)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._open_line:
            self._stream.write("\n")
            self._open_line = False
        self._stream.write(text + "\n")
        self._stream.flush()

    def record(self, values: dict[str, Any]) -> None:
        """A line of the metrics file."""
        if self._file:
            self._file.write(json.dumps({"time": round(time.time(), 3), **values}) + "\n")
            self._file.flush()

    def close(self) -> None:
        """End the line and the file."""
        if self._open_line:
            self._stream.write("\n")
        if self._file:
            self._file.close()


def describe(metrics: Metrics) -> str:
    """Such as `loss 0.4312 auc 0.7904 copc 1.01`."""
    values = (("loss", metrics.log_loss, 4), ("auc", metrics.auc, 4), ("copc", metrics.copc, 2))
    return " ".join(f"{name} {'-' if value is None else f'{value:.{digits}f}'}" for name, value, digits in values)


def summary_lines(summary: Summary) -> list[str]:
    """What a training came to, for people."""
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
        lines.append(f"  batches with a gradient that was not finite, counted but not applied: {progress.non_finite:,}")
    if progress.evicted:
        lines.append(f"  rows evicted at the ends of epochs: {progress.evicted:,}")
    shares = sorted(summary.shares.items(), key=lambda item: -item[1])
    if shares:
        lines.append("  time: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005))
    return lines
