"""What the newest checkpoint of a run holds: of one process, or of shards."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from elasticrec.audit.counts import Counts
from elasticrec.audit.hours import Decided
from elasticrec.audit.part import DENSE_KIND, TABLE_KIND, PartFile, partition_of
from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST, read_manifest, verify_files
from elasticrec.run import Run


@dataclass(frozen=True)
class DenseSlice:
    """What a shard says of the dense values of a partition."""

    partition: int
    num_samples: int
    record: dict[str, Any]


@dataclass(frozen=True)
class Held:
    """A checkpoint at the end of a pass."""

    path: Path
    num_passes: int
    num_samples: int | None
    """Of all passes, where the manifest says so."""
    rows: Counts
    start: Path | None = None
    """The checkpoint of another run that this one began with,"""
    start_parts: list[Path] = field(default_factory=list)
    """and where its rows are."""
    slices: list[DenseSlice] | None = None
    """Of a run with shards."""
    passes: list[dict[str, Any]] | None = None
    """Of a run with shards: as its manifest has them."""
    decided: Decided | None = None
    """Of a run over hours."""
    missing: list[dict[str, Any]] = field(default_factory=list)
    """Units whose data was lost before it was read."""
    overflow: dict[int, dict[str, int]] = field(default_factory=dict)
    """By partition: what it did not take or keep because its server was full."""
    problems: list[str] = field(default_factory=list)


def newest(run: Run, job: Job) -> Held:
    """What the newest whole checkpoint of a run holds."""
    is_ps = job.train.mode == "ps"
    paths = sorted(path.parent for path in run.checkpoints.glob(f"{'ps' if is_ps else 'step'}-*/{MANIFEST}"))
    if not paths:
        raise ModelError(f"{run.path}: expected a checkpoint to audit, got none")
    return _of_shards(run, paths[-1], job) if is_ps else _of_one_process(paths[-1], job)


def read_table(parts: list[Path], num_partitions: int) -> tuple[Counts, list[str]]:
    """The rows of the part files of a table."""
    return _read_rows([PartFile(part, TABLE_KIND) for part in parts], num_partitions)


def _of_one_process(path: Path, job: Job) -> Held:
    manifest = read_manifest(path, "checkpoint")
    verify_files(path, manifest)
    progress = manifest["progress"]
    num_passes = max(progress["epoch"], progress["upkept"])
    # the end of an epoch was done before its evaluation, which then did not come to an end
    is_whole = not progress["open"] or progress["upkept"] > progress["epoch"]
    if not is_whole or num_passes == 0:
        raise ModelError(
            f"{path}: is of the middle of epoch {progress['epoch'] + 1}, expected the end of one; "
            "the same `elasticrec train` goes on to it"
        )
    rows, problems = read_table(sorted(path.glob("table/part-*")), job.sparse.partitions)
    start = manifest.get("warm_start")
    told = manifest.get("hours", [])
    passes = [entry for entry in told if "skipped" not in entry][:num_passes]
    return Held(
        path,
        num_passes,
        manifest["samples"],
        rows,
        start=Path(start) if start else None,
        start_parts=sorted(Path(start).glob("table/part-*")) if start else [],
        decided=Decided(passes, [entry for entry in told if "skipped" in entry]) if told else None,
        missing=manifest.get("missing", []),
        problems=problems,
    )


def _of_shards(run: Run, path: Path, job: Job) -> Held:
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
    problems += _cover(files, num_partitions)
    passes = manifest["passes"]
    hours = [one["hour"] for one in passes if one.get("hour")]
    return Held(
        path,
        len(passes),
        None,
        rows,
        slices=slices,
        passes=passes,
        decided=Decided(hours, _skipped_hours(run)) if hours else None,
        start=Path(start) if start else None,
        start_parts=sorted((run.path / "start").glob("rows-*")),
        overflow={int(key): value for file in files for key, value in file.meta.get("overflow", {}).items()},
        missing=manifest.get("missing", []),
        problems=problems,
    )


def _skipped_hours(run: Run) -> list[dict[str, Any]]:
    """Hours that were left out, also those after the checkpoint, which no pass is of."""
    lines = (run.path / "coordinator/journal.jsonl").read_bytes().split(b"\n")
    # the last line is cut off while it is written
    entries = [json.loads(line)["entry"] for line in lines[:-1]]
    return [entry for entry in entries if entry["kind"] == "hour"]


def _read_rows(files: list[PartFile], num_partitions: int) -> tuple[Counts, list[str]]:
    problems = _cover(files, num_partitions)
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
                problems.append(f"{where}: {len(strange):,} rows are of other partitions, such as sign {strange[0]}")
            parts.append((signs, rows["show"].astype(np.int64), rows["click"].astype(np.int64)))
    if not parts:
        return Counts.none(), problems
    # rows that are there twice are not added up: a problem was told of them, or their partition is there twice
    signs, shows, clicks = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    order = np.argsort(signs, kind="stable")
    return Counts(signs[order], shows[order], clicks[order]), problems


def _cover(files: Iterable[PartFile], num_partitions: int) -> list[str]:
    """Partitions that are not there exactly once."""
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
