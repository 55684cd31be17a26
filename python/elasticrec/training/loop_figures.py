"""Figures of a training in one process: progress lines, the end of a pass, and the summary."""

from typing import TYPE_CHECKING, Any

from elasticrec.machine import num_cores
from elasticrec.training.bottleneck import Setup, Shares, bottleneck
from elasticrec.training.metrics import Metrics
from elasticrec.training.network import num_threads
from elasticrec.training.report import Summary, describe, describe_shares

if TYPE_CHECKING:
    from elasticrec.training.loop import Trainer


class LoopFigures:
    """Reads the state of a trainer; changes nothing but the laps of its clock."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    def train_metrics(self) -> list[Metrics]:
        """Return the metrics of the current pass by label."""
        return [sums.result() for sums in self._trainer.state.sums]

    def progress(self, done: float, started_s: float, started_samples: int) -> tuple[str, dict[str, Any]]:
        """Return a progress line and the values of its record; speed is measured since `started_s`."""
        trainer = self._trainer
        progress, metrics = trainer.progress, self.train_metrics()
        speed = (progress.samples - started_samples) / max(trainer.clock.elapsed - started_s, 1e-9)
        rows = len(trainer.state.embedding.table)
        shares = self._shares(trainer.clock.lap())
        reason = bottleneck(shares, self._setup())
        text = (
            f"{trainer.passes.name(progress.epoch + 1)} {done:4.0%} "
            f"{progress.samples:>12,} samples {speed:>9,.0f}/s {describe(metrics[0])} rows {rows:,} "
            f"| {describe_shares(shares)}{f' | {reason}' if reason else ''}"
        )
        values = {
            "samples_per_s": round(speed, 1),
            "rows": rows,
            "train": to_dicts(metrics),
            "shares": shares.to_dict(),
            "bottleneck": reason,
        }
        return text, values

    def end_of_pass(self) -> tuple[list[str], dict[str, Any]]:
        """Return a line for each label and the values of the record of a pass that just ended."""
        trainer = self._trainer
        progress, evaluation = trainer.progress, trainer.evaluation
        train = [sums.result(calibration=True) for sums in trainer.state.sums]
        lines = []
        for at, label in enumerate(trainer.job.data.labels):
            text = f"{trainer.passes.name(progress.epoch)} {label}: train {describe(train[at])}"
            if evaluation:
                text += f" | eval {describe(evaluation[at])}"
            lines.append(text)
        values = {
            "epoch": progress.epoch,
            "rows": len(trainer.state.embedding.table),
            "evicted": progress.evicted,
            "train": to_dicts(train),
            "eval": to_dicts(evaluation),
        }
        return lines, values

    def summary(self, first_samples: int) -> Summary:
        """Return the summary of a training that began after `first_samples`."""
        trainer = self._trainer
        labels, evaluation = trainer.job.data.labels, trainer.evaluation
        num_samples = trainer.progress.samples - first_samples
        shares = self._shares(trainer.clock.shares())
        return Summary(
            run=trainer.run,
            progress=trainer.progress,
            train=dict(zip(labels, self.train_metrics(), strict=True)),
            evaluation=dict(zip(labels, evaluation, strict=True)) if evaluation else None,
            rows=len(trainer.state.embedding.table),
            samples_per_s=num_samples / trainer.clock.elapsed,
            shares=shares.stages,
            read=shares.read,
            parse=shares.parse,
            bottleneck=bottleneck(shares, self._setup()) if num_samples else None,
        )

    def _shares(self, seconds: dict[str, float]) -> Shares:
        """Separate the shares of the loop's stages from those of the reader's threads."""
        data = self._trainer.job.data
        stages = {name: share for name, share in seconds.items() if name not in ("read", "parse")}
        num_parsers = 1 if data.format == "parquet" else data.workers
        parse = seconds.get("parse")
        return Shares(stages, seconds.get("read"), None if parse is None else parse / num_parsers)

    def _setup(self) -> Setup:
        job = self._trainer.job
        return Setup(
            workers=job.data.workers,
            threads=num_threads(job),
            cores=num_cores(),
            has_workers=job.data.format != "parquet",
            saves_by_steps=job.train.checkpoint.every_steps is not None,
            evaluates_inside=job.train.evaluate.every_steps is not None or job.train.evaluate.every_s is not None,
            keeps_best=job.train.checkpoint.keep_best is not None,
        )


def to_dicts(metrics: list[Metrics] | None) -> list[dict[str, Any]] | None:
    """Return metrics of each label for JSON."""
    return None if metrics is None else [one.to_dict() for one in metrics]
