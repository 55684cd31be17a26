"""The newest checkpoint of a run, in one process or with parameter servers."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elasticrec.audit.counts import Counts
from elasticrec.audit.hours import HourDecisions
from elasticrec.audit.part import DENSE_KIND, TABLE_KIND, PartFile, partition_of
from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST, read_manifest, verify_files
from elasticrec.run import Run


@dataclass(frozen=True)
class DenseSlice:
    """The dense values of a partition, as a shard wrote them."""

    partition: int
    num_samples: int
    record: dict[str, Any]


@dataclass(frozen=True)
class CheckpointContent:
    """A checkpoint at the end of a pass."""

    path: Path
    num_passes: int
    num_samples: int | None
    """Samples of all passes, if the manifest has them."""
    rows: Counts
    start: Path | None = None
    """The checkpoint of another run that this run started from."""
    start_parts: list[Path] = field(default_factory=list)
    """The part files with the rows of `start`."""
    slices: list[DenseSlice] | None = None
    """Dense slices of a run with parameter servers."""
    passes: list[dict[str, Any]] | None = None
    """Passes in the manifest of a run with parameter servers."""
    decisions: HourDecisions | None = None
    """Decisions of a run over hours."""
    missing: list[dict[str, Any]] = field(default_factory=list)
    """Units whose data was lost before it was read."""
    overflow: dict[int, dict[str, int]] = field(default_factory=dict)
    """For each full partition, the counts that its server did not keep."""
    problems: list[str] = field(default_factory=list)


def read_newest(run: Run, job: Job) -> CheckpointContent:
    """Read the newest complete checkpoint of a run."""
    is_ps = job.train.mode == "ps"
    paths = sorted(path.parent for path in run.checkpoints.glob(f"{'ps' if is_ps else 'step'}-*/{MANIFEST}"))
    if not paths:
        raise ModelError(f"{run.path}: expected a checkpoint to audit, got none")
    return _of_shards(run, paths[-1], job) if is_ps else _of_one_process(paths[-1], job)


def read_table(parts: list[Path], num_partitions: int) -> tuple[Counts, list[str]]:
    """Return the rows in the part files of a table, and their problems."""
    return _read_rows([PartFile(part, TABLE_KIND) for part in parts], num_partitions)


def _of_one_process(path: Path, job: Job) -> CheckpointContent:
    manifest = read_manifest(path, "checkpoint")
    verify_files(path, manifest)
    progress = manifest["progress"]
    num_passes = max(progress["epoch"], progress["upkept"])
    # Decay and eviction may have ended the epoch for the table although its evaluation did not finish.
    is_whole = not progress["open"] or progress["upkept"] > progress["epoch"]
    if not is_whole or num_passes == 0:
        raise ModelError(
            f"{path}: is from the middle of epoch {progress['epoch'] + 1}, expected the end of an epoch; "
            "run the same `elasticrec train` to finish it"
        )
    rows, problems = read_table(sorted(path.glob("table/part-*")), job.sparse.partitions)
    start = manifest.get("warm_start")
    entries = manifest.get("hours", [])
    passes = [entry for entry in entries if "skipped" not in entry][:num_passes]
    return CheckpointContent(
        path,
        num_passes,
        manifest["samples"],
        rows,
        start=Path(start) if start else None,
        start_parts=sorted(Path(start).glob("table/part-*")) if start else [],
        decisions=HourDecisions(passes, [entry for entry in entries if "skipped" in entry]) if entries else None,
        missing=manifest.get("missing", []),
        problems=problems,
    )


def _of_shards(run: Run, path: Path, job: Job) -> CheckpointContent:
    manifest = read_manifest(path, "ps checkpoint")
    verify_files(path, manifest)
    start = manifest.get("warm_start")
    num_partitions = job.sparse.partitions
    rows, problems = _read_rows(
        [PartFile(path / part["rows"], TABLE_KIND) for part in manifest["parts"]], num_partitions
    )
    slices = []
    files = [PartFile(path / part["dense"], DENSE_KIND) for part in manifest["parts"]]
    for file in files:
        for entry in file.entries:
            file.block(entry)
            if entry.aux[1] >= len(file.meta["records"]):
                raise ModelError(f"{file.path}: partition {entry.partition}: expected a record, got none")
            slices.append(DenseSlice(entry.partition, entry.num_rows, file.meta["records"][entry.aux[1]]))
    problems += _check_coverage(files, num_partitions)
    passes = manifest["passes"]
    hours = [one["hour"] for one in passes if one.get("hour")]
    return CheckpointContent(
        path,
        len(passes),
        None,
        rows,
        slices=slices,
        passes=passes,
        decisions=HourDecisions(hours, _skipped_hours(run)) if hours else None,
        start=Path(start) if start else None,
        start_parts=sorted((run.path / "start").glob("rows-*")),
        overflow={int(key): value for file in files for key, value in file.meta.get("overflow", {}).items()},
        missing=manifest.get("missing", []),
        problems=problems,
    )


def _skipped_hours(run: Run) -> list[dict[str, Any]]:
    """Return the hours that were skipped, including those after the checkpoint."""
    lines = (run.path / "coordinator/journal.jsonl").read_bytes().split(b"\n")
    # The last line may be incomplete, as the coordinator may be writing it.
    entries = [json.loads(line)["entry"] for line in lines[:-1]]
    return [entry for entry in entries if entry["kind"] == "hour"]


def _read_rows(files: list[PartFile], num_partitions: int) -> tuple[Counts, list[str]]:
    problems = _check_coverage(files, num_partitions)
    parts = []
    for file in files:
        for entry in file.entries:
            rows = file.rows(entry)
            signs = np.ascontiguousarray(rows["sign"])
            where = f"{file.path}: partition {entry.partition}"
            if (signs[1:] <= signs[:-1]).any():
                problems.append(f"{where}: expected signs in increasing order, each once")
            strange = signs[partition_of(signs, num_partitions) != entry.partition]
            if len(strange):
                problems.append(f"{where}: {len(strange):,} rows belong to other partitions, such as sign {strange[0]}")
            parts.append((signs, rows["show"].astype(np.int64), rows["click"].astype(np.int64)))
    if not parts:
        return Counts.none(), problems
    # Repeated rows are not added up: they are reported as problems above.
    signs, shows, clicks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(signs, kind="stable")
    return Counts(signs[order], shows[order], clicks[order]), problems


def _check_coverage(files: Iterable[PartFile], num_partitions: int) -> list[str]:
    """Return a problem for each partition that does not occur exactly once."""
    times = np.zeros(num_partitions, np.int64)
    names = set()
    for file in files:
        names.add(file.path.suffix or file.path.name)
        for entry in file.entries:
            if entry.partition < num_partitions:
                times[entry.partition] += 1
    kind = "/".join(sorted(names))
    return [
        f"partition {at}: expected once in the files `{kind}`, got {times[at]} times"
        for at in np.flatnonzero(times != 1)
    ]
