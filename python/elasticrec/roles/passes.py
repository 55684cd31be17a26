"""The passes of a training with servers as people see them: what each came to, and how good its parameters are."""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.coordinator.checkpoints import Checkpoint, open_checkpoint
from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.journal import Entry, read_entries
from elasticrec.roles.start import read_start
from elasticrec.run import Run
from elasticrec.training.loop import Trainer
from elasticrec.training.metrics import Metrics, MetricSums
from elasticrec.training.report import Reporter, describe
from elasticrec.training.stop import Stopped


def ended_passes(run: Run) -> list[Entry]:
    """The passes that are complete and saved, as the coordinator wrote them down."""
    return [entry for entry in read_entries(run.path / "coordinator") if entry["kind"] == "ended"]


def newest_checkpoint(run: Run) -> Checkpoint:
    """The last checkpoint that the shards wrote."""
    paths = sorted(path.parent for path in run.checkpoints.glob("ps-*/manifest.json"))
    if not paths:
        raise ModelError(f"{run.path}: expected a checkpoint of its servers, got none")
    return open_checkpoint(paths[-1], read_start(run.path).num_partitions)


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint of shards holds beside parameters."""

    steps: int
    num_samples: int
    sums: npt.NDArray[np.float64]
    """Of the pass that ended last."""


def load_parts(trainer: Trainer, checkpoint: Checkpoint) -> Loaded:
    """Put a checkpoint of all shards into one process."""
    start = read_start(trainer.run.path)
    everything = range(start.num_partitions)
    parts = checkpoint.parts(everything)
    trainer.state.embedding.table.load([part["rows"] for part in parts])
    vectors, steps, (_, sums), samples = _core.read_dense_parts(
        start.shard_spec(everything), [part["dense"] for part in parts]
    )
    trainer.state.dense.restore(steps, dict(zip(trainer.state.dense.vectors, vectors, strict=True)))
    trainer.state.sums = MetricSums.of_flat(sums)
    return Loaded(steps, samples[0], sums)


class PassReports:
    """Tells what every pass came to, once, and evaluates the newest one on `data.eval` beside the training."""

    def __init__(self, job: Job, run: Run, reporter: Reporter) -> None:
        self._job, self._run, self._reporter = job, run, reporter
        self._num_told = _num_told(run)
        # The last line that was said of those of a coordinator.
        self._last_note = (0, 0)
        self._evaluation: threading.Thread | None = None
        # Said and recorded by the thread of the reporter.
        self._results: list[Callable[[], None]] = []
        self._stopped = False

    def tell(self, status: dict[str, Any]) -> None:
        """Tell of the passes that ended since, and what the coordinator says of the data."""
        passes = status["passes"]
        for number, text in passes["notes"]:
            if (status["term"], number) > self._last_note:
                self._last_note = status["term"], number
                self._reporter.say(text)
        if passes["ended"] > self._num_told:
            self._tell_ended()
        while self._results:
            self._results.pop(0)()

    def close(self) -> None:
        """Tell of the last ones; an evaluation that is not at its end is given up."""
        self._stopped = True
        if self._evaluation is not None:
            self._evaluation.join()
        self._tell_ended(evaluate=False)
        while self._results:
            self._results.pop(0)()

    def _tell_ended(self, *, evaluate: bool = True) -> None:
        new = [entry for entry in ended_passes(self._run) if entry["number"] >= self._num_told]
        for entry in new:
            self._num_told = entry["number"] + 1
            record = {key: value for key, value in entry.items() if key not in ("n", "term", "kind", "number")}
            self._reporter.record({"event": "pass", "pass": entry["number"] + 1, **record})
            for label, metrics in zip(self._job.data.labels, entry.get("train", ()), strict=False):
                if metrics["samples"]:
                    self._say(entry, label, "train", Metrics.from_dict(metrics))
        is_idle = self._evaluation is None or not self._evaluation.is_alive()
        if new and evaluate and self._job.data.eval and is_idle:
            self._evaluation = threading.Thread(target=self._evaluate, args=(new[-1],), name="evaluate", daemon=True)
            self._evaluation.start()

    def _say(self, entry: Entry, label: str, what: str, metrics: Metrics) -> None:
        hour = f" {entry['hour']}" if entry["hour"] else ""
        self._reporter.say(
            f"pass {entry['number'] + 1}{hour} {label}: {what} {describe(metrics)}, {metrics.samples:,} samples"
        )

    def _evaluate(self, entry: Entry) -> None:
        """Evaluate the parameters at the end of a pass, from its checkpoint: no other role waits for it."""
        try:
            trainer = Trainer(self._job, self._run, Reporter(None, self._job.train.print_every_s))
            path = self._run.checkpoints / entry["checkpoint"]
            load_parts(trainer, open_checkpoint(path, read_start(self._run.path).num_partitions))
            trainer.evaluator.watch = self._watch
            found = trainer.evaluator.run(trainer.state.embedding, trainer.scorer, trainer.parser)
        except Stopped:
            return
        except (ElasticRecError, OSError) as error:
            # short passes may have dropped the checkpoint, and the next one is evaluated
            text = f"pass {entry['number'] + 1}: not evaluated: {error}"
            self._results.append(lambda: self._reporter.say(text))
            return

        def tell() -> None:
            values = {"pass": entry["number"] + 1, "hour": entry["hour"], "eval": [one.to_dict() for one in found]}
            self._reporter.record({"event": "evaluation", **values})
            for label, metrics in zip(self._job.data.labels, found, strict=True):
                self._say(entry, label, "eval", metrics)

        self._results.append(tell)

    def _watch(self, _: int) -> None:
        if self._stopped:
            raise Stopped


def _num_told(run: Run) -> int:
    """How many passes the metrics file knows of, from trainings of this run before."""
    told = 0
    if run.metrics_path.exists():
        for line in run.metrics_path.read_text(errors="replace").splitlines():
            if '"event": "pass"' in line:
                told = max(told, _number(line))
    return told


def _number(line: str) -> int:
    try:
        return int(json.loads(line)["pass"])
    except (ValueError, KeyError, TypeError):
        # a line that a crash cut short
        return 0
