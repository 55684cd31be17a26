"""The audit of a run: what its files add up to, beside what its newest checkpoint holds."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from elasticrec.audit.counts import Counts, Tally
from elasticrec.audit.files import FileCounter, with_names
from elasticrec.audit.held import Held, newest, read_table
from elasticrec.audit.hours import Place, epochs, files_of, walk
from elasticrec.audit.overflow import Overflow
from elasticrec.audit.rows import ExpectedRows
from elasticrec.audit.units import PassUnits, read_pass
from elasticrec.config import Job, match_files
from elasticrec.errors import ModelError
from elasticrec.run import Run

# Rows that differ are shown up to here, and other problems as well.
_SHOWN = 20


@dataclass
class Audit:
    """What was found."""

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
    """The first rows that differ."""

    @property
    def differs(self) -> bool:
        """Whether anything does."""
        return bool(self.problems or self.missing or self.extra or self.wrong)

    def lines(self) -> list[str]:
        """What is told: of an audit without a difference one line, unless something is not certain."""
        shown = self.problems[:_SHOWN]
        if len(self.problems) > len(shown):
            shown.append(f"and {len(self.problems) - len(shown):,} more of this kind")
        shown += self.rows
        num_rows = self.missing + self.extra + self.wrong
        if num_rows > len(self.rows):
            shown.append(f"and {num_rows - len(self.rows):,} rows more")
        return [*shown, *self.notes, self._summary()]

    def _summary(self) -> str:
        result = "nothing differs"
        if self.differs:
            result = f"{self.missing:,} rows missing, {self.extra:,} rows too many, {self.wrong:,} wrong counts"
            result += f", {len(self.problems):,} other differences" if self.problems else ""
        return (
            f"audited {self.path}: {self.num_units:,} units, {self.num_passes:,} pass{'es' * (self.num_passes != 1)}, "
            f"{self.num_samples:,} samples, {self.num_signs:,} signs: {result}"
        )


def audit_run(run: Run) -> Audit:
    """Recount a run and compare."""
    job = run.job()
    held = newest(run, job)
    passes = _without_lost(held, [read_pass(run.units, number) for number in range(held.num_passes)])
    places, files, problems = _places(job, held, passes)
    problems = [*held.problems, *problems]
    end = 0
    for one, expected_files in zip(passes, files, strict=True):
        one.check_files()
        problems += one.problems(end, expected_files, job.data.format)
        end += len(one.units)
    first = next((path for one in files for path in one), None)
    if first is None:
        raise ModelError(f"{held.path}: expected at least one pass over some file, got none")
    counter = FileCounter(with_names(job, first))
    expected, num_samples = _recount(job, held, list(zip(passes, places, strict=True)), counter)
    for one in passes:
        # they may have been written to while they were read
        one.check_files()
    if held.num_samples is not None and held.num_samples != num_samples:
        problems.append(f"samples: expected {num_samples:,}, got {held.num_samples:,} in the manifest")
    problems += _compare_shards(held, passes, num_samples)
    notes = counter.odd.lines()
    if held.missing:
        size = sum(entry["bytes"] for entry in held.missing)
        notes.append(
            f"{len(held.missing):,} units, {size:,} bytes, were lost before they were read and are not counted"
        )
    if held.start is not None:
        notes.append(f"the counts begin with those of {held.start}")
    if any(dense.record["watermark"] < end for dense in held.slices or []):
        notes.append(f"{held.path}: is not of the end of a pass: a run at work is audited when it has come to its end")
    audit = Audit(run.path, end, len(passes), num_samples, len(expected), problems, notes)
    overflow = Overflow(held.overflow, job.sparse)
    got = held.rows
    if overflow.partitions:
        expected, got = overflow.leave_out(expected, got)
        audit.problems += overflow.problems
        audit.notes.append(overflow.note())
    _compare_rows(audit, expected, got)
    if audit.differs and counter.num_edges:
        audit.notes.append(f"not certain: {counter.num_edges:,} dense values lie on the edge of a bucket")
    return audit


def _without_lost(held: Held, passes: list[PassUnits]) -> list[PassUnits]:
    """The passes without files that were gone before anything of them was read."""
    missing = {entry["unit"]: entry for entry in held.missing}
    found = []
    for one in passes:
        lost = {unit.path for unit in one.units if unit.id in missing}
        for unit in one.units:
            if unit.path in lost and (unit.id not in missing or missing[unit.id]["batches"]):
                raise ModelError(
                    f"{unit.path}: a part of it was trained before it was lost, in pass {one.number}: what that held "
                    "cannot be recounted"
                )
        found.append(one.without(lost))
    return found


def _places(job: Job, held: Held, passes: list[PassUnits]) -> tuple[list[Place], list[list[Path]], list[str]]:
    """Of each pass its place in time and the files that it must have; and what is wrong with the passes."""
    if held.decided is None:
        lost = {path for one in passes for path in one.lost}
        files = [path.absolute() for path in match_files(job, "train")]
        return epochs(len(passes)), [[path for path in files if path not in lost] for _ in passes], []
    if len(held.decided.passes) != len(passes):
        raise ModelError(f"{held.path}: expected an hour for each of {len(passes)} passes")
    places, problems = walk(job, held.decided)
    lost = {path for one in passes for path in one.lost}
    return places, files_of(job, held.decided, passes, lost), problems


def _recount(job: Job, held: Held, passes: list[tuple[PassUnits, Place]], counter: FileCounter) -> tuple[Counts, int]:
    """The rows and samples that the files of all passes add up to."""
    start = Counts.none()
    if held.start is not None:
        start, problems = read_table(held.start_parts, job.sparse.partitions)
        if problems:
            raise ModelError(f"{held.start}: {problems[0]}")
    rows, num_samples = ExpectedRows.start(start), 0
    before: tuple[tuple[Path, ...], int, Counts] | None = None
    for one, place in passes:
        if before is None or before[0] != one.files:
            tally = Tally()
            for path in one.files:
                counter.count(path, tally)
            before = one.files, tally.num_samples, tally.counts()
        num_samples += before[1]
        rows = rows.after_pass(one.number, before[2], job.sparse, place)
    return rows.counts, num_samples


def _compare_shards(held: Held, passes: list[PassUnits], num_samples: int) -> list[str]:
    """What differs in the passes of a manifest, and in the records and samples of partitions."""
    problems = []
    end = sum(len(one.units) for one in passes)
    first = 0
    for said, one in zip(held.passes or [], passes, strict=held.passes is not None):
        got = (said["number"], said["first_unit"], said["end_unit"], said["sha256"])
        if got != (one.number, first, first + len(one.units), one.sha256):
            problems.append(f"pass {one.number}: its units are not those of the manifest of {held.path}")
        first += len(one.units)
    for dense in held.slices or []:
        record = dense.record
        if dense.num_samples != num_samples:
            problems.append(
                f"partition {dense.partition}: expected {num_samples:,} samples applied to its dense values, "
                f"got {dense.num_samples:,}"
            )
        whole = {"watermark": end, "complete": [], "open": {}, "boundaries": len(passes)}
        if record != whole:
            problems.append(
                f"partition {dense.partition}: expected units up to {end} complete, nothing open and the ends of "
                f"{len(passes)} passes, got units up to {record['watermark']}, {len(record['complete'])} behind them, "
                f"{len(record['open'])} open and {record['boundaries']} ends"
            )
    return problems


def _compare_rows(audit: Audit, expected: Counts, got: Counts) -> None:
    """Count the rows that differ and describe the first of them."""
    place = np.searchsorted(got.signs, expected.signs)
    place_inside = np.minimum(place, max(len(got) - 1, 0))
    is_there = got.signs[place_inside] == expected.signs if len(got) else np.zeros(len(expected), np.bool_)
    is_known = np.zeros(len(got), np.bool_)
    is_known[place[is_there]] = True
    same = np.zeros(len(expected), np.bool_)
    at = place[is_there]
    same[is_there] = (got.shows[at] == expected.shows[is_there]) & (got.clicks[at] == expected.clicks[is_there])
    audit.missing = int((~is_there).sum())
    audit.wrong = int((is_there & ~same).sum())
    audit.extra = int((~is_known).sum())
    lines: list[tuple[int, str]] = []
    for row in np.flatnonzero(~same)[:_SHOWN]:
        sign = int(expected.signs[row])
        found = "no row"
        if is_there[row]:
            found = f"{got.shows[place[row]]} and {got.clicks[place[row]]}"
        lines.append(
            (sign, f"sign {sign}: expected show {expected.shows[row]} and click {expected.clicks[row]}, got {found}")
        )
    for row in np.flatnonzero(~is_known)[:_SHOWN]:
        sign = int(got.signs[row])
        lines.append((sign, f"sign {sign}: expected no row, got show {got.shows[row]} and click {got.clicks[row]}"))
    audit.rows = [line for _, line in sorted(lines)[:_SHOWN]]
