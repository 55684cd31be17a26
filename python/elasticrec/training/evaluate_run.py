"""Evaluate the checkpoints of a run after training: one or a range of epochs, on any data."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elasticrec.config import Job, match_files
from elasticrec.data.header import check_headers
from elasticrec.errors import ConfigError, ModelError
from elasticrec.run import Run
from elasticrec.terminal import align_columns
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Checkpoint
from elasticrec.training.custom_metrics import load_metrics
from elasticrec.training.evaluate import Evaluator
from elasticrec.training.metrics import Metrics
from elasticrec.training.network import num_threads
from elasticrec.training.predict import load

_RANGE = re.compile(r"([0-9]{0,9}):([0-9]{0,9})|([0-9]{1,9})")


@dataclass(frozen=True)
class CheckpointMetrics:
    """A checkpoint and its metrics by label."""

    checkpoint: Checkpoint
    metrics: dict[str, Metrics]

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics for JSON."""
        progress = self.checkpoint.progress
        return {
            "snapshot": self.checkpoint.end_of_epoch,
            "checkpoint": self.checkpoint.name,
            "steps": progress.steps,
            "samples": progress.samples,
            "eval": {label: metrics.to_dict() for label, metrics in self.metrics.items()},
        }


def choose(run: Run, epochs: str | None, *, best: bool = False) -> list[Checkpoint]:
    """Return the newest checkpoint, the best one, or those at the ends of a range of epochs."""
    if epochs is not None and best:
        raise ConfigError("eval: expected one of --range and --best")
    if epochs is not None:
        return _in_range(run, epochs)
    return [checkpoints.newest_or_best(run, is_best=best)]


def _in_range(run: Run, epochs: str) -> list[Checkpoint]:
    """Return the checkpoints at the ends of epochs, counted from 0: `0:4` is 0 to 3, `2:` is 2 and later, `3` is 3."""
    match = _RANGE.fullmatch(epochs)
    if match is None:
        raise ConfigError(f"--range: expected epochs such as `0:4`, `2:` or `3`, got `{epochs}`")
    found = {one.end_of_epoch: one for one in checkpoints.list_checkpoints(run) if one.end_of_epoch is not None}
    first = int(match[1] or match[3] or 0)
    end = int(match[3]) + 1 if match[3] else int(match[2]) if match[2] else max(found, default=-1) + 1
    wanted = range(first, end)
    missing = [str(epoch) for epoch in wanted if epoch not in found]
    if missing or not wanted:
        has = ", ".join(map(str, sorted(found))) or "none"
        raise ModelError(
            f"{run.path}: expected checkpoints of the epochs {epochs}, got {has}; "
            "`train.checkpoint.keep_epochs: true` keeps them all"
        )
    return [found[epoch] for epoch in wanted]


def evaluate_run(run: Run, chosen: Sequence[Checkpoint], patterns: Sequence[str]) -> Iterator[CheckpointMetrics]:
    """Evaluate each checkpoint on `data.eval` of the job, or on the given files."""
    job = _with_data(run.job(), patterns)
    torch.set_num_threads(num_threads(job))
    files = match_files(job, "eval")
    if not files:
        raise ConfigError(f"{run.path}: the job has no `data.eval`, expected --data FILES")
    check_headers(job, files)
    evaluator = Evaluator(job, files, load_metrics(job))
    for checkpoint in chosen:
        loaded = load(job, checkpoint)
        metrics = evaluator.run(loaded.state.embedding, loaded.scorer, loaded.parser)
        yield CheckpointMetrics(checkpoint, dict(zip(job.data.labels, metrics, strict=True)))


def _with_data(job: Job, patterns: Sequence[str]) -> Job:
    if not patterns:
        return job
    paths = tuple(str(Path(pattern).expanduser().absolute()) for pattern in patterns)
    changed = job.model_copy(update={"data": job.data.model_copy(update={"eval": paths})})
    changed._source = "--data"
    return changed


def table_lines(evaluated: Sequence[CheckpointMetrics]) -> list[str]:
    """Format a line for each checkpoint and label; for a single checkpoint, also its calibration."""
    own = sorted({name for one in evaluated for metrics in one.metrics.values() for name in metrics.own})
    header = ["epoch", "checkpoint", "label", "samples", "loss", "auc", "copc", *own]
    rows = [header]
    for one in evaluated:
        epoch = "-" if one.checkpoint.end_of_epoch is None else str(one.checkpoint.end_of_epoch)
        for label, metrics in one.metrics.items():
            values = [metrics.log_loss, metrics.auc, metrics.copc, *(metrics.own.get(name) for name in own)]
            shown = ["-" if value is None else f"{value:.4f}" for value in values]
            rows.append([epoch, one.checkpoint.name, label, f"{metrics.samples:,}", *shown])
    lines = align_columns(rows)
    if len(evaluated) == 1:
        for label, metrics in evaluated[0].metrics.items():
            lines += ["", f"calibration of {label}, by tenths of the weight, ordered by prediction:"]
            tenths = [["predicted", "observed", "observed/predicted"]]
            for tenth in metrics.calibration:
                ratio = f"{tenth.observed / tenth.predicted:.2f}" if tenth.predicted else "-"
                tenths.append([f"{tenth.predicted:.5f}", f"{tenth.observed:.5f}", ratio])
            lines += [f"  {line}" for line in align_columns(tenths)]
    return lines
