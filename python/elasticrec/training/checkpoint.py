"""Checkpoints: everything that a training needs to resume with the same bits.

runs/<name>/checkpoints/step-000000001200/
    table/part-00000   the table's rows with their optimizer state
    dense.bin          the network's flat vector and its optimizer's vectors, one after the other
    metrics.npz        the sums behind the running metrics
    manifest.json      written last
"""

import contextlib
import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from elasticrec.config import Job, meaning_keys
from elasticrec.durable import write_synced
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST, FileEntry, read_manifest, verify_files, write_manifest
from elasticrec.run import Run
from elasticrec.training.dense import FlatParameters
from elasticrec.training.embedding import Embedding
from elasticrec.training.metrics import Metrics, MetricSums

_KIND = "checkpoint"
_TABLE = "table/part-00000"
_DENSE = "dense.bin"
_METRICS = "metrics.npz"


@dataclass(frozen=True)
class Progress:
    """Position of a training: all units below `unit` are complete, and the first `batches` of `unit`."""

    epoch: int
    unit: int
    batches: int
    steps: int
    samples: int
    records: int
    bad_records: int
    non_finite: int = 0
    """Batches with a non-finite gradient: counted, not applied."""
    evicted: int = 0
    """Rows evicted at the ends of epochs."""
    upkept: int = 0
    """Epochs after which decay and eviction ran."""
    finished: bool = False
    """Whether all epochs of the job are trained."""
    evaluated: int = 0
    """Steps at the last evaluation."""
    warm_start: str | None = None
    """Path of the checkpoint of another run that this run started from."""
    hours: tuple[dict[str, Any], ...] = ()
    """Decisions of `data.hours` in order: hours that are trained and hours that are skipped."""
    missing: tuple[dict[str, Any], ...] = ()
    """Units whose data was lost."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    manifest: dict[str, Any]

    @property
    def progress(self) -> Progress:
        """Position of the training."""
        record = self.manifest["progress"]
        opened = record["open"]
        return Progress(
            epoch=record["epoch"],
            unit=record["watermark"],
            batches=opened[0]["batches"] if opened else 0,
            steps=self.manifest["steps"],
            samples=self.manifest["samples"],
            records=self.manifest["records"],
            bad_records=self.manifest["bad_records"],
            non_finite=self.manifest["non_finite"],
            evicted=self.manifest["evicted"],
            upkept=record["upkept"],
            finished=record["finished"],
            evaluated=self.manifest.get("evaluated", 0),
            warm_start=self.manifest.get("warm_start"),
            hours=tuple(self.manifest.get("hours", ())),
            missing=tuple(self.manifest.get("missing", ())),
        )

    @property
    def evaluation(self) -> list[Metrics] | None:
        """Metrics of each label at the last evaluation before the checkpoint."""
        metrics = self.manifest["metrics"]["eval"]
        return None if metrics is None else [Metrics.from_dict(one) for one in metrics]

    @property
    def rows(self) -> list[Path]:
        """Part files of the table."""
        return [self.path / _TABLE]

    @property
    def end_of_epoch(self) -> int | None:
        """The epoch, counted from 0, at whose end it was saved, or None."""
        progress = self.progress
        return progress.epoch - 1 if progress.epoch and not progress.batches else None

    @property
    def own_evaluation(self) -> list[Metrics] | None:
        """Metrics of an evaluation of exactly these parameters, or None."""
        progress = self.progress
        return self.evaluation if progress.steps and progress.evaluated == progress.steps else None

    @property
    def name(self) -> str:
        """Name such as `step-000000001200`; a second checkpoint of the same step ends with `.1`."""
        return self.path.name


@dataclass
class State:
    """The trainable state that a checkpoint saves and restores."""

    embedding: Embedding
    dense: FlatParameters
    sums: list[MetricSums]


def save(run: Run, job: Job, state: State, progress: Progress, evaluation: list[Metrics] | None = None) -> Checkpoint:
    """Write a checkpoint atomically, and remove the checkpoints that `train.checkpoint` does not keep."""
    path = _new_path(run, progress.steps)
    if path.exists():
        # Left by a crash while saving the same step.
        shutil.rmtree(path)
    (path / "table").mkdir(parents=True)
    try:
        files, dense = _write_files(path, state)
        body = {"run": run.name, "job": meaning_keys(job), **_body(state, progress, evaluation), "dense": dense}
        write_manifest(path, _KIND, body, files)
    except BaseException:
        # Free the space, in case the disk is full.
        _remove(path)
        raise
    _drop_old(run, job)
    return open_checkpoint(path)


def _write_files(path: Path, state: State) -> tuple[dict[str, FileEntry], dict[str, Any]]:
    """Write all files but the manifest. Return the files and the manifest's section `dense`."""
    steps, vectors = state.dense.state()
    files = {
        _TABLE: FileEntry(*state.embedding.table.snapshot(str(path / _TABLE))),
        _DENSE: FileEntry(*write_synced(path / _DENSE, b"".join(vector.tobytes() for vector in vectors.values()))),
        _METRICS: FileEntry(*write_synced(path / _METRICS, _metrics_bytes(state.sums))),
    }
    dense = {
        "file": _DENSE,
        "optimizer": state.dense.kind,
        "steps": steps,
        "length": len(state.dense.values),
        "vectors": list(vectors),
        "tensors": [tensor.to_dict() for tensor in state.dense.tensors],
    }
    return files, dense


def _body(state: State, progress: Progress, evaluation: list[Metrics] | None) -> dict[str, Any]:
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "steps": progress.steps,
        "samples": progress.samples,
        "records": progress.records,
        "bad_records": progress.bad_records,
        "non_finite": progress.non_finite,
        "evicted": progress.evicted,
        "rows": len(state.embedding.table),
        "progress": {
            "epoch": progress.epoch,
            "watermark": progress.unit,
            "complete": [],
            "open": [{"unit": progress.unit, "batches": progress.batches}] if progress.batches else [],
            "upkept": progress.upkept,
            "finished": progress.finished,
        },
        "evaluated": progress.evaluated,
        "warm_start": progress.warm_start,
        "hours": list(progress.hours),
        "missing": list(progress.missing),
        "metrics": {
            "train": [sums.result().to_dict() for sums in state.sums],
            "eval": None if evaluation is None else [metrics.to_dict() for metrics in evaluation],
        },
    }


def list_checkpoints(run: Run) -> list[Checkpoint]:
    """Return the complete checkpoints of a run, oldest first."""
    return [open_checkpoint(path) for path in list_paths(run)]


def latest(run: Run) -> Checkpoint | None:
    """Return the newest complete checkpoint, or None."""
    paths = list_paths(run)
    return open_checkpoint(paths[-1]) if paths else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint by its directory and check its manifest."""
    return Checkpoint(path, read_manifest(path, _KIND))


def restore(
    checkpoint: Checkpoint, job: Job, state: State, *, equal: Callable[[Job], dict[str, Any]] | None = None
) -> None:
    """Verify the files of a checkpoint and load them into a new model and table.

    The checkpoint's job must equal `job` in every key that `equal` returns, by default the keys of `meaning_keys`.
    """
    restore_dense(checkpoint, job, state.dense, equal=equal)
    state.embedding.table.load([str(path) for path in checkpoint.rows])
    with np.load(checkpoint.path / _METRICS) as arrays:
        for label, sums in enumerate(state.sums):
            sums.restore({key: arrays[f"{label}.{key}"] for key in ("used", "buckets", "sums")})


def restore_dense(
    checkpoint: Checkpoint, job: Job, dense: FlatParameters, *, equal: Callable[[Job], dict[str, Any]] | None = None
) -> None:
    """Verify the files of a checkpoint and load its network."""
    path, manifest = checkpoint.path, checkpoint.manifest
    check_job(checkpoint, (equal or meaning_keys)(job))
    verify_files(path, manifest)
    saved = manifest["dense"]
    expected = [tensor.to_dict() for tensor in dense.tensors]
    if saved["tensors"] != expected or saved["optimizer"] != dense.kind:
        raise ModelError(f"{path}: belongs to another model: {_difference(expected, saved, dense.kind)}")
    flat = np.fromfile(path / _DENSE, np.float32).reshape(len(saved["vectors"]), saved["length"])
    dense.restore(saved["steps"], dict(zip(saved["vectors"], flat, strict=True)))


def check_job(checkpoint: Checkpoint, ours: dict[str, Any]) -> None:
    """Reject a checkpoint of a job whose values differ from `ours`."""
    theirs = checkpoint.manifest["job"]
    # Keys that only one side has were added or removed by another release.
    changed = sorted(key for key, value in theirs.items() if key in ours and ours[key] != value)
    if changed:
        keys = ", ".join(f"`{key}`" for key in changed)
        raise ModelError(f"{checkpoint.path}: belongs to another job, which differs in {keys}")


def _difference(expected: list[dict[str, Any]], dense: dict[str, Any], optimizer: str) -> str:
    if dense["optimizer"] != optimizer:
        return f"dense optimizer: expected {optimizer}, got {dense['optimizer']}"
    ours = {tensor["name"]: tensor["shape"] for tensor in expected}
    theirs = {tensor["name"]: tensor["shape"] for tensor in dense["tensors"]}
    for name in ours | theirs:
        if ours.get(name) != theirs.get(name):
            return f"`{name}`: expected {ours.get(name, 'none')}, got {theirs.get(name, 'none')}"
    return "the order of the tensors"


def _metrics_bytes(all_sums: list[MetricSums]) -> bytes:
    arrays = {f"{label}.{key}": array for label, sums in enumerate(all_sums) for key, array in sums.state().items()}
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def list_paths(run: Run) -> list[Path]:
    """Return the directories of the complete checkpoints, oldest first."""
    return sorted(path.parent for path in run.checkpoints.glob(f"step-*/{MANIFEST}"))


def _new_path(run: Run, steps: int) -> Path:
    """Return the directory of the next checkpoint; a complete checkpoint is never overwritten.

    The end of an epoch has the same step as its last batch; the second checkpoint of a step sorts after the first.
    """
    first = path = run.checkpoints / f"step-{steps:012d}"
    number = 1
    while (path / MANIFEST).exists():
        path = first.with_name(f"{first.name}.{number}")
        number += 1
    return path


def best(run: Run, job: Job) -> Checkpoint | None:
    """Return the best evaluated checkpoint by `train.checkpoint.keep_best` (default AUC), or None.

    The best follows from the manifests alone; with `keep_best` it is never removed.
    """
    return _best(_readable(run), job)


def newest_or_best(run: Run, *, is_best: bool, hint: str = "") -> Checkpoint:
    """Return the newest or the best checkpoint; raise an error that ends with `hint` if there is none."""
    found = best(run, run.job()) if is_best else latest(run)
    if found is None:
        what = "a checkpoint that was evaluated" if is_best else "a checkpoint"
        raise ModelError(f"{run.path}: expected {what}, got none{hint}")
    return found


def best_value(evaluation: list[Metrics] | None, job: Job) -> float | None:
    """Return the value that `best` compares; higher is better."""
    if evaluation is None:
        return None
    settings = job.train.checkpoint
    metric = settings.keep_best or "auc"
    label = job.data.labels.index(settings.best_label) if settings.best_label else 0
    value = evaluation[label].value(metric)
    lowest = (settings.best_is or ("lowest" if metric == "log_loss" else "highest")) == "lowest"
    return -value if lowest and value is not None else value


def _best(found: list[Checkpoint], job: Job) -> Checkpoint | None:
    measured = [(value, one) for one in found if (value := best_value(one.own_evaluation, job)) is not None]
    # Of equal values the first wins, because it needed the least training.
    return max(measured, key=lambda item: item[0])[1] if measured else None


def _readable(run: Run) -> list[Checkpoint]:
    """Return the complete checkpoints with valid manifests, oldest first."""
    found = []
    for path in list_paths(run):
        with contextlib.suppress(ModelError):
            found.append(open_checkpoint(path))
    return found


def _drop_old(run: Run, job: Job) -> None:
    """Remove checkpoints that are not kept, and incomplete ones left by crashes."""
    settings = job.train.checkpoint
    paths = list_paths(run)
    kept = set(paths[-settings.keep :])
    if settings.keep_best or settings.keep_epochs:
        found = _readable(run)
        # Keep unreadable checkpoints: the user decides about them.
        kept |= set(paths) - {one.path for one in found}
        kept |= {one.path for one in found if one.end_of_epoch is not None and settings.keeps_epoch(one.end_of_epoch)}
        if settings.keep_best and (chosen := _best(found, job)):
            kept.add(chosen.path)
    for path in run.checkpoints.glob("step-*"):
        if path not in kept:
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a checkpoint; the manifest goes first, so that a crash leaves no damaged checkpoint."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)
