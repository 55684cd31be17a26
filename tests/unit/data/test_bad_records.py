"""Bad records in every format are counted; the first few are shown with file and line, in file order."""

import json
import math
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticrec import _core
from elasticrec.config import Job, parse_job
from elasticrec.data.batches import open_batches
from elasticrec.data.convert.input_data import open_input
from elasticrec.data.convert.rows import open_rows
from elasticrec.data.reader import SHOWN_BAD
from elasticrec.data.units import UnitSplit, plan_units
from elasticrec.errors import SampleError
from elasticrec.training.loop import train_job
from support.tables import batches_of

COUNT = 200
READER = "import json\nclass R:\n    def parse(self, line): return json.loads(line)\n"
Write = Callable[[str, dict[int, float]], Job]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes a file with some odd prices, and a job for it."""
    monkeypatch.chdir(tmp_path)

    def make(kind: str, odd: dict[int, float]) -> Job:
        prices = [odd.get(n, n / 4) for n in range(COUNT)]
        data: dict[str, Any] = {"max_bad_ratio": 1, "train": "a.dat"}
        columns = {"labels": "click", "sparse": ["user"], "dense": ["price"]}
        if kind == "parquet":
            labels, users = [n % 2 for n in range(COUNT)], [f"u{n % 9}" for n in range(COUNT)]
            pq.write_table(pa.table({"click": labels, "user": users, "price": prices}), "a.dat", row_group_size=60)
            data |= {"format": kind, "columns": columns}
        elif kind == "csv":
            lines = ["click,user,price", *(f"{n % 2},u{n % 9},{price}" for n, price in enumerate(prices))]
            Path("a.dat").write_text("\n".join(lines))
            data |= {"format": kind, "columns": columns}
        else:
            lines = [
                json.dumps({"click": n % 2, "user": f"u{n % 9}", "price": price}) for n, price in enumerate(prices)
            ]
            Path("a.dat").write_text("\n".join(lines))
            Path("r.py").write_text(READER)
            data |= {"reader": "r.py:R", "slots": ["user"], "dense": ["price"]}
        raw = {"name": "a", "data": data, "model": {"dim": 2, "hidden": [4]}, "train": {"threads": 1}}
        return parse_job(raw, base=tmp_path, source="job.yaml")

    return make


def location(kind: str, row: int) -> str:
    """Return the location in messages: Parquet rows count from 0, lines from 1, and CSV has a header."""
    path = Path.cwd() / "a.dat"
    return f"{path}: row {row}" if kind == "parquet" else f"{path}:{row + (2 if kind == 'csv' else 1)}"


@pytest.mark.parametrize("kind", ["csv", "parquet", "reader"])
@pytest.mark.parametrize(("value", "shown"), [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_numbers_that_are_not_finite(write: Write, kind: str, value: float, shown: str) -> None:
    job = write(kind, {70: value, 133: value})
    batches = batches_of(job)
    assert sum(batch.num_bad for batch in batches) == 2
    assert sum(batch.num_samples for batch in batches) == COUNT - 2
    problem = f"dense `price`: expected a finite number, got {shown}"
    assert [line for batch in batches for line in batch.bad] == [
        f"{location(kind, row)}: {problem}" for row in (70, 133)
    ]
    # Conversions read raw values and report the same.
    rows = open_rows(open_input([], job))
    assert sum(len(chunk["click"]) for chunk in rows.read(Path("a.dat"))) == COUNT - 2
    shown_by_rows = [line.replace("a.dat", str(Path.cwd() / "a.dat")) for line in rows.bad.shown]
    assert shown_by_rows == [f"{location(kind, row)}: {problem}" for row in (70, 133)]


@pytest.mark.parametrize("kind", ["csv", "parquet", "reader"])
def test_training_shows_bad_records_with_their_location(
    write: Write, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train_job(write(kind, {70: math.nan}))
    line = f"bad record: {location(kind, 70)}: dense `price`: expected a finite number, got NaN"
    assert line in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize("kind", ["csv", "parquet", "reader"])
def test_bad_records_of_a_batch_are_shown_in_file_order(write: Write, kind: str) -> None:
    job = write(kind, dict.fromkeys(range(0, COUNT, 3), math.nan))
    batches = batches_of(job, shuffle=True)
    assert len(batches) == 1, "all rows in one shuffled batch"
    (bad,) = (batch.bad for batch in batches)
    assert [line.partition(": dense")[0] for line in bad] == [location(kind, 3 * n) for n in range(SHOWN_BAD)]


def test_a_row_with_two_errors_is_counted_once(write: Write) -> None:
    job = write("parquet", {5: math.nan})
    table = pq.read_table("a.dat")
    at = pa.array(["soon" if n in (5, 9) else "2026-01-01" for n in range(COUNT)])
    pq.write_table(table.append_column("at", at), "a.dat")
    raw = json.loads(job.data.model_dump_json())
    raw = {key: raw[key] for key in ("format", "columns")} | {"train": "a.dat", "eval": {"time": "2026-01-02"}}
    raw["columns"] |= {"time": "at"}
    job = parse_job({"name": "a", "data": raw}, base=Path.cwd(), source="job.yaml")
    batches = batches_of(job)
    assert sum(batch.num_bad for batch in batches) == 2
    assert sum(batch.num_samples for batch in batches) == COUNT - 2
    path = Path.cwd() / "a.dat"
    problem = "time: expected seconds since 1970 or a date, got `soon`"
    assert [line for batch in batches for line in batch.bad] == [f"{path}: row {row}: {problem}" for row in (5, 9)]


@pytest.mark.parametrize("workers", [1, 2])
def test_reader_processes_report_their_seconds(write: Write, workers: int) -> None:
    job = write("reader", {})
    data = job.data.model_copy(update={"workers": workers, "unit_bytes": 2048})
    job = job.model_copy(update={"data": data})
    units = plan_units([Path("a.dat")], UnitSplit(2048, False, 1, "digest", "reader"), 0, 0)
    parser = _core.Parser(json.dumps(job.features()))
    with closing(open_batches(job, parser, units, shuffle=False)) as batches:
        assert batches.times() == (0.0, 0.0)
        seconds = [batches.times() for _ in batches]
    assert len(seconds) > 2
    assert sorted(seconds) == seconds and min(seconds[0]) > 0


def test_too_many_bad_records_are_an_error(write: Write) -> None:
    job = write("parquet", dict.fromkeys(range(100), math.nan))
    job = job.model_copy(update={"data": job.data.model_copy(update={"max_bad_ratio": 0.1})})
    with pytest.raises(SampleError, match=r"^job.yaml: data.train: 100 of 200 records are bad \(50.00%\)"):
        train_job(job)
