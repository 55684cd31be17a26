"""Reports of the passes of a training with servers: their metrics, and the evaluation of their parameters."""

import json
import logging
import threading
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.coordinator.checkpoint import PREFIX, Checkpoint, open_checkpoint
from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.journal import Entry, read_entries
from elasticrec.manifest import MANIFEST
from elasticrec.net.messages import StatusResponse
from elasticrec.roles.start import read_start
from elasticrec.run import Run
from elasticrec.training.loop import Trainer
from elasticrec.training.metrics import Metrics, MetricSums
from elasticrec.training.report import Reporter, describe
from elasticrec.training.stop import StopTraining

logger = logging.getLogger(__name__)


def ended_passes(run: Run) -> list[Entry]:
    """Return the coordinator's entries of the passes that are complete and saved."""
    return [entry for entry in read_entries(run.path / "coordinator") if entry["kind"] == "ended"]


def newest_checkpoint(run: Run) -> Checkpoint:
    """Return the shards' newest checkpoint."""
    paths = sorted(path.parent for path in run.checkpoints.glob(f"{PREFIX}*/{MANIFEST}"))
    if not paths:
        raise ModelError(f"{run.path}: expected a checkpoint of the servers, got none")
    return open_checkpoint(paths[-1], read_start(run.path).num_partitions)


@dataclass(frozen=True)
class CheckpointTotals:
    """The contents of a checkpoint of the shards besides the parameters."""

    steps: int
    num_samples: int
    sums: npt.NDArray[np.float64]
    """Metric sums of the last complete pass."""


def load_parts(trainer: Trainer, checkpoint: Checkpoint) -> CheckpointTotals:
    """Load the parameters of all shards into one process; return the other contents of the checkpoint."""
    start = read_start(trainer.run.path)
    everything = range(start.num_partitions)
    parts = checkpoint.parts(everything)
    trainer.state.embedding.table.load([part["rows"] for part in parts])
    vectors, steps, (_, sums), samples = _core.read_dense_parts(
        start.shard_spec(everything), [part["dense"] for part in parts]
    )
    trainer.state.dense.restore(steps, dict(zip(trainer.state.dense.vectors, vectors, strict=True)))
    trainer.state.sums = MetricSums.of_flat(sums)
    return CheckpointTotals(steps, samples[0], sums)


class PassReports:
    """Reports the metrics of every pass once, and evaluates the newest pass on `data.eval` during the training."""

    def __init__(self, job: Job, run: Run, reporter: Reporter) -> None:
        self._job, self._run, self._reporter = job, run, reporter
        self._num_reported = _num_reported(run)
        # Term and number of the last note of the coordinator that was shown.
        self._last_note = (0, 0)
        self._evaluation: threading.Thread | None = None
        # Results of evaluations, to be reported on the reporter's thread.
        self._results: list[Callable[[], None]] = []
        self._stopped = False

    def report(self, status: StatusResponse) -> None:
        """Report the passes that ended since the last call, and the coordinator's new notes."""
        passes = status["passes"]
        for number, text in passes["notes"]:
            if (status["term"], number) > self._last_note:
                self._last_note = status["term"], number
                self._reporter.say(text)
        if passes["ended"] > self._num_reported:
            self._report_ended()
        while self._results:
            self._results.pop(0)()

    def close(self) -> None:
        """Report the last passes; stop an evaluation that is still running."""
        self._stopped = True
        if self._evaluation is not None:
            self._evaluation.join()
        self._report_ended(evaluate=False)
        while self._results:
            self._results.pop(0)()

    def _report_ended(self, *, evaluate: bool = True) -> None:
        new = [entry for entry in ended_passes(self._run) if entry["number"] >= self._num_reported]
        for entry in new:
            self._num_reported = entry["number"] + 1
            record = {key: value for key, value in entry.items() if key not in ("n", "term", "kind", "number")}
            self._reporter.record({"event": "pass", "pass": entry["number"] + 1, **record})
            for label, metrics in zip(self._job.data.labels, entry.get("train", ()), strict=False):
                if metrics["samples"]:
                    self._report_metrics(entry, label, "train", Metrics.from_dict(metrics))
        is_idle = self._evaluation is None or not self._evaluation.is_alive()
        if new and evaluate and self._job.data.eval and is_idle:
            arguments = self._evaluate, new[-1]
            self._evaluation = threading.Thread(target=copy_context().run, args=arguments, name="evaluate", daemon=True)
            self._evaluation.start()

    def _report_metrics(self, entry: Entry, label: str, what: str, metrics: Metrics) -> None:
        hour = f" {entry['hour']}" if entry["hour"] else ""
        self._reporter.say(
            f"pass {entry['number'] + 1}{hour} {label}: {what} {describe(metrics)}, {metrics.samples:,} samples"
        )

    def _evaluate(self, entry: Entry) -> None:
        """Evaluate the parameters at the end of a pass from its checkpoint, while training continues."""
        try:
            trainer = Trainer(self._job, self._run, Reporter(None, self._job.train.print_every_s))
            path = self._run.checkpoints / entry["checkpoint"]
            load_parts(trainer, open_checkpoint(path, read_start(self._run.path).num_partitions))
            trainer.evaluator.watch = self._watch
            found = trainer.evaluator.run(trainer.state.embedding, trainer.scorer, trainer.parser)
        except StopTraining:
            return
        except (ElasticRecError, OSError) as error:
            # With short passes the checkpoint may already be removed; the next pass is evaluated.
            logger.warning("pass %d: not evaluated: %s", entry["number"] + 1, error)
            return

        def report() -> None:
            values = {"pass": entry["number"] + 1, "hour": entry["hour"], "eval": [one.to_dict() for one in found]}
            self._reporter.record({"event": "evaluation", **values})
            for label, metrics in zip(self._job.data.labels, found, strict=True):
                self._report_metrics(entry, label, "eval", metrics)

        self._results.append(report)

    def _watch(self, _: int) -> None:
        if self._stopped:
            raise StopTraining


def _num_reported(run: Run) -> int:
    """Return the number of passes in the metrics file, from earlier trainings of this run."""
    reported = 0
    if run.metrics_path.exists():
        for line in run.metrics_path.read_text(errors="replace").splitlines():
            if '"event": "pass"' in line:
                reported = max(reported, _number(line))
    return reported


def _number(line: str) -> int:
    try:
        return int(json.loads(line)["pass"])
    except (ValueError, KeyError, TypeError):
        # A crash truncated this line.
        return 0
