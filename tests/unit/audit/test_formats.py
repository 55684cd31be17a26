"""The audit and the trainer's parsers read odd records in the same way, with independent code."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticrec.audit import file_counter
from elasticrec.audit.counts import Counts, Tally
from elasticrec.audit.file_counter import FileCounter, with_names
from elasticrec.audit.values import BadRecordError, f32_of, seconds_of
from elasticrec.config import Job
from elasticrec.errors import SampleError
from support.small import MakeJob
from support.tables import batches_of, write

NUM_LINES = 3000

VALUES = [b"a", b"b", b"7", b"007", b"", b"NA", b"a|b", b"||", b"x|NA|pad", b"pad", b"\xff\xfe", b"a:b", b'"', b'q"r']
NUMBERS = [b"0", b"1", b"-3", b"2.5", b".5", b"5.", b"1e2", b"1E-3", b"+4", b" 6 ", b"", b"NA", b"nan", b"inf", b"1e39"]
NUMBERS += [b"-Infinity", b"0x10", b"1_0", b"1e", b".", b"--1", b"1\x0b", b"9" * 30, b"0.1", b"16777217", b"1e-46"]
LABELS = [b"0", b"1"] * 10 + [
    b"true",
    b"False",
    b"0.5",
    b"0.49999999",
    b"0.4999999",
    b"2",
    b"-0",
    b"",
    b"NA",
    b"nan",
    b"TRUE",
]
TIMES = [b"0", b"1767225600", b"1767225600000", b"2026-01-01", b"2026-01-01T00:00:00Z", b"2026-01-01 01:30", b"-1", b""]
TIMES += [b"2026-02-30", b"soon", b"2026-01-01T23:59:59.5+00:00", b"2025-12-31T20:00:00-0400", b"nan", b"1e9", b"NA"]


def trained_counts(job: Job) -> tuple[int, Counts]:
    """Count the files of a job with the trainer's parsers."""
    tally, num_samples = Tally(), 0
    for batch in batches_of(job):
        num_samples += batch.num_samples
        if batch.num_samples:
            num_slots = (len(batch.offsets) - 1) // batch.num_samples
            lengths = np.diff(batch.offsets[::num_slots].astype(np.int64))
            clicks = np.rint(batch.labels[:, 0] * (batch.weights if job.data.format == "slots" else 1))
            if job.data.format != "slots":
                clicks = batch.labels[:, 0] >= 0.5
            shows = batch.weights if job.data.format == "slots" else np.ones(batch.num_samples)
            of_signs = (np.repeat(values.astype(np.int64), lengths) for values in (shows, clicks))
            tally.add_counts(0, Counts.of(batch.signs.copy(), *of_signs))
    return num_samples, tally.counts()


def expect_equal(job: Job, path: Path, min_share: float = 0.05) -> None:
    """Check that the audit counts a file as the trainer does; some records are good and some bad."""
    num_samples, expected = trained_counts(job)
    counter = FileCounter(with_names(job, path))
    counted = Tally()
    counter.count(path, counted)
    assert counter.odd.counts == {}
    assert counted.num_samples == num_samples
    assert min_share * NUM_LINES < num_samples < NUM_LINES
    for name in ("signs", "shows", "clicks"):
        np.testing.assert_array_equal(getattr(counted.counts(), name), getattr(expected, name), err_msg=name)


def odd_or_plain(chance: random.Random, odd: list[bytes], plain: Callable[[], bytes], share: float = 0.1) -> bytes:
    return chance.choice(odd) if chance.random() < share else plain()


def write_lines(path: Path, make: Callable[[random.Random], bytes]) -> Path:
    chance = random.Random(7)
    ends = [b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b"\n \t\n"]
    lines = b"".join(make(chance) + chance.choice(ends) for _ in range(NUM_LINES))
    return write(path, b"\xef\xbb\xbf" + lines)


SLOT_JOBS: dict[str, dict[str, Any]] = {
    "plain": {"slots": [0, 1, "u"]},
    "labels": {"slots": [0, 1], "labels": ["click", "buy"]},
    "padding": {"slots": [0, {"name": "b", "column": 1, "sequence": 2}], "padding": 3, "modulo": 7},
    "separate": {"slots": [0, {"name": 1, "share": 0}], "separate_slots": True, "padding": 0},
    "ratio": {"slots": [0, 1], "eval": {"ratio": 0.4}},
}


@pytest.mark.parametrize(("suffix", "lines_at_once"), [("", 1), ("", 3), (".gz", 50_000), (".zst", 50_000)])
@pytest.mark.parametrize("name", SLOT_JOBS)
def test_slot_text_is_read_as_in_training(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, suffix: str, lines_at_once: int
) -> None:
    """Lines are counted at once if all are plain, and one by one if some are odd."""
    monkeypatch.setattr(file_counter, "_LINES_AT_ONCE", lines_at_once)
    tokens = [b"5:", b":0", b"x:0", b"1:2:0", b"18446744073709551616:0", b"buy=1", b"buy=9", b"rest=x", b"buy", b"+1:0"]
    tokens += [
        b"000000000000000000001:0",
        b"007:0",
        b"7:00",
        b"7:u",
        b"7:65536",
        b"3:1",
        b"18446744073709551615:1",
        b"5:0\x0b",
    ]
    counts = [b"0 0", b"2 3", b"4294967296 1", b"1", b"", b"-1 0", b"1 0x", b"1:0 0", b"00001 0", b"1 +0"]

    def line(chance: random.Random) -> bytes:
        head = odd_or_plain(chance, counts, lambda: chance.choice([b"1 0", b"1 1", b"3 2", b"1\t0"]), 0.05)
        rest = [
            odd_or_plain(chance, tokens, lambda: b"%d:%d" % (chance.randrange(30), chance.randrange(3)), 0.06)
            for _ in range(chance.randrange(6))
        ]
        if name == "labels" and chance.random() < 0.9:
            rest.insert(0, b"buy=1")
        return chance.choice([b" ", b"  ", b"\t"]).join([head, *rest])

    path = write_lines(tmp_path / f"train.txt{suffix}", line)
    expect_equal(make_job(data={"format": "slots", "train": path.name, "unit_bytes": 4096, **SLOT_JOBS[name]}), path)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_several_gzip_members_or_zstd_frames_in_one_file(make_job: MakeJob, tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"train.txt{suffix}", b"1 0 5:0\n1 1 6:")
    first = path.read_bytes()
    path.write_bytes(first + write(path, b"0\n1 0 7:0").read_bytes())
    job, counted = make_job(data={"train": path.name}), Tally()
    FileCounter(job).count(path, counted)
    assert counted.num_samples == trained_counts(job)[0] == 3
    assert counted.counts().signs.tolist() == trained_counts(job)[1].signs.tolist() == [5, 6, 7]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(SampleError, match="damaged or truncated"):
        FileCounter(job).count(path, Tally())


@pytest.mark.parametrize("labels", [["click"], ["click", "buy"]], ids=len)
def test_paddlerec_is_read_as_in_training(make_job: MakeJob, tmp_path: Path, labels: list[str]) -> None:
    tokens = [
        b"user:",
        b"user",
        b":x",
        b":",
        b"other:1",
        b"tags:pad",
        b"d:1",
        b"click:1",
        b"buy:1",
        b"one:x",
        b"item:a:b:c",
    ]

    def line(chance: random.Random) -> bytes:
        fields = [b"click:" + odd_or_plain(chance, LABELS, lambda: b"1", 0.5)]
        fields += (
            [b"buy:" + odd_or_plain(chance, LABELS, lambda: b"1", 0.05)]
            if chance.random() < 0.95 and len(labels) > 1
            else []
        )
        fields += [b"d:" + odd_or_plain(chance, NUMBERS, lambda: b"%d" % chance.randrange(50), 0.1) for _ in range(2)]
        fields += [b"one:" + odd_or_plain(chance, NUMBERS, lambda: b"%.3f" % chance.random(), 0.1)]
        fields += [b"user:%d" % chance.randrange(40), b"it:%d" % chance.randrange(5), b"no:%d" % chance.randrange(5)]
        fields += [b"tags:t%d" % chance.randrange(9) for _ in range(chance.randrange(4))]
        fields += [chance.choice(tokens)] if chance.random() < 0.1 else []
        return b" ".join(fields)

    path = write_lines(tmp_path / "train.txt", line)
    data = {
        "format": "paddlerec",
        "train": path.name,
        "labels": labels,
        "slots": ["user", {"name": "item", "column": "it", "share": "user"}, {"name": "tags", "sequence": 2}],
        "dense": [
            {"name": "d", "count": 2, "normalize": "log", "buckets": 6},
            {"name": "one", "normalize": "minmax", "min": 0.1, "max": 0.7, "buckets": 9},
        ],
        "padding": "pad",
    }
    expect_equal(make_job(data=data), path)


def test_criteo_is_read_as_in_training(make_job: MakeJob, tmp_path: Path) -> None:
    def line(chance: random.Random) -> bytes:
        fields = [odd_or_plain(chance, LABELS, lambda: b"0", 0.6)]
        fields += [odd_or_plain(chance, NUMBERS, lambda: b"%d" % chance.randrange(-3, 10**6), 0.02) for _ in range(13)]
        fields += [odd_or_plain(chance, VALUES, lambda: b"%08x" % chance.randrange(40), 0.1) for _ in range(26)]
        fields += [b"more"] * (chance.random() < 0.03)
        return b"\t".join(fields)

    path = write_lines(tmp_path / "train.tsv", line)
    dense = ["I1", {"name": "I5", "buckets": 0}, {"name": "I7", "normalize": "minmax", "min": 0, "max": 10**5}]
    slots = ["C1", "C26", {"name": "C3", "share": "C1"}]
    data = {"format": "criteo", "train": path.name, "dense": dense, "buckets": 7, "slots": slots, "padding": "b"}
    expect_equal(make_job(data=data), path)


@pytest.mark.parametrize("delimiter", [",", "\t", ";"])
@pytest.mark.parametrize("split", [(), {"ratio": 0.3}, {"time": "2026-01-01T00:30"}], ids=str)
def test_csv_is_read_as_in_training(make_job: MakeJob, tmp_path: Path, delimiter: str, split: Any) -> None:
    names = ["click", "user", "tags", "price", "seen by", "w", "at", "rest"]

    def quoted(chance: random.Random, field: bytes) -> bytes:
        if chance.random() < 0.1:
            return b'"' + field.replace(b'"', b'""') + b'"' + chance.choice([b""] * 9 + [b"y"])
        return field

    def line(chance: random.Random) -> bytes:
        fields = [
            odd_or_plain(chance, LABELS, lambda: b"1", 0.3),
            odd_or_plain(chance, VALUES, lambda: b"u%d" % chance.randrange(40)),
            b"|".join(odd_or_plain(chance, VALUES, lambda: b"t%d" % chance.randrange(9)) for _ in range(3)),
            odd_or_plain(chance, NUMBERS, lambda: b"%.4f" % chance.lognormvariate(0, 3)),
            b" ".join(b"u%d" % chance.randrange(9) for _ in range(chance.randrange(5))),
            odd_or_plain(chance, NUMBERS, lambda: b"1", 0.05),
            odd_or_plain(chance, TIMES, lambda: b"2026-01-01T00:%02d" % chance.randrange(60)),
            chance.choice(VALUES),
        ]
        if chance.random() < 0.02:
            return delimiter.join(names).encode()
        fields = fields[: 7 if chance.random() < 0.02 else 8]
        return delimiter.encode().join(quoted(chance, field) for field in fields)

    path = tmp_path / "train.csv"
    write_lines(path, line)
    path.write_bytes(delimiter.join(names).encode() + b"\n" + path.read_bytes()[3:])
    table = {
        "labels": "click",
        "sparse": [
            "user",
            {"name": "tags", "separator": "|"},
            {"name": "seen", "column": "seen by", "separator": " ", "sequence": 2, "share": "user"},
        ],
        "dense": [{"name": "price", "buckets": 6}, {"name": "w2", "column": "w"}],
        "weight": "w",
        "time": "at",
        "null": ["NA", "a|b"],
        "delimiter": delimiter,
    }
    data = {"format": "csv", "train": path.name, "slots": None, "columns": table, "padding": "pad", "eval": split}
    expect_equal(make_job(data={**data, "modulo": 10**6}), path)


READER = """
import json

class Odd:
    VALUES = json.loads('["a", "", 7, -7, true, 2.5, null, ["a", null, 3], [], [["a"]], "pad", {"a": 1}, "\\\\ud800"]')
    NUMBERS = [1, 2.5, True, None, "3", b"4", float("nan"), float("inf"), 10**400, 1e39, [1], -2]
    LABELS = [0, 1, True, 0.5, 0.4, None, 2, "1", float("nan")]

    def parse(self, line):
        kind, *numbers = line.split()
        user, tags, price, click, buy, weight = map(int, numbers)
        if kind == "none":
            return None
        if kind == "list":
            return [1]
        sample = {"tg": [f"t{tags}", "x", f"t{tags % 3}"], "user": f"u{user}", "price": price / 7, "click": click % 2,
                  "buy": 1, "unused": 1}
        if kind == "odd":
            odd = {"user": self.VALUES, "tags": self.VALUES, "price": self.NUMBERS, "click": self.LABELS,
                   "weight": self.NUMBERS, 3: self.VALUES}
            name, values = list(odd.items())[user % 6]
            sample[name] = values[weight % len(values)]
        return {key: value for key, value in sample.items() if kind != "less" or key != "buy"}
"""


def test_a_user_reader_is_read_as_in_training(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(READER)

    def line(chance: random.Random) -> bytes:
        kind = chance.choice(["plain", "plain", "odd", "odd", "odd", "none", "list", "less", "é", "short 1"])
        text = f"{kind} {' '.join(str(chance.randrange(60)) for _ in range(6))}"
        return text.encode("latin-1" if kind == "é" else "utf-8")

    path = write_lines(tmp_path / "train.txt", line)
    data = {
        "reader": "odd.py:Odd",
        "format": "reader",
        "train": path.name,
        "labels": ["click", "buy"],
        "slots": ["user", {"name": "tags", "column": "tg", "share": "user", "sequence": 2}],
        "dense": [{"name": "price", "buckets": 4}],
        "padding": "pad",
        "eval": {"ratio": 0.2},
    }
    expect_equal(make_job(data=data), path)


@pytest.mark.parametrize("time", ["text", "number", "stamp", "date"])
def test_parquet_is_read_as_in_training(make_job: MakeJob, tmp_path: Path, time: str) -> None:
    chance = random.Random(3)

    def column(odd: list[Any], plain: Callable[[], Any], share: float = 0.05) -> list[Any]:
        return [chance.choice(odd) if chance.random() < share else plain() for _ in range(NUM_LINES)]

    texts = ["", None, "NA", "pad", "a|b", "||", "NA|x", "ü"]
    stamps = [pa.scalar(1_767_225_600 + 60 * number, pa.timestamp("s")).as_py() for number in range(60)]
    times = {
        "text": pa.array(
            column([None, "soon", "2026-02-30", "7"], lambda: f"2026-01-01T00:{chance.randrange(60):02}:00")
        ),
        "number": pa.array(column([None, 0, 1_767_230_000_000], lambda: 1_767_225_600 + chance.randrange(3600))),
        "stamp": pa.array(column([None], lambda: chance.choice(stamps)), pa.timestamp("ns")),
        "date": pa.array(column([None], lambda: chance.choice(stamps).date()), pa.date32()),
    }
    numbers = [None, math.nan, math.inf, -1.0, 1e300]
    table = pa.table(
        {
            "click": column([None, 2, -1], lambda: chance.randrange(2)),
            "buy": column([None, math.nan, 0.5], lambda: chance.random()),
            "user": pa.array(column(texts, lambda: f"u{chance.randrange(50)}")).dictionary_encode(),
            "id": pa.array(column([None, 2**63 - 1, -1], lambda: chance.randrange(40)), pa.int64()),
            "tags": column(
                [None, [], [None, "NA", "x"], ["a|b", "pad"]], lambda: [f"t{chance.randrange(9)}"] * chance.randrange(4)
            ),
            "flag": column([None], lambda: chance.random() < 0.5),
            "price": column(numbers, lambda: chance.lognormvariate(0, 3)),
            "w": column([None, 0.0, -1.0, math.inf], lambda: 1.0),
            "at": times[time],
        }
    )
    path = tmp_path / "train.parquet"
    pq.write_table(table, path, row_group_size=700)
    columns = {
        "labels": ["click", "buy"],
        "sparse": [
            {"name": "user", "separator": "|"},
            "id",
            {"name": "tags", "sequence": 2, "separator": "|"},
            {"name": "f", "column": "flag", "share": "id"},
        ],
        "dense": [{"name": "price", "buckets": 6}, {"name": "plain", "column": "price", "normalize": "none"}],
        "weight": "w",
        "time": "at",
        "null": "NA",
    }
    data = {"format": "parquet", "train": path.name, "slots": None, "columns": columns, "padding": "pad"}
    for split in ((), {"ratio": 0.3}, {"time": "2026-01-01T00:30"}):
        expect_equal(make_job(data={**data, "eval": split, "unit_bytes": 4096}), path)


def test_numbers_are_rounded_once_and_times_parsed() -> None:
    # Rounded twice, the result would be 1.0.
    assert f32_of(b"1.00000005960464477540") == float(np.nextafter(np.float32(1), np.float32(2)))
    assert [f32_of(text) for text in (b"", b".", b"0x1", b"1e", b" 1")] == [None] * 5
    new_year = 1_767_225_600
    for text in ("1767225600", "1767225600000", "2026-01-01", "2026-01-01T00:00", "2025-12-31 19:00:00-05:00"):
        assert seconds_of(text.encode()) == new_year, text
    assert seconds_of(b"noon") is None
    with pytest.raises(BadRecordError, match="time `2026-01-01T00:00:00"):
        seconds_of(b"2026-01-01T00:00:00.1234567")
