"""The training loop in one process: read batches, train the table and the network, evaluate, save checkpoints."""

import json
import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, TextIO

import torch

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.config.fields import show
from elasticrec.config.train import METRICS
from elasticrec.data.batches import Batches, open_batches, prepare, refuse_bad_records
from elasticrec.data.header import check_headers, with_names
from elasticrec.data.units import Unit, read_units
from elasticrec.errors import ConfigError, ModelError, SampleError
from elasticrec.net.logs import forward_logs
from elasticrec.run import Run
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Progress, State
from elasticrec.training.clock import StageClock
from elasticrec.training.custom_metrics import load_metrics
from elasticrec.training.dense import FlatParameters
from elasticrec.training.embedding import Embedding
from elasticrec.training.evaluate import Evaluator
from elasticrec.training.event import Callback, Event
from elasticrec.training.forward import forward
from elasticrec.training.hook import Hook, NoHook
from elasticrec.training.loop_figures import LoopFigures, to_dicts
from elasticrec.training.metrics import Metrics, MetricSums
from elasticrec.training.network import Scorer, build_model, num_threads
from elasticrec.training.passes import LocalPasses
from elasticrec.training.report import Reporter, Summary, worse_than_chance
from elasticrec.training.schedule import Schedule
from elasticrec.training.stop import StopTraining, stop_on_signals
from elasticrec.training.upkeep import run_upkeep
from elasticrec.training.warm_start import find_start, warm_start

# `data.max_bad_ratio` is checked during an epoch only after this many records.
_MIN_RECORDS_FOR_RATIO = 10_000


class Trainer:
    """Trains a job in one process; holds the table and the network."""

    def __init__(self, job: Job, run: Run, reporter: Reporter, callback: Callback | None = None) -> None:
        torch.set_num_threads(num_threads(job))
        self.job = job
        self.run = run
        self.reporter = reporter
        self.parser = _core.Parser(json.dumps(job.features()))
        self.passes = LocalPasses(job, run)
        eval_files = match_files(job, "eval")
        check_headers(job, eval_files)
        prepare(job)
        own = load_metrics(job)
        self.evaluator = Evaluator(job, eval_files, own, self._watch_evaluation)
        self.model = build_model(job)
        self.scorer = Scorer(self.model, job.data.negative_rate)
        embedding = Embedding(job, self.model.columns)
        sums = [MetricSums() for _ in job.data.labels]
        self.state = State(embedding, FlatParameters(self.model, job), sums)
        self.progress = Progress(epoch=0, unit=0, batches=0, steps=0, samples=0, records=0, bad_records=0)
        self.clock = StageClock()
        self.schedule = Schedule(job.train, has_hours=self.passes.has_hours)
        self.evaluation: list[Metrics] | None = None
        self.stop_requested = False
        self.hook: Hook = NoHook()
        """Called between steps."""
        self._figures = LoopFigures(self)
        self._callback = callback
        self._stopped_by_callback = False
        self._saved: Progress | None = None
        self._best: float | None = None

    def resume(self) -> bool:
        """Load the newest checkpoint and return True; without one, begin a new run, possibly with a warm start."""
        checkpoint = checkpoints.latest(self.run)
        if checkpoint is None:
            self._begin()
            return False
        try:
            checkpoints.restore(checkpoint, self.job, self.state)
        except ModelError as error:
            others = len(checkpoints.list_paths(self.run)) - 1
            hint = f"; remove {checkpoint.path} to use the one before it ({others} left)" if others else ""
            raise ModelError(f"{error}{hint}") from None
        self.progress = self._saved = self.passes.restore(checkpoint.progress)
        self.evaluation = checkpoint.evaluation
        if self.job.train.checkpoint.keep_best and (best := checkpoints.best(self.run, self.job)):
            self._best = checkpoints.best_value(best.own_evaluation, self.job)
        if self.passes.is_over(self.progress):
            has_hours = self.passes.has_hours
            size = "hours" if has_hours else f"of {self.job.train.epochs} epochs"
            self.reporter.say(
                f"{self.run.path} is finished: {self.progress.epoch} {size}, {self.progress.samples:,} samples; "
                f"raise `{'data.hours.end' if has_hours else 'train.epochs'}` to continue, or start over with `--fresh`"
            )
            return True
        self.reporter.say(
            f"resuming {self.run.path} from {checkpoint.name}: {'pass' if self.passes.has_hours else 'epoch'} "
            f"{self.progress.epoch + 1}, {self.progress.samples:,} samples done"
        )
        self._emit("start", {"checkpoint": checkpoint.name})
        return True

    def _begin(self) -> None:
        if self.job.train.warm_start:
            start = warm_start(self.job, self.state)
            self.progress = replace(self.progress, warm_start=str(start.path))
            self.reporter.say(
                f"starting {self.run.path} with the parameters of {start.path}: "
                f"{len(self.state.embedding.table):,} rows, {start.progress.samples:,} samples"
            )
        self._emit("start", {"checkpoint": None, "warm_start": self.progress.warm_start})

    def train(self) -> Summary:
        """Train all remaining passes and save a final checkpoint."""
        first_samples = self.progress.samples
        if not self.passes.is_over(self.progress):
            self.hook.begin(self)
        self.restart_clock()
        self.schedule.start()
        try:
            while progress := self.passes.begin_next(self.progress, self._check_stop):
                self.progress = progress
                self._train_epoch()
                self._finish_epoch()
                self.hook.end_pass(self)
            if self.passes.has_hours:
                self.progress = replace(self.passes.with_skipped_hours(self.progress), finished=True)
                self._save()
            self.hook.end(self)
        except StopTraining:
            if not self._stopped_by_callback:
                raise KeyboardInterrupt from None
        return self._figures.summary(first_samples)

    def restart_clock(self) -> StageClock:
        """Replace the clock by one that starts now, and return it."""
        self.clock = StageClock()
        return self.clock

    def _train_epoch(self) -> None:
        if not self.progress.batches:
            self.state.sums = [MetricSums() for _ in self.job.data.labels]
        units, self.progress = self.passes.open_units(self.progress)
        started = self.clock.elapsed, self.progress.samples
        self.reporter.start()
        while True:
            try:
                return self._train_units(units, started)
            except (OSError, SampleError) as error:
                units, self.progress = self.passes.skip_lost(units, self.progress, error)

    def _train_units(self, units: list[Unit], started: tuple[float, int]) -> None:
        # Batches are skipped only in the unit that the checkpoint was in.
        skip = self.progress.batches if units and units[0].id == self.progress.unit else 0
        reader = open_batches(self.job, self.parser, units, shuffle=self.job.data.shuffle, skip_batches=skip)
        with closing(reader):
            self._follow_schedule()
            for batch in self.time_batches(reader):
                self.step(batch)
                self._check_bad(batch)
                if self.reporter.is_due():
                    text, values = self._figures.progress(_share_done(units, batch), *started)
                    self._emit("progress", values, text)
                self._follow_schedule()
                self.hook.between(self)

    def _follow_schedule(self) -> None:
        """Evaluate, stop or save if due; called between two batches."""
        if self.schedule.is_evaluation_due(self.progress, self.clock.elapsed):
            self._evaluate()
            self._emit("evaluation", {"eval": to_dicts(self.evaluation)})
            if self._is_best():
                self._save()
        if self.stop_requested:
            self._stop()
        if self.progress.batches and self.schedule.is_checkpoint_due(self.progress, self.clock.elapsed):
            self._save()

    def _check_stop(self) -> None:
        if self.stop_requested:
            self._stop()

    def _stop(self) -> None:
        """Save and stop, on request of a signal or the callback."""
        self._save()
        self.reporter.say(f"stopped and saved; run the same command to continue from step {self.progress.steps}")
        raise StopTraining

    def time_batches(self, reader: Batches) -> Iterator[_core.Batch]:
        """Yield the batches of a reader, and time the waiting and the reader's threads."""
        before = (0.0, 0.0)
        while True:
            with self.clock.stage("wait"):
                batch = next(reader, None)
            after = reader.times()
            for name, seconds, past in zip(("read", "parse"), after, before, strict=True):
                self.clock.add(name, seconds - past)
            before = after
            if batch is None:
                return
            yield batch

    def step(self, batch: _core.Batch) -> None:
        """Train one batch: pull, forward, backward, push, step. Rows are read after the previous push."""
        embedding, dense, clock = self.state.embedding, self.state.dense, self.clock
        applied = True
        if batch.num_samples:
            self.scorer.train()
            with clock.stage("pull"):
                pooled = embedding.pull(batch)
            with clock.stage("forward"):
                logits, loss = forward(self.job, self.scorer, pooled, batch)
            with clock.stage("backward"):
                dense.zero_gradient()
                torch.autograd.backward(loss.mean)
            with clock.stage("push"):
                # A batch is applied completely or not at all: with a NaN scale the push only counts it.
                scale = loss.weight if dense.gradient_is_finite() else math.nan
                applied = embedding.push(batch, pooled, scale=scale, seen=self.passes.data_time(self.progress))
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
        """Evaluate, then save a checkpoint at the start of the next epoch."""
        self._check_bad_ratio(least=1)
        epoch = self.progress.epoch
        self.passes.refuse_empty(self.progress, len(self.state.embedding.table))
        if self.passes.ends_day:
            with self.clock.stage("upkeep"):
                now = self.passes.data_time(self.progress)
                self.progress = run_upkeep(self.job, self.state.embedding, self.progress, now)
        due = self.schedule.is_epoch_checkpoint_due(epoch)
        if self.evaluator.files:
            if due:
                # Save first, so that a crash during the evaluation loses no training.
                self._save()
            self._evaluate()
        units = read_units(self.passes.units_path(epoch))
        self.progress = replace(
            self.progress,
            epoch=epoch + 1,
            unit=units[-1].id + 1 if units else self.progress.unit,
            batches=0,
            finished=not self.passes.has_hours and epoch + 1 >= self.job.train.epochs,
        )
        if self._is_best() or due:
            self._save()
        self._report_epoch()

    def adopt(self, progress: Progress) -> Summary:
        """Evaluate and save parameters that were trained elsewhere (`train.mode: ps`)."""
        self.progress = progress
        if self.evaluator.files:
            self._evaluate()
        self._save()
        if self.passes.has_hours:
            # Passes were reported when they ended.
            self._emit("evaluation", {"eval": to_dicts(self.evaluation)})
        else:
            self._report_epoch()
        return self._figures.summary(0)

    def _report_epoch(self) -> None:
        lines, values = self._figures.end_of_pass()
        for line in lines:
            self.reporter.say(line)
        if self.passes.has_hours:
            self._emit("pass", {"pass": self.progress.epoch, "hour": self.passes.hour, **values})
        else:
            self._emit("epoch", values)

    def _evaluate(self) -> None:
        """Evaluate the parameters. If that fails or is stopped, save first."""
        try:
            with self.clock.stage("evaluate"):
                self.evaluation = self.evaluator.run(self.state.embedding, self.scorer, self.parser)
        except StopTraining:
            self._stop()
        except Exception:
            self._save()
            raise
        self.schedule.note_evaluated(self.clock.elapsed)
        self.progress = replace(self.progress, evaluated=self.progress.steps)
        for label, metrics in zip(self.job.data.labels, self.evaluation or [], strict=True):
            if warning := worse_than_chance(metrics):
                self.reporter.say(f"eval {label}: {warning}")

    def _watch_evaluation(self, records: int) -> None:
        if self.stop_requested:
            raise StopTraining
        if self.reporter.is_due():
            values = {"event": "evaluating", "steps": self.progress.steps, "records": records}
            self.reporter.progress(f"evaluating: {records:,} records", values)

    def _is_best(self) -> bool:
        """Return whether `keep_best` is set and the last evaluation is of these parameters and the best so far."""
        if not self.job.train.checkpoint.keep_best or self.progress.evaluated != self.progress.steps:
            return False
        self._check_best_metric()
        value = checkpoints.best_value(self.evaluation, self.job)
        if value is None or (self._best is not None and value <= self._best):
            return False
        self._best = value
        return True

    def _check_best_metric(self) -> None:
        """Check `keep_best`; the names of custom metrics are known only after an evaluation."""
        name = self.job.train.checkpoint.keep_best
        # COPC is best at 1, neither at its highest nor at its lowest value.
        built_in = [name for name in METRICS if name != "copc"]
        known = [*built_in, *(self.evaluation[0].own if self.evaluation else ())]
        if name not in known:
            names = ", ".join(f"`{one}`" for one in known)
            raise ConfigError(
                f"{self.job.source}: train.checkpoint.keep_best: expected one of {names}, got {show(str(name))}"
            )

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of this pass and of the last evaluation, as written to manifests."""
        return {"train": to_dicts(self._figures.train_metrics()), "eval": to_dicts(self.evaluation)}

    def _save(self) -> None:
        if self._saved == self.progress:
            return
        with self.clock.stage("checkpoint"):
            checkpoints.save(self.run, self.job, self.state, self.progress, self.evaluation)
        self._saved = self.progress
        self.schedule.note_saved(self.clock.elapsed)

    def _check_bad(self, batch: _core.Batch) -> None:
        for line in batch.bad:
            self.reporter.say(f"bad record: {line}")
        if batch.num_bad:
            self._check_bad_ratio(least=_MIN_RECORDS_FOR_RATIO)

    def _check_bad_ratio(self, least: int) -> None:
        if self.progress.records >= least:
            refuse_bad_records(self.job, self.progress.records, self.progress.bad_records, "data.train")

    def _emit(self, kind: str, values: dict[str, Any], text: str | None = None) -> None:
        """Write a record to the metrics file, print `text` if given, and call the callback."""
        record = {"event": kind, "steps": self.progress.steps, "samples": self.progress.samples, **values}
        if text is None:
            self.reporter.record(record)
        else:
            self.reporter.progress(text, record)
        if self._callback is None:
            return
        try:
            answer = self._callback(Event.of_record(record, self.job.data.labels))
        except BaseException:
            # The callback runs between batches, where the state is consistent.
            if self.progress.steps:
                self._save()
            raise
        if answer is False:
            self.stop_requested = self._stopped_by_callback = True


def _share_done(units: list[Unit], batch: _core.Batch) -> float:
    """Return the share of an epoch's bytes that is done, including the read part of the current unit."""
    total = sum(unit.end - unit.start for unit in units)
    done = sum(unit.end - unit.start for unit in units if unit.id < batch.unit)
    done += sum(max(batch.file_bytes - unit.start, 0) for unit in units if unit.id == batch.unit)
    return done / max(total, 1)


def train_job(
    job: Job,
    *,
    fresh: bool = False,
    callback: Callback | None = None,
    stream: TextIO | None = None,
    hook: Hook | None = None,
) -> Summary:
    """Train a job in this process; resume its run if there is one.

    `callback` receives every event. If it returns False or raises, the training saves a checkpoint and stops.
    `hook` is called between steps.
    """
    job = with_names(job)
    with Run.of(job).locked():
        if job.model.custom_class:
            # Build it before anything is written or discarded; its file may be in the run that is discarded.
            build_model(job)
        if fresh:
            check_start(job)
            Run.of(job).discard()
        run = Run.create(job)
        reporter = Reporter(run.metrics_path, job.train.print_every_s, stream)
        with closing(reporter), forward_logs(reporter.say):
            trainer = Trainer(job, run, reporter, callback)
            trainer.hook = hook or trainer.hook
            return _train(trainer)


def check_start(job: Job) -> None:
    """Raise an error if the job cannot start, before its previous run is discarded."""
    if not job.data.hours:
        match_files(job, "train")
    match_files(job, "eval")
    load_metrics(job)
    if job.train.warm_start:
        find_start(job)


def _train(trainer: Trainer) -> Summary:
    trainer.resume()

    def request_stop() -> None:
        trainer.stop_requested = True

    with stop_on_signals(request_stop):
        return trainer.train()
