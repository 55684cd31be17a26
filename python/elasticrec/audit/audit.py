"""The audit of a run: counts from its data files, compared with its newest checkpoint."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from elasticrec.audit.checkpoint import CheckpointContent, read_newest, read_table
from elasticrec.audit.counts import Counts, Tally
from elasticrec.audit.expected_rows import ExpectedRows
from elasticrec.audit.file_counter import FileCounter, with_names
from elasticrec.audit.hours import PassTime, check_hours, epoch_times, files_of
from elasticrec.audit.overflow import Overflow
from elasticrec.audit.units import PassUnits, read_pass
from elasticrec.config import Job, match_files
from elasticrec.errors import ModelError
from elasticrec.run import Run

# Number of different rows, and of other problems, that are shown.
_SHOWN = 20


@dataclass
class Audit:
    """The result of an audit."""

    path: Path
    num_units: int
    num_passes: int
    num_samples: int
    num_signs: int
    problems: list[str]
    notes: list[str]
    missing: int = 0
    extra: int = 0
    wrong: int = 0
    rows: list[str] = field(default_factory=list)
    """Descriptions of the first rows that differ."""

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.problems or self.missing or self.extra or self.wrong)

    def lines(self) -> list[str]:
        """Return the report: one line if nothing differs and everything is certain."""
        shown = self.problems[:_SHOWN]
        if len(self.problems) > len(shown):
            shown.append(f"and {len(self.problems) - len(shown):,} more problems")
        shown += self.rows
        num_rows = self.missing + self.extra + self.wrong
        if num_rows > len(self.rows):
            shown.append(f"and {num_rows - len(self.rows):,} more rows")
        return [*shown, *self.notes, self._summary()]

    def _summary(self) -> str:
        result = "nothing differs"
        if self.differs:
            result = f"{self.missing:,} missing rows, {self.extra:,} extra rows, {self.wrong:,} wrong counts"
            result += f", {len(self.problems):,} other differences" if self.problems else ""
        return (
            f"audited {self.path}: {self.num_units:,} units, {self.num_passes:,} pass{'es' * (self.num_passes != 1)}, "
            f"{self.num_samples:,} samples, {self.num_signs:,} signs: {result}"
        )


def audit_run(run: Run) -> Audit:
    """Count a run again from its data files and compare the counts with its newest checkpoint."""
    job = run.job()
    checkpoint = read_newest(run, job)
    passes = _exclude_lost(checkpoint, [read_pass(run.units, number) for number in range(checkpoint.num_passes)])
    times, files, problems = _schedule(job, checkpoint, passes)
    problems = [*checkpoint.problems, *problems]
    end = 0
    for one, expected_files in zip(passes, files, strict=True):
        one.check_files()
        problems += one.problems(end, expected_files, job.data.format)
        end += len(one.units)
    first = next((path for one in files for path in one), None)
    if first is None:
        raise ModelError(f"{checkpoint.path}: expected a pass over at least one file, got none")
    counter = FileCounter(with_names(job, first))
    expected, num_samples = _recount(job, checkpoint, list(zip(passes, times, strict=True)), counter)
    for one in passes:
        # The files may have changed while they were counted.
        one.check_files()
    if checkpoint.num_samples is not None and checkpoint.num_samples != num_samples:
        problems.append(f"samples: expected {num_samples:,}, got {checkpoint.num_samples:,} in the manifest")
    problems += _compare_shards(checkpoint, passes, num_samples)
    notes = counter.odd.lines()
    if checkpoint.missing:
        size = sum(entry["bytes"] for entry in checkpoint.missing)
        notes.append(
            f"{len(checkpoint.missing):,} units, {size:,} bytes, were lost before they were read and are not counted"
        )
    if checkpoint.start is not None:
        notes.append(f"the counts include those of {checkpoint.start}")
    if any(dense.record["watermark"] < end for dense in checkpoint.slices or []):
        notes.append(f"{checkpoint.path}: not from the end of a pass; audit the run after it has ended")
    audit = Audit(run.path, end, len(passes), num_samples, len(expected), problems, notes)
    overflow = Overflow(checkpoint.overflow, job.sparse)
    got = checkpoint.rows
    if overflow.partitions:
        expected, got = overflow.leave_out(expected, got)
        audit.problems += overflow.problems
        audit.notes.append(overflow.note())
    _compare_rows(audit, expected, got)
    if audit.differs and counter.num_edges:
        audit.notes.append(f"not certain: {counter.num_edges:,} dense values are at the edge of a bucket")
    return audit


def _exclude_lost(checkpoint: CheckpointContent, passes: list[PassUnits]) -> list[PassUnits]:
    """Return the passes without the files that were lost before any of their samples was read."""
    missing = {entry["unit"]: entry for entry in checkpoint.missing}
    result = []
    for one in passes:
        lost = {unit.path for unit in one.units if unit.id in missing}
        for unit in one.units:
            if unit.path in lost and (unit.id not in missing or missing[unit.id]["batches"]):
                raise ModelError(
                    f"{unit.path}: was lost after a part of it was trained, in pass {one.number}; "
                    "that part cannot be counted again"
                )
        result.append(one.without(lost))
    return result


def _schedule(
    job: Job, checkpoint: CheckpointContent, passes: list[PassUnits]
) -> tuple[list[PassTime], list[list[Path]], list[str]]:
    """Return the data time and the expected files of each pass, and the problems of the passes."""
    if checkpoint.decisions is None:
        lost = {path for one in passes for path in one.lost}
        files = [path.absolute() for path in match_files(job, "train")]
        return epoch_times(len(passes)), [[path for path in files if path not in lost] for _ in passes], []
    if len(checkpoint.decisions.passes) != len(passes):
        raise ModelError(f"{checkpoint.path}: expected an hour for each of {len(passes)} passes")
    times, problems = check_hours(job, checkpoint.decisions)
    lost = {path for one in passes for path in one.lost}
    return times, files_of(job, checkpoint.decisions, passes, lost), problems


def _recount(
    job: Job, checkpoint: CheckpointContent, passes: list[tuple[PassUnits, PassTime]], counter: FileCounter
) -> tuple[Counts, int]:
    """Return the expected rows and number of samples after all passes over their files."""
    start = Counts.none()
    if checkpoint.start is not None:
        start, problems = read_table(checkpoint.start_parts, job.sparse.partitions)
        if problems:
            raise ModelError(f"{checkpoint.start}: {problems[0]}")
    rows, num_samples = ExpectedRows.start(start), 0
    before: tuple[tuple[Path, ...], int, Counts] | None = None
    for one, time in passes:
        if before is None or before[0] != one.files:
            tally = Tally()
            for path in one.files:
                counter.count(path, tally)
            before = one.files, tally.num_samples, tally.counts()
        num_samples += before[1]
        rows = rows.after_pass(one.number, before[2], job.sparse, time)
    return rows.counts, num_samples


def _compare_shards(checkpoint: CheckpointContent, passes: list[PassUnits], num_samples: int) -> list[str]:
    """Compare the passes of the manifest, and the records and samples of each partition."""
    problems = []
    end = sum(len(one.units) for one in passes)
    first = 0
    for entry, one in zip(checkpoint.passes or [], passes, strict=checkpoint.passes is not None):
        got = (entry["number"], entry["first_unit"], entry["end_unit"], entry["sha256"])
        if got != (one.number, first, first + len(one.units), one.sha256):
            problems.append(f"pass {one.number}: its units differ from the manifest of {checkpoint.path}")
        first += len(one.units)
    for dense in checkpoint.slices or []:
        record = dense.record
        if dense.num_samples != num_samples:
            problems.append(
                f"partition {dense.partition}: expected {num_samples:,} samples in its dense slice, "
                f"got {dense.num_samples:,}"
            )
        whole = {"watermark": end, "complete": [], "open": {}, "boundaries": len(passes)}
        if record != whole:
            problems.append(
                f"partition {dense.partition}: expected all units below {end} complete, no others and {len(passes)} "
                f"ended passes, got all units below {record['watermark']} complete, then {len(record['complete'])} "
                f"complete and {len(record['open'])} open units, and {record['boundaries']} ended passes"
            )
    return problems


def _compare_rows(audit: Audit, expected: Counts, got: Counts) -> None:
    """Count the rows that differ and describe the first of them."""
    position = np.searchsorted(got.signs, expected.signs)
    clipped = np.minimum(position, max(len(got) - 1, 0))
    is_found = got.signs[clipped] == expected.signs if len(got) else np.zeros(len(expected), np.bool_)
    is_expected = np.zeros(len(got), np.bool_)
    is_expected[position[is_found]] = True
    same = np.zeros(len(expected), np.bool_)
    at = position[is_found]
    same[is_found] = (got.shows[at] == expected.shows[is_found]) & (got.clicks[at] == expected.clicks[is_found])
    audit.missing = int((~is_found).sum())
    audit.wrong = int((is_found & ~same).sum())
    audit.extra = int((~is_expected).sum())
    lines: list[tuple[int, str]] = []
    for row in np.flatnonzero(~same)[:_SHOWN]:
        sign = int(expected.signs[row])
        found = "no row"
        if is_found[row]:
            found = f"{got.shows[position[row]]} and {got.clicks[position[row]]}"
        lines.append(
            (sign, f"sign {sign}: expected show {expected.shows[row]} and click {expected.clicks[row]}, got {found}")
        )
    for row in np.flatnonzero(~is_expected)[:_SHOWN]:
        sign = int(got.signs[row])
        lines.append((sign, f"sign {sign}: expected no row, got show {got.shows[row]} and click {got.clicks[row]}"))
    audit.rows = [line for _, line in sorted(lines)[:_SHOWN]]
