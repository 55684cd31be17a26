"""`elasticrec train` with parameter servers: all roles on this machine, one progress line, one checkpoint at last."""

from contextlib import closing
from typing import Any

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.coordinator.checkpoints import Checkpoint, open_checkpoint
from elasticrec.data.header import with_names
from elasticrec.errors import ModelError
from elasticrec.launch.local import LocalLauncher
from elasticrec.roles.coordinator import prepare
from elasticrec.roles.start import read_start
from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress
from elasticrec.training.loop import Trainer
from elasticrec.training.metrics import MetricSums
from elasticrec.training.read import refuse_bad
from elasticrec.training.report import Reporter, Summary
from elasticrec.training.stop import stopping

# A share of bad records says something only of so many.
_MIN_RECORDS_FOR_RATIO = 10_000


def train_with_servers(job: Job, *, fresh: bool = False) -> Summary:
    """Train a job with trainers and parameter servers as processes of this machine; an unfinished run goes on."""
    job = with_names(job)
    with Run.of(job).locked():
        if fresh:
            Run.of(job).discard()
        run = Run.create(job)
        prepare(job, run)
        reporter = Reporter(run.metrics_path, job.train.print_every_s)
        with closing(reporter):
            with LocalLauncher(job, run, reporter.say) as launcher:

                def request_stop() -> None:
                    launcher.stop_requested = True

                with stopping(request_stop):
                    is_finished = launcher.wait(lambda status: _report(job, status, reporter))
            if not is_finished:
                reporter.say("stopped and saved; the same command goes on from there")
                raise KeyboardInterrupt
            return _collect(job, run, reporter)


def _report(job: Job, status: dict[str, Any], reporter: Reporter) -> None:
    """Tell how it goes, and end a run whose data is bad."""
    text, record = _line(job, status)
    reporter.progress(text, record)
    if record.get("records", 0) >= _MIN_RECORDS_FOR_RATIO:
        refuse_bad(job, record["records"], record["bad_records"], "data.train")


def _line(job: Job, status: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """One line for all roles, and the same for the metrics file."""
    figures: dict[str, Any] = {}
    for shard in status["shards"]:
        is_sum = ("_0", "records")
        figures |= {key: value for key, value in shard["figures"].items() if key.endswith(is_sum)}
    rows = sum(shard["figures"].get("num_rows", 0) for shard in status["shards"])
    alive = [trainer for trainer in status["trainers"] if trainer["state"] == "alive"]
    serving = [shard for shard in status["shards"] if shard["state"] == "serving"]
    units, passes = status["units"], status["passes"]
    text = (
        f"pass {passes['begun']}/{passes['planned']} {figures.get('samples_0', 0):>12,} samples "
        f"auc {figures.get('auc_0', 0):.4f} loss {figures.get('log_loss_0', 0):.4f} rows {rows:,} "
        f"| units {units['complete']} of {units['planned']}, trainers {len(alive)}/{job.train.trainers}, "
        f"servers {len(serving)}/{len(status['shards'])}"
    )
    record = {"event": "progress", "rows": rows, "units": units, "passes": passes, **figures}
    return text, record


def newest_checkpoint(run: Run, num_partitions: int) -> Checkpoint:
    """The last checkpoint that the shards wrote."""
    paths = sorted(path.parent for path in run.checkpoints.glob("ps-*/manifest.json"))
    if not paths:
        raise ModelError(f"{run.path}: expected a checkpoint of its servers, got none")
    return open_checkpoint(paths[-1], num_partitions)


def _collect(job: Job, run: Run, reporter: Reporter) -> Summary:
    """The shards' last checkpoint as one that every other command reads, evaluated."""
    start = read_start(run.path)
    everything = range(start.num_partitions)
    checkpoint = newest_checkpoint(run, start.num_partitions)
    parts = checkpoint.parts(everything)
    trainer = Trainer(job, run, reporter)
    trainer.state.embedding.table.load([part["rows"] for part in parts])
    vectors, steps, (_, sums), samples = _core.read_dense_parts(
        start.shard_spec(everything), [part["dense"] for part in parts]
    )
    trainer.state.dense.restore(steps, dict(zip(trainer.state.dense.vectors, vectors, strict=True)))
    trainer.state.sums = MetricSums.of_flat(sums)
    passes = checkpoint.manifest["passes"]
    records, bad_records = int(sums[-2]), int(sums[-1])
    refuse_bad(job, records, bad_records, "data.train")
    progress = Progress(
        epoch=len(passes),
        unit=passes[-1]["end_unit"],
        batches=0,
        steps=steps,
        samples=samples[0],
        records=records * len(passes),
        bad_records=bad_records * len(passes),
        upkept=len(passes),
        finished=True,
    )
    return trainer.adopt(progress)
