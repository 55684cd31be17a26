"""`elasticrec train` with parameter servers: all roles on this machine, one progress line, one final checkpoint."""

import time
from contextlib import closing
from dataclasses import replace
from typing import Any, TextIO, get_args

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.coordinator.scaling import ProcessTarget, wanted_of
from elasticrec.data.batches import refuse_bad_records
from elasticrec.data.header import with_names
from elasticrec.errors import ElasticRecError
from elasticrec.journal import read_entries
from elasticrec.launch.local import LocalLauncher
from elasticrec.net.logs import forward_logs
from elasticrec.net.messages import StatusResponse
from elasticrec.roles.coordinator import prepare
from elasticrec.roles.passes import PassReports, ended_passes, load_parts, newest_checkpoint
from elasticrec.roles.start import read_start
from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress
from elasticrec.training.event import Callback, Event, EventKind
from elasticrec.training.loop import Trainer, check_start
from elasticrec.training.report import Reporter, Summary
from elasticrec.training.stop import stop_on_signals

# Check the share of bad records only after this many records.
_MIN_RECORDS_FOR_RATIO = 10_000


def train_with_servers(
    job: Job, *, fresh: bool = False, callback: Callback | None = None, stream: TextIO | None = None
) -> Summary | None:
    """Train a job with trainers and parameter servers as processes of this machine; resume an unfinished run.

    Return None when the callback stopped it; an error of the callback is raised after a checkpoint.
    """
    job = with_names(job)
    with Run.of(job).locked():
        if fresh:
            check_start(job)
            Run.of(job).discard()
        run = Run.create(job)
        prepare(job, run)
        listener = _Listener(job, callback)
        reporter = Reporter(run.metrics_path, job.train.print_every_s, stream, listener.receive)
        with closing(reporter), forward_logs(reporter.say):
            passes = PassReports(job, run, reporter)
            before, started = _num_saved(run), time.monotonic()
            entries = read_entries(run.path / "coordinator")
            wanted = wanted_of(entries, ProcessTarget(job.train.servers, job.train.trainers))
            with LocalLauncher(job, run, servers=wanted.servers, trainers=wanted.trainers) as launcher:

                def request_stop() -> None:
                    launcher.stop_requested = True

                def report(status: StatusResponse) -> None:
                    _report(job, status, reporter, passes)
                    if listener.wants_stop:
                        request_stop()

                with stop_on_signals(request_stop):
                    is_finished = launcher.wait(report)
            passes.close()
            if listener.error is not None:
                raise listener.error
            if not is_finished and listener.wants_stop:
                return None
            if not is_finished:
                saved = "stopped and saved" if launcher.is_saved else "stopped, and not saved since the last checkpoint"
                reporter.say(f"{saved}; run the same command to resume")
                raise KeyboardInterrupt
            seconds = time.monotonic() - started
            summary = _collect(job, run, reporter)
            # Omit the stages of this process, which does not train; `status` shows the stages of the roles.
            learned = summary.progress.samples - before
            return replace(summary, samples_per_s=learned / seconds, shares={}, read=None, parse=None, bottleneck=None)


class _Listener:
    """Calls the user's callback with the records of the metrics file, and remembers whether it asked to stop."""

    def __init__(self, job: Job, callback: Callback | None) -> None:
        self._job, self._callback = job, callback
        self.wants_stop = False
        self.error: BaseException | None = None

    def receive(self, record: dict[str, Any]) -> None:
        """Call the callback; keep its error until the servers have saved."""
        if self._callback is None or self.wants_stop or record["event"] not in get_args(EventKind):
            return
        try:
            self.wants_stop = self._callback(Event.of_record(record, self._job.data.labels)) is False
        except BaseException as error:
            self.wants_stop, self.error = True, error


def _num_saved(run: Run) -> int:
    """Return the number of samples in the shards' newest checkpoint."""
    start = read_start(run.path)
    everything = range(start.num_partitions)
    try:
        parts = newest_checkpoint(run).parts(everything)
        samples = _core.read_dense_parts(start.shard_spec(everything), [part["dense"] for part in parts])[3]
    except (ElasticRecError, OSError):
        # There is no checkpoint yet, or it is damaged, which the coordinator reports.
        return 0
    return int(samples[0])


def _report(job: Job, status: StatusResponse, reporter: Reporter, passes: PassReports) -> None:
    """Report the progress; raise if too many records are bad."""
    passes.report(status)
    text, record = _progress(status)
    reporter.progress(text, record)
    if record.get("records", 0) >= _MIN_RECORDS_FOR_RATIO:
        refuse_bad_records(job, record["records"], record["bad_records"], "data.train")


def _progress(status: StatusResponse) -> tuple[str, dict[str, Any]]:
    """Return the progress of all roles as a line and as a record of the metrics file."""
    figures: dict[str, Any] = {}
    for shard in status["shards"]:
        is_sum = ("_0", "records")
        figures |= {key: value for key, value in shard["figures"].items() if key.endswith(is_sum)}
    rows = sum(shard["figures"].get("num_rows", 0) for shard in status["shards"])
    alive = [trainer for trainer in status["trainers"] if trainer["state"] == "alive"]
    serving = [shard for shard in status["shards"] if shard["state"] == "serving"]
    units, passes = status["units"], status["passes"]
    # A restarted coordinator knows the number once all shards have reported.
    complete = "?" if units["complete"] is None else units["complete"]
    which = f"/{passes['planned']}" if passes["planned"] else f" {passes['hour'] or ''}".rstrip()
    text = (
        f"pass {passes['begun']}{which} {figures.get('samples_0', 0):>12,} samples "
        f"auc {figures.get('auc_0', 0):.4f} loss {figures.get('log_loss_0', 0):.4f} rows {rows:,} "
        f"| units {complete} of {units['planned']}, trainers {len(alive)}/{status['wanted']['trainers']}, "
        f"servers {len(serving)}/{len(status['shards'])}"
    )
    shown = {key: value for key, value in passes.items() if key != "notes"}
    samples = figures.get("samples_0", 0)
    record = {"event": "progress", "samples": samples, "rows": rows, "units": units, "passes": shown, **figures}
    return text, record


def _collect(job: Job, run: Run, reporter: Reporter) -> Summary:
    """Convert the shards' last checkpoint to the format that all other commands read, and evaluate it."""
    trainer = Trainer(job, run, reporter)
    checkpoint = newest_checkpoint(run)
    loaded = load_parts(trainer, checkpoint)
    passes = checkpoint.manifest["passes"]
    refuse_bad_records(job, int(loaded.sums[-2]), int(loaded.sums[-1]), "data.train")
    ended = ended_passes(run)
    progress = Progress(
        epoch=len(passes),
        unit=passes[-1]["end_unit"],
        batches=0,
        # The first steps of a warm start belong to the other run.
        steps=loaded.steps - read_start(run.path).steps,
        samples=loaded.num_samples,
        records=sum(entry.get("records", 0) for entry in ended),
        bad_records=sum(entry.get("bad_records", 0) for entry in ended),
        upkept=len(passes),
        finished=True,
        hours=(*(one["hour"] for one in passes if one["hour"]), *checkpoint.manifest["skipped_hours"]),
        missing=tuple(checkpoint.manifest["missing"]),
        warm_start=checkpoint.manifest.get("warm_start"),
    )
    return trainer.adopt(progress)
