"""The same samples give the same batches in every format; also splits, damaged files and users' own readers."""

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticrec import _core
from elasticrec.config import Job, differences, match_files
from elasticrec.config.load import parse_job
from elasticrec.data.batches import line_parser, open_batches
from elasticrec.data.header import with_names
from elasticrec.data.reader import check_reader
from elasticrec.data.units import UnitSplit, plan_units
from elasticrec.errors import ConfigError, ModelError, SampleError
from elasticrec.run import Run
from support.store import wait_until
from support.tables import batches_of, samples_of

READER = """
import json

class JsonReader:
    def parse(self, line):
        if line.startswith("#"):
            return None
        row = json.loads(line)
        return {"user": row["user"], "tags": row["tags"], "seen": row["seen"], "price": row["price"],
                "click": row["click"], "weight": row["w"], "ignored": 1}
"""

Row = dict[str, Any]


def rows(count: int = 500, seed: int = 1) -> list[Row]:
    chance = random.Random(seed)
    return [
        {
            "click": int(chance.random() < 0.3),
            "user": f"u{chance.randint(0, 40)}" if chance.random() < 0.95 else None,
            "tags": [f"t{chance.randint(0, 9)}" for _ in range(chance.randint(0, 3))],
            "seen": [f"u{chance.randint(0, 40)}" for _ in range(chance.randint(0, 6))],
            "price": round(chance.random() * 100, 2) if chance.random() < 0.9 else None,
            "w": chance.choice([1, 2, 0.5]),
            "at": 1_700_000_000 + number,
        }
        for number in range(count)
    ]


def as_csv(data: list[Row]) -> str:
    lines = ["click,user,tags,seen by,price,w,at"]
    for row in data:
        user, price = row["user"] or "NA", "" if row["price"] is None else row["price"]
        tags = "|".join(row["tags"])
        lines.append(f'{row["click"]},"{user}",{tags},{" ".join(row["seen"])},{price},{row["w"]},{row["at"]}')
    return "\n".join(lines) + "\n"


def as_json(data: list[Row]) -> str:
    return "# a comment\n" + "".join(f"{json.dumps(row)}\n" for row in data)


def write_parquet(path: Path, data: list[Row]) -> None:
    columns: dict[str, Any] = {
        name: [row[name] for row in data] for name in ("click", "user", "tags", "price", "w", "at")
    }
    columns["seen by"] = [row["seen"] for row in data]
    table = pa.table(columns)
    table = table.set_column(1, "user", table["user"].dictionary_encode())
    pq.write_table(table, path, row_group_size=100)


COLUMNS = {
    "labels": "click",
    "sparse": [
        "user",
        {"name": "tags", "separator": "|"},
        {"name": "seen", "column": "seen by", "sequence": 4, "share": "user", "separator": " "},
    ],
    "dense": ["price"],
    "weight": "w",
    "time": "at",
    "null": ["NA"],
}
SLOTS = ["user", "tags", {"name": "seen", "sequence": 4, "share": "user"}]

MakeJob = Callable[..., Job]


@pytest.fixture
def job_of(tmp_path: Path) -> MakeJob:
    """Return a function that writes rows in a format, and a job for them."""

    def make(kind: str, data: list[Row] | None = None, **changes: Any) -> Job:
        data = rows() if data is None else data
        raw: dict[str, Any] = {"train": f"train.{kind}", "eval": []}
        path = tmp_path / f"train.{kind}"
        if kind.startswith("csv"):
            write_text(path, as_csv(data))
            raw |= {"format": "csv", "columns": COLUMNS}
        elif kind == "parquet":
            write_parquet(path, data)
            raw |= {"format": "parquet", "columns": COLUMNS}
        else:
            write_text(path, as_json(data))
            (tmp_path / "reader.py").write_text(READER)
            raw |= {"reader": "reader.py:JsonReader", "slots": SLOTS, "dense": ["price"]}
        train = {"batch_size": 64, "threads": 1}
        job = parse_job({"name": "small", "data": raw | changes, "train": train}, base=tmp_path, source="job.yaml")
        return with_names(job)

    return make


def write_text(path: Path, text: str) -> None:
    content = text.encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = pa.compress(content, codec="zstd", asbytes=True)
    path.write_bytes(content)


KINDS = ["csv", "csv.gz", "csv.zst", "parquet", "jsonl", "jsonl.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_samples(job_of: MakeJob, kind: str) -> None:
    expected = list(samples_of(batches_of(job_of("csv"))))
    assert len(expected) == 500
    assert sum(len(signs[2]) == 4 for signs, *_ in expected) > 50
    assert list(samples_of(batches_of(job_of(kind)))) == expected


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_buckets_give_a_dense_value_a_sign(job_of: MakeJob, kind: str) -> None:
    data = [row | {"price": price} for row, price in zip(rows(4), [0.0, 7.0, 7.3, None], strict=True)]
    job = job_of(kind, data, buckets=6)
    assert [slot.name for slot in job.data.inputs] == ["user", "tags", "seen", "price.bucket"]
    buckets = [signs[3] for signs, *_ in samples_of(batches_of(job))]
    assert [len(signs) for signs in buckets] == [1, 1, 1, 0]
    assert buckets[0] != buckets[1] == buckets[2]
    plain = [signs for signs, *_ in samples_of(batches_of(job_of(kind, data)))]
    assert [signs[:3] for signs, *_ in samples_of(batches_of(job))] == plain


@pytest.mark.parametrize("kind", KINDS)
def test_batches_keep_their_names_when_read_again(job_of: MakeJob, kind: str) -> None:
    job = job_of(kind, unit_bytes=8192, workers=2)
    once = {(b.unit, b.index): list(samples_of([b])) for b in batches_of(job, shuffle=True)}
    again = {(b.unit, b.index): list(samples_of([b])) for b in batches_of(job, shuffle=True)}
    assert once == again
    assert sum(map(len, once.values())) == 500
    assert [sample for batch in once.values() for sample in batch] != list(samples_of(batches_of(job)))
    after_skip = {(b.unit, b.index): list(samples_of([b])) for b in batches_of(job, shuffle=True, skip=1)}
    first = next(iter(once))
    assert first not in after_skip
    assert after_skip == {name: samples for name, samples in once.items() if name != first}


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "csv.zst"])
def test_progress_within_a_file(job_of: MakeJob, kind: str) -> None:
    job = job_of(kind)
    done = [batch.file_bytes for batch in batches_of(job, shuffle=True)]
    (path,) = match_files(job, "train")
    assert done == sorted(set(done))
    assert done[0] < 0.2 * path.stat().st_size
    assert done[-1] == path.stat().st_size


@pytest.mark.parametrize("kind", KINDS)
def test_a_ratio_is_held_out(job_of: MakeJob, kind: str) -> None:
    job = job_of(kind, eval={"ratio": 0.2})
    train, held = list(samples_of(batches_of(job))), list(samples_of(batches_of(job, held_out=True)))
    assert 60 < len(held) < 140
    everything = list(samples_of(batches_of(job_of(kind))))
    assert sorted(map(repr, train + held)) == sorted(map(repr, everything))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_time_is_held_out(job_of: MakeJob, kind: str) -> None:
    job = job_of(kind, eval={"time": "2023-11-14T22:20:00"})
    everything = list(samples_of(batches_of(job_of(kind))))
    assert list(samples_of(batches_of(job))) == everything[:400]
    assert list(samples_of(batches_of(job, held_out=True))) == everything[400:]


@pytest.mark.parametrize(
    "times",
    [
        ["2026-01-01T23:59:59", "2026-01-02 00:00", "2026-01-02", None],
        ["2026-01-02T07:59:59+08:00", "2026-01-02T00:00:00Z", "2026-01-02T00:00:00.5", None],
        pa.array(["2026-01-01", "2026-01-02", "2026-01-03", None]).dictionary_encode(),
        ["1767311999", "1767312000", "1767312000000", None],
        pa.array([1767311999, 1767312000, 1767312000000, None]),
        pa.array([1767311999_999999999, 1767312000_000000000, 1767312000_000000001, None], pa.timestamp("ns")),
        pa.array([20454, 20455, 20456, None], pa.date32()),
    ],
)
def test_times_of_every_type_in_parquet(tmp_path: Path, times: Any) -> None:
    pq.write_table(pa.table({"click": [0, 0, 0, 0], "a": ["0", "1", "2", "3"], "at": times}), tmp_path / "a.parquet")
    columns = {"labels": "click", "sparse": ["a"], "time": "at"}
    raw = {"format": "parquet", "train": "a.parquet", "columns": columns, "eval": {"time": "2026-01-02"}}
    job = parse_job({"name": "small", "data": raw}, base=tmp_path, source="job.yaml")
    train, held_out = list(samples_of(batches_of(job))), list(samples_of(batches_of(job, held_out=True)))
    parser = _core.Parser(json.dumps(job.features()))
    assert [signs[0][0] for signs, *_ in train] == [parser.sign("a", b"0"), parser.sign("a", b"3")]
    assert [signs[0][0] for signs, *_ in held_out] == [parser.sign("a", b"1"), parser.sign("a", b"2")]


def test_hours_are_held_out(tmp_path: Path) -> None:
    for hour in ("20260101/22", "20260101/23", "20260102/00"):
        (tmp_path / hour).mkdir(parents=True)
        (tmp_path / hour / "part.txt").write_text("1 0 5:0\n")
    raw: dict[str, Any] = {"format": "slots", "train": ".", "slots": "0", "eval": {"time": "2026-01-01T23:00"}}
    job = parse_job({"name": "small", "data": raw}, base=tmp_path, source="job.yaml")
    assert [str(path.parent.name) for path in match_files(job, "train")] == ["22"]
    assert [str(path.parent.name) for path in match_files(job, "eval")] == ["23", "00"]
    (tmp_path / "extra.txt").write_text("1 0 5:0\n")
    with pytest.raises(ConfigError, match=r"job.yaml: data.eval.time: expected files in dir"):
        match_files(job, "train")


def test_prediction_and_training_parse_lines_in_the_same_way(job_of: MakeJob) -> None:
    data = rows(20)
    expected = [(signs, dense) for signs, dense, *_ in samples_of(batches_of(job_of("csv", data)))]
    for kind, text in (("csv", as_csv(data)), ("jsonl", as_json(data))):
        batch = line_parser(job := job_of(kind, data), _core.Parser(json.dumps(job.features())))(text.encode())
        assert [(signs, dense) for signs, dense, *_ in samples_of([batch])] == expected


@pytest.mark.parametrize("kind", ["csv.gz", "jsonl.gz"])
def test_a_truncated_file_is_named_with_its_line(job_of: MakeJob, tmp_path: Path, kind: str) -> None:
    job = job_of(kind)
    path = tmp_path / f"train.{kind}"
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises((SampleError, OSError), match=rf"train\.{kind}: damaged or truncated in line \d+"):
        batches_of(job)


@pytest.mark.parametrize("num_batches", [1, 3, 4, 5, 8])
def test_a_parquet_reader_can_be_closed_at_any_time(job_of: MakeJob, num_batches: int) -> None:
    """Also when its queue is full and not read any more."""
    job = job_of("parquet", rows(64 * num_batches))
    units = plan_units(match_files(job, "train"), UnitSplit(job.data.unit_bytes, False, 1, "digest", "parquet"), 0, 0)
    for num_read in range(num_batches + 1):
        batches = open_batches(job, _core.Parser(json.dumps(job.features())), units, shuffle=False)
        assert [len(next(batches).labels) for _ in range(num_read)] == [64] * num_read
        if num_read == 0:
            queue, thread = batches._queue, batches._thread  # type: ignore[attr-defined]
            wait_until(lambda q=queue, t=thread: q.qsize() >= 4 or not t.is_alive(), lambda: "no batches")  # type: ignore[misc]
        batches.close()
        assert list(batches) == []


def test_a_truncated_parquet_file(job_of: MakeJob, tmp_path: Path) -> None:
    job = job_of("parquet")
    path = tmp_path / "train.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SampleError, match=r"train\.parquet: expected a Parquet file: "):
        batches_of(job)


def test_bad_rows_are_counted_and_shown(job_of: MakeJob) -> None:
    data = rows(100)
    for number in range(10, 20):
        data[number] = {**data[number], "click": 3}
    for kind, location in (
        ("csv", "train.csv:12: "),
        ("parquet", "train.parquet: row 10: "),
        ("jsonl", "train.jsonl:12: "),
    ):
        batches = batches_of(job_of(kind, data))
        assert sum(batch.num_bad for batch in batches) == 10
        assert sum(batch.num_samples for batch in batches) == 90
        assert sum(batch.num_records for batch in batches) == 100
        shown = [line for batch in batches for line in batch.bad]
        assert len(shown) == 5
        assert location in shown[0] and "label `click`: expected a number from 0 to 1" in shown[0]


def test_missing_columns_are_named(job_of: MakeJob, tmp_path: Path) -> None:
    columns = {**COLUMNS, "sparse": ["user", "town"]}
    with pytest.raises(ConfigError, match=r"job.yaml: data.columns: .*train.csv: expected column `town`, got"):
        job_of("csv", columns=columns)
    with pytest.raises(ConfigError, match=r"train.parquet: expected a column `town`, got click, user"):
        batches_of(job_of("parquet", columns=columns))
    job = job_of("csv")
    (tmp_path / "train.csv").write_text("click,user\n1,a\n")
    with pytest.raises(SampleError, match=r"train.csv:1: expected the header `click,user,tags"):
        batches_of(job)
    (tmp_path / "train.csv").write_text("")
    with pytest.raises(SampleError, match=r"train.csv:1: expected a header with the names of the columns, got nothing"):
        batches_of(job)


def test_csv_without_a_header(job_of: MakeJob, tmp_path: Path) -> None:
    expected = list(samples_of(batches_of(job_of("csv"))))
    names = ["click", "user", "tags", "seen by", "price", "w", "at"]
    job = job_of("csv", columns={**COLUMNS, "names": names, "header": False, "delimiter": "\t"})
    (tmp_path / "train.csv").write_text("\n".join(as_csv(rows()).replace(",", "\t").splitlines()[1:]))
    assert list(samples_of(batches_of(job))) == expected


class TestReader:
    def test_a_run_keeps_its_reader(self, job_of: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        job = job_of("jsonl", rows(50))
        run = Run.create(job)
        (tmp_path / "reader.py").unlink()
        kept = run.job()
        assert differences(job, kept) == []
        assert len(list(samples_of(batches_of(kept)))) == 50

    def write(self, tmp_path: Path, source: str) -> None:
        (tmp_path / "reader.py").write_text(source)

    @pytest.mark.parametrize(
        ("source", "message"),
        [
            ("import nothing_like_this", r"reader.py:1: ModuleNotFoundError: No module named"),
            ("def f(:", r"reader.py:1: SyntaxError"),
            ("class Other: ...", r"reader.py: expected a class `JsonReader`, got `Other`"),
            ("class JsonReader: ...", r"reader.py: `JsonReader`: expected a method `parse\(self, line\)`, got none"),
            (
                "class JsonReader:\n    def __init__(self):\n        1 / 0\n",
                r"reader.py:3: ZeroDivisionError",
            ),
        ],
    )
    def test_unusable_reader_files_are_refused(
        self, job_of: MakeJob, tmp_path: Path, source: str, message: str
    ) -> None:
        job = job_of("jsonl")
        self.write(tmp_path, source)
        with pytest.raises((ConfigError, ModelError), match=message):
            batches_of(job)
        with pytest.raises((ConfigError, ModelError), match=message):
            check_reader(job)

    def test_a_missing_reader_file_is_refused(self, job_of: MakeJob, tmp_path: Path) -> None:
        job = job_of("jsonl")
        (tmp_path / "reader.py").unlink()
        with pytest.raises(ConfigError, match=r"^job.yaml: data.reader: .*reader.py: no such file or directory$"):
            batches_of(job)

    def test_errors_of_the_reader_are_bad_records(self, job_of: MakeJob, tmp_path: Path) -> None:
        job = job_of("jsonl", rows(10))
        self.write(
            tmp_path, READER.replace("row = json.loads(line)", 'row = json.loads(line)\n        assert row["w"] != 2')
        )
        batches = batches_of(job)
        num_bad = sum(row["w"] == 2 for row in rows(10))
        assert 0 < num_bad == sum(batch.num_bad for batch in batches)
        assert "reader.py:9: AssertionError" in batches[0].bad[0]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("1.5", "slot `user`: expected a string, a whole number or a list of them, got float; a number with"),
            ("[['a']]", "slot `user`: expected a list of values, got a list of lists"),
            ("{}", "slot `user`: expected a string, a whole number or a list of them, got dict"),
        ],
    )
    def test_invalid_categories_are_bad(self, job_of: MakeJob, tmp_path: Path, value: str, message: str) -> None:
        job = job_of("jsonl", rows(3))
        self.write(tmp_path, READER.replace('row["user"]', value))
        assert message in batches_of(job)[0].bad[0]

    def test_text_that_is_not_utf8_is_a_bad_record(self, job_of: MakeJob, tmp_path: Path) -> None:
        job = job_of("jsonl", rows(3))
        self.write(tmp_path, READER.replace('row["user"]', "'\\ud800'"))
        assert "train.jsonl:2: slot `user`: expected UTF-8 text" in batches_of(job)[0].bad[0]

    def test_a_reader_may_print_and_return_numbers(self, job_of: MakeJob, tmp_path: Path) -> None:
        job = job_of("jsonl", rows(3))
        self.write(
            tmp_path,
            READER.replace("row = json", 'print("hello")\n        row = json').replace('row["user"]', "[7, '7']"),
        )
        for signs, *_ in samples_of(batches_of(job)):
            assert len(signs[0]) == 2 and signs[0][0] == signs[0][1]

    # A unit has 7 batches of 64 rows: kill in its second batch, in its sixth, and in two of its batches.
    @pytest.mark.parametrize(("killed", "skip"), [([100], 0), ([350], 2), ([70, 200], 1)])
    def test_a_killed_process_is_restarted_without_loss(
        self, job_of: MakeJob, tmp_path: Path, killed: list[int], skip: int
    ) -> None:
        def read() -> list[tuple[tuple[int, int], list[tuple[Any, ...]]]]:
            # A job reads its reader file once.
            job = job_of("jsonl", rows(2000), unit_bytes=65536, workers=2)
            if (tmp_path / "killer").exists():
                (tmp_path / "killer").rename(tmp_path / "reader.py")
            return [((batch.unit, batch.index), list(samples_of([batch]))) for batch in batches_of(job, skip=skip)]

        expected = read()
        assert expected[0][0] == (0, skip) and expected[-1][0][0] > 2
        marks = [tmp_path / f"mark-{row}" for row in killed]
        (tmp_path / "killer").write_text(
            READER.replace(
                "        row = json",
                "        import os, pathlib\n"
                f"        for row in {killed}:\n"
                f"            mark = pathlib.Path({str(tmp_path)!r}) / f'mark-{{row}}'\n"
                "            if f'\"at\": {1700000000 + row}' in line and not mark.exists():\n"
                "                mark.touch()\n"
                "                os.kill(os.getpid(), 9)\n"
                "        row = json",
            ),
        )
        assert read() == expected
        assert all(mark.exists() for mark in marks)

    def test_a_process_that_dies_twice_is_an_error(self, job_of: MakeJob, tmp_path: Path) -> None:
        job = job_of("jsonl", rows(100))
        self.write(tmp_path, READER.replace("        row = json", "        import os; os._exit(3)\n        row = json"))
        with pytest.raises(
            SampleError,
            match=r"train.jsonl: the reader process \(data.reader\) died twice, with exit code 3, in batch 0",
        ):
            batches_of(job)

    def test_closing_stops_all_processes(self, job_of: MakeJob) -> None:
        job = job_of("jsonl", rows(2000), workers=2, unit_bytes=16384)
        split = UnitSplit(job.data.unit_bytes, False, 1, "digest", job.data.format)
        units = plan_units(match_files(job, "train"), split, 0, 0)
        others = children_of(os.getpid())
        batches = open_batches(job, _core.Parser(json.dumps(job.features())), units, shuffle=False)
        next(batches)
        children = children_of(os.getpid()) - others
        assert len(children) == 2
        batches.close()
        assert not children & children_of(os.getpid())

    def test_reader_processes_exit_with_their_parent(self, job_of: MakeJob, tmp_path: Path) -> None:
        job = job_of("jsonl", rows(2000), workers=2, unit_bytes=16384)
        (tmp_path / "job.yaml").write_text(job.to_yaml())
        code = f"""
import json, sys, time
from elasticrec import _core
from elasticrec.config import load_job, match_files
from elasticrec.data.batches import open_batches
from elasticrec.data.units import UnitSplit, plan_units
job = load_job({str(tmp_path / "job.yaml")!r})
units = plan_units(match_files(job, "train"), UnitSplit(16384, False, 1, "d", "reader"), 0, 0)
batches = open_batches(job, _core.Parser(json.dumps(job.features())), units, shuffle=False)
next(batches)
print("ready", flush=True)
time.sleep(100)
"""
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert parent.stdout is not None
        with parent.stdout:
            assert parent.stdout.readline() == "ready\n"
            children = children_of(parent.pid)
            assert len(children) == 2
            parent.send_signal(signal.SIGKILL)
            parent.wait()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), lambda: "processes are left")


def children_of(pid: int) -> set[int]:
    """Return the children of a process."""
    children: set[int] = set()
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end in the meantime.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            children |= {int(child) for child in path.read_text().split()}
    return children


def test_two_parquet_columns_with_one_name_are_refused(job_of: MakeJob, tmp_path: Path) -> None:
    job = job_of("parquet")
    table = pq.read_table(tmp_path / "train.parquet")
    pq.write_table(table.append_column("user", table["user"]), tmp_path / "train.parquet")
    with pytest.raises(SampleError, match=r"train.parquet: expected each column once, got `user` twice"):
        batches_of(job)


def test_parquet_numbers_are_read_like_their_text(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"click": [True, False], "id": [7, -3], "tag": [["a", None], None]}), tmp_path / "a.parquet"
    )
    (tmp_path / "a.csv").write_text("click,id,tag\n1,7,a\n0,-3,\n")
    columns = {"labels": "click", "sparse": ["id", "tag"]}
    expected = None
    for format in ("csv", "parquet"):
        raw = {"name": "a", "data": {"format": format, "train": f"a.{format}", "columns": columns}}
        samples = list(samples_of(batches_of(with_names(parse_job(raw, base=tmp_path, source="job.yaml")))))
        assert expected is None or samples == expected
        expected = samples
    assert expected is not None and np.asarray([len(signs[1]) for signs, *_ in expected]).tolist() == [1, 0]


def test_records_as_text_and_good_records(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf1 0 5:0\r\n\nwhat\n1 1 6:0\n2 3 7:0")
    features = {
        "format": "slots",
        "hash": 1,
        "slots": [{"name": "0", "pooling": "sum"}],
        "dense": [],
        "labels": ["click"],
    }
    parser = _core.Parser(json.dumps(features))
    stat = path.stat()
    options = _core.BatchOptions(batch_size=10, shuffle=False, seed=0, skip_batches=0, piece_bytes=4096, select=None)
    unit = (0, str(path), 0, stat.st_size, 0, stat.st_size, stat.st_mtime_ns)
    (batch,) = _core.RecordReader(parser, [unit], options)
    assert batch.text() == b"1 0 5:0\nwhat\n1 1 6:0\n2 3 7:0\n"
    text, bad = batch.good(parser)
    assert text == b"1 0 5:0\n1 1 6:0\n"
    assert bad == [
        f"{path}:3: show: expected a count below 2^32, got `what`",
        f"{path}:5: click: expected at most show = 2, got 3",
    ]
