"""The training loop: units to batches, batches through the table and the network, checkpoints on the way."""

import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from elasticrec import _core
from elasticrec.config import Job, fingerprint, match_files
from elasticrec.data.units import Cut, Unit, check_unchanged, plan_units, read_units, write_units
from elasticrec.errors import ModelError, SampleError
from elasticrec.run import Run
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Progress, State
from elasticrec.training.clock import StageClock
from elasticrec.training.dense import FlatParameters
from elasticrec.training.embedding import Embedding
from elasticrec.training.evaluate import evaluate
from elasticrec.training.metrics import Metrics, MetricSums
from elasticrec.training.network import Scorer, build_model, loss_of, num_threads
from elasticrec.training.report import Reporter, Summary, describe
from elasticrec.training.upkeep import keep_up

# A share of bad records says something only of so many.
_MIN_RECORDS_FOR_RATIO = 10_000


class Trainer:
    """One process that trains a job: it holds the table and the network."""

    def __init__(self, job: Job, run: Run, reporter: Reporter) -> None:
        torch.set_num_threads(num_threads(job))
        self.job = job
        self.run = run
        self.reporter = reporter
        self.parser = _core.Parser(json.dumps(job.features()))
        self.train_files = match_files(job, "train")
        self.eval_files = match_files(job, "eval")
        self.model = build_model(job)
        self.scorer = Scorer(self.model)
        embedding = Embedding(job, self.model.columns)
        sums = [MetricSums() for _ in job.data.labels]
        self.state = State(embedding, FlatParameters(self.model, job), sums)
        self.progress = Progress(epoch=0, unit=0, batches=0, steps=0, samples=0, records=0, bad_records=0)
        self.clock = StageClock()
        self.evaluation: list[Metrics] | None = None
        self.stop_requested = False
        self._saved: Progress | None = None

    def resume(self) -> bool:
        """Go on from the newest checkpoint, if there is one."""
        checkpoint = checkpoints.latest(self.run)
        if checkpoint is None:
            return False
        try:
            checkpoints.restore(checkpoint, self.job, self.state)
        except ModelError as error:
            others = len(checkpoints.list_paths(self.run)) - 1
            hint = f"; without {checkpoint.path} the one before is used, there are {others}" if others else ""
            raise ModelError(f"{error}{hint}") from None
        self.progress = self._saved = checkpoint.progress
        self.evaluation = checkpoint.evaluation
        if self.progress.epoch >= self.job.train.epochs:
            self.reporter.say(
                f"{self.run.path} is finished: {self.progress.epoch} of {self.job.train.epochs} epochs, "
                f"{self.progress.samples:,} samples; "
                "a higher `train.epochs` goes on, `--fresh` starts over"
            )
            return True
        self.reporter.say(
            f"resuming {self.run.path} from {checkpoint.name}: epoch {self.progress.epoch + 1}, "
            f"{self.progress.samples:,} samples done"
        )
        return True

    def train(self) -> Summary:
        """Train every epoch that is left and leave a checkpoint of the end."""
        first_samples = self.progress.samples
        self.clock = StageClock()
        while self.progress.epoch < self.job.train.epochs:
            self._train_epoch()
            self._finish_epoch()
        labels = self.job.data.labels
        return Summary(
            run=self.run,
            progress=self.progress,
            train=dict(zip(labels, self._train_metrics(), strict=True)),
            evaluation=dict(zip(labels, self.evaluation, strict=True)) if self.evaluation else None,
            rows=len(self.state.embedding.table),
            samples_per_s=(self.progress.samples - first_samples) / self.clock.elapsed,
            shares=self.clock.shares(),
        )

    def _train_epoch(self) -> None:
        units, skip = self._open_units()
        if not skip:
            self.state.sums = [MetricSums() for _ in self.job.data.labels]
        reader = self._read(units, shuffle=self.job.data.shuffle, skip_batches=skip)
        last_save = self.clock.elapsed
        started = self.clock.elapsed, self.progress.samples
        self.reporter.start()
        with closing(reader):
            for batch in self._timed(reader):
                self._step(batch)
                self._check_bad(batch)
                if self.reporter.due():
                    self._report(units, *started)
                if self.stop_requested:
                    self._stop()
                if self._checkpoint_due(last_save):
                    self._save()
                    last_save = self.clock.elapsed

    def _stop(self) -> None:
        """Save and end, as a signal asked for."""
        self._save()
        self.reporter.say(f"stopped and saved; the same command goes on from step {self.progress.steps}")
        raise KeyboardInterrupt

    def _read(self, units: list[Unit], *, shuffle: bool, skip_batches: int) -> _core.BatchReader:
        return _core.BatchReader(
            self.parser,
            [unit.core() for unit in units],
            batch_size=self.job.train.batch_size,
            shuffle=shuffle,
            seed=self.job.train.seed,
            labels=True,
            workers=self.job.data.workers,
            skip_batches=skip_batches,
        )

    def _timed(self, reader: _core.BatchReader) -> Iterator[_core.Batch]:
        while True:
            with self.clock.stage("wait"):
                batch = next(reader, None)
            if batch is None:
                return
            yield batch

    def _step(self, batch: _core.Batch) -> None:
        """One batch: pull, forward, backward, push, step. Values are read only after the push before."""
        embedding, dense, clock = self.state.embedding, self.state.dense, self.clock
        applied = True
        if batch.num_samples:
            self.scorer.train()
            with clock.stage("pull"):
                pooled = embedding.pull(batch)
            with clock.stage("forward"):
                logits = self.scorer.logits(pooled, torch.from_numpy(batch.dense))
                loss = loss_of(logits, batch)
                mean = loss.mean.item()
            if not math.isfinite(mean):
                raise ModelError(
                    f"unit {batch.unit} batch {batch.index}: expected a finite loss, got {mean}; "
                    "lower the learning rates or look at the data"
                )
            with clock.stage("backward"):
                dense.zero_gradient()
                torch.autograd.backward(loss.mean)
            with clock.stage("push"):
                # all of a batch is applied or nothing: without a number for a scale the push only counts
                scale = loss.weight if dense.gradient_is_finite() else math.nan
                applied = embedding.push(batch, pooled, scale=scale, seen=self.progress.epoch)
            with clock.stage("step"):
                if applied:
                    dense.step()
            with clock.stage("metrics"):
                scores = logits.detach().numpy()
                for label, sums in enumerate(self.state.sums):
                    sums.add(scores[:, label], batch.labels[:, label], batch.weights)
        self.progress = replace(
            self.progress,
            unit=batch.unit,
            batches=batch.index + 1,
            steps=self.progress.steps + 1,
            samples=self.progress.samples + batch.num_samples,
            records=self.progress.records + batch.num_records,
            bad_records=self.progress.bad_records + batch.num_bad,
            non_finite=self.progress.non_finite + (not applied),
            finished=False,
        )

    def _finish_epoch(self) -> None:
        """Evaluate, then write a checkpoint that begins the next epoch."""
        self._check_bad_ratio(least=1)
        epoch = self.progress.epoch
        if not self.progress.batches:
            raise SampleError(
                f"{self.job.source}: data.train: expected samples, got {len(self.train_files)} file(s) without any"
            )
        if self.job.data.slots and not len(self.state.embedding.table):
            raise SampleError(f"{self.job.source}: data.slots: expected signs in these slots, the data has none")
        self.progress = keep_up(self.job, self.state.embedding, self.progress)
        if self.eval_files:
            # an evaluation that fails or is stopped must not cost what was learned
            self._save()
            with self.clock.stage("evaluate"):
                self.evaluation = self._evaluate()
        units = read_units(self._units_path(epoch))
        self.progress = replace(
            self.progress,
            epoch=epoch + 1,
            unit=units[-1].id + 1,
            batches=0,
            finished=epoch + 1 >= self.job.train.epochs,
        )
        train = self._train_metrics()
        self._save()
        for at, label in enumerate(self.job.data.labels):
            text = f"epoch {epoch + 1}/{self.job.train.epochs} {label}: train {describe(train[at])}"
            if self.evaluation:
                text += f" | eval {describe(self.evaluation[at])}"
            self.reporter.say(text)
        self.reporter.record(
            {
                "epoch": epoch + 1,
                "steps": self.progress.steps,
                "samples": self.progress.samples,
                "rows": len(self.state.embedding.table),
                "evicted": self.progress.evicted,
                "train": [metrics.to_dict() for metrics in train],
                "eval": None if not self.evaluation else [metrics.to_dict() for metrics in self.evaluation],
            }
        )

    def _evaluate(self) -> list[Metrics]:
        cut = replace(self._cut(), shuffle=False)
        units = plan_units(self.eval_files, cut, 0, 0)
        reader = self._read(units, shuffle=False, skip_batches=0)
        records = bad = 0

        def counted() -> Iterator[_core.Batch]:
            nonlocal records, bad
            for batch in reader:
                records += batch.num_records
                bad += batch.num_bad
                for line in batch.bad:
                    self.reporter.say(f"bad record: {line}")
                if self.stop_requested:
                    self._stop()
                if self.reporter.due():
                    self.reporter.progress(f"evaluating: {records:,} records", {"evaluated": records})
                yield batch

        with closing(reader):
            metrics = evaluate(self.state.embedding, self.scorer, counted(), len(self.state.sums))
        self._refuse_bad(records, bad, "data.eval")
        return metrics

    def _open_units(self) -> tuple[list[Unit], int]:
        """The units of this epoch that are left, and how many batches of the first one are done."""
        path = self._units_path(self.progress.epoch)
        if self.progress.batches:
            units = [unit for unit in read_units(path) if unit.id >= self.progress.unit]
            check_unchanged(units)
        else:
            # units that a crash left of this epoch are of no checkpoint, and the job or the data may be others by now
            units = plan_units(self.train_files, self._cut(), self.progress.epoch, self.progress.unit)
            write_units(path, units)
        return units, self.progress.batches

    def _units_path(self, epoch: int) -> Path:
        return self.run.units / f"epoch-{epoch:05d}.jsonl"

    def _cut(self) -> Cut:
        data, train = self.job.data, self.job.train
        return Cut(data.unit_bytes, data.shuffle, train.seed, fingerprint(self.job)[:16])

    def _train_metrics(self) -> list[Metrics]:
        return [sums.result() for sums in self.state.sums]

    def _checkpoint_due(self, last_save: float) -> bool:
        settings = self.job.train.checkpoint
        if settings.every_steps and self.progress.steps % settings.every_steps == 0:
            return True
        return self.clock.elapsed - last_save >= settings.every_s

    def _save(self) -> None:
        if self._saved == self.progress:
            return
        with self.clock.stage("checkpoint"):
            checkpoints.save(self.run, self.job, self.state, self.progress, self.evaluation)
        self._saved = self.progress

    def _check_bad(self, batch: _core.Batch) -> None:
        for line in batch.bad:
            self.reporter.say(f"bad record: {line}")
        if batch.num_bad:
            self._check_bad_ratio(least=_MIN_RECORDS_FOR_RATIO)

    def _check_bad_ratio(self, least: int) -> None:
        if self.progress.records >= least:
            self._refuse_bad(self.progress.records, self.progress.bad_records, "data.train")

    def _refuse_bad(self, records: int, bad: int, key: str) -> None:
        limit = self.job.data.max_bad_ratio
        if bad > limit * records:
            raise SampleError(
                f"{self.job.source}: {key}: {bad:,} of {records:,} records are bad ({bad / records:.2%}), "
                f"expected at most {limit:.2%} (data.max_bad_ratio)"
            )

    def _report(self, units: list[Unit], started_s: float, started_samples: int) -> None:
        metrics = self._train_metrics()
        speed = (self.progress.samples - started_samples) / max(self.clock.elapsed - started_s, 1e-9)
        total = sum(unit.end - unit.start for unit in units)
        done = sum(unit.end - unit.start for unit in units if unit.id < self.progress.unit)
        epoch = f"epoch {self.progress.epoch + 1}/{self.job.train.epochs}"

        rows = len(self.state.embedding.table)
        text = (
            f"{epoch} {done / max(total, 1):4.0%} {self.progress.samples:>12,} samples "
            f"{speed:>9,.0f}/s {describe(metrics[0])} rows {rows:,}"
        )
        record = {
            "steps": self.progress.steps,
            "samples": self.progress.samples,
            "samples_per_s": round(speed, 1),
            "rows": rows,
            "train": [one.to_dict() for one in metrics],
            "shares": {name: round(share, 4) for name, share in self.clock.shares().items()},
        }
        self.reporter.progress(text, record)


def train_job(job: Job, *, fresh: bool = False) -> Summary:
    """Train a job in this process; an unfinished run of it goes on where it was."""
    with Run.of(job).locked():
        if fresh:
            # a job that cannot start must not cost the run it would replace
            for key in ("train", "eval"):
                match_files(job, key)
            Run.of(job).discard()
        run = Run.create(job)
        reporter = Reporter(run.metrics_path, job.train.print_every_s)
        with closing(reporter):
            return _train(Trainer(job, run, reporter))


def _train(trainer: Trainer) -> Summary:
    trainer.resume()
    with _stopping(trainer):
        return trainer.train()


@contextmanager
def _stopping(trainer: Trainer) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the training after the batch at hand, with a checkpoint; a second one at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _: object) -> None:
        trainer.stop_requested = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
