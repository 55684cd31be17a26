"""`data convert` keeps the samples: every format to every other, with raw values; losses are reported."""

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from elasticrec import cli
from elasticrec.config import Job, load_job, parse_job
from elasticrec.data.convert.convert import convert
from elasticrec.data.init.job_file import write_job
from support.tables import (
    WRITERS,
    Row,
    as_csv,
    as_slots,
    batches_of,
    rows,
    samples_of,
    write,
    write_kind,
    write_parquet,
)

Capture = pytest.CaptureFixture[str]

TO = {
    "csv": "out.csv",
    "parquet": "out.parquet",
    "paddlerec": "out.txt.gz",
    "json": "out.jsonl.zst",
    "slots": "out.txt",
}


pytestmark = pytest.mark.usefixtures("own_directory")


def described(path: Path) -> Job:
    """Return the job that `init` writes, without evaluation data."""
    write_job(Path("job"), [str(path)], force=True)
    return load_job("job/job.yaml", ["data.eval=[]"])


def job_of(data: dict[str, Any], path: str) -> Job:
    raw = {"name": "a", "data": data | {"train": path}}
    return parse_job(raw, base=Path.cwd(), source="job.yaml")


def samples(job: Job) -> list[tuple[Any, ...]]:
    return list(samples_of(batches_of(job)))


def named(job: Job) -> list[dict[str, Any]]:
    """Return samples with signs by slot name, because the order of slots may differ."""
    return [
        {
            "signs": dict(zip((slot.name for slot in job.data.slots), signs, strict=True)),
            "dense": dict(zip((column.name for column in job.data.dense), dense, strict=True)),
            "labels": labels,
            "weight": weight,
        }
        for signs, dense, labels, weight in samples(job)
    ]


@pytest.mark.parametrize("to", ["csv", "parquet", "paddlerec", "json"])
@pytest.mark.parametrize("kind", ["csv.zst", "tsv", "parquet", "json", "paddlerec", "criteo"])
def test_every_format_converts_to_every_other(tmp_path: Path, kind: str, to: str) -> None:
    path = write_kind(tmp_path, kind, rows(400))
    job = described(path)
    converted = convert([path.name], Path(TO[to]), to, job=None if kind == "json" else job)  # type: ignore[arg-type]
    assert (converted.num_samples, converted.num_bad) == (400, 0)
    if to != "json":
        assert converted.data is not None
        assert samples(job_of(converted.data, TO[to])) == samples(job)
        return
    # JSON lines need a reader, and do not keep the normalisation.
    write_job(Path("again"), [TO[to]])
    reread = load_job("again/job.yaml", ["data.eval=[]"])
    assert {slot.name for slot in reread.data.slots} <= {slot.name for slot in job.data.slots}
    by_name = named(job)
    for ours, theirs in zip(named(reread), by_name, strict=True):
        assert ours["labels"] == theirs["labels"]
        assert all(theirs["signs"][name] == signs for name, signs in ours["signs"].items())


def test_a_job_with_a_reader_is_converted(tmp_path: Path) -> None:
    path = write_kind(tmp_path, "json.gz", [{**row, "weight": 2 - row["click"]} for row in rows(300)])
    job = described(path)
    assert {weight for *_, weight in samples(job)} == {1.0, 2.0}
    for to, name in (("csv", "a.csv.gz"), ("parquet", "a.parquet")):
        converted = convert([], Path(name), to, job=job)  # type: ignore[arg-type]
        assert converted.data is not None
        assert samples(job_of(converted.data, name)) == samples(job)


@pytest.mark.parametrize("kind", ["csv", "parquet", "paddlerec", "criteo", "json", "slots.gz"])
def test_slot_text_has_the_signs_of_the_job(tmp_path: Path, kind: str) -> None:
    path = write_kind(tmp_path, kind, rows(400))
    raw = yaml.safe_load(Path(described(path).source).read_text())["data"]
    raw.pop("dense", None)
    raw.get("columns", {}).pop("dense", None)
    raw |= {"eval": [], "modulo": 100_003}
    if kind == "criteo":
        raw |= {"slots": ["C1", "C2", {"name": "C3", "share": "C2"}], "dense": []}
        job = parse_job({"name": "a", "data": raw}, base=Path("job").absolute(), source="job.yaml")
        job = job.model_copy(update={"data": job.data.model_copy(update={"dense": ()})})
    else:
        job = parse_job({"name": "a", "data": raw}, base=Path("job").absolute(), source="job.yaml")
    converted = convert([path.name], Path("out.txt"), "slots", job=job)
    assert converted.data is not None
    assert samples(job_of(converted.data, "out.txt")) == samples(job)


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_slot_text_to_columns_keeps_signs_as_values(tmp_path: Path, to: str) -> None:
    lines = ["4 1 buy=1 17241709254077376921:0 5:7 6:7 007:user\n", "1 1 buy=0 5:0\n", "2 0 buy=2 5:0 9:3\n"]
    write(tmp_path / "a.txt", "".join(lines).encode())
    data = {"format": "slots", "slots": ["0", "7", {"name": "u", "column": "user"}], "labels": ["click", "buy"]}
    converted = convert([], Path(f"out.{to}"), to, job=job_of(data, "a.txt"))  # type: ignore[arg-type]
    assert converted.data is not None
    job = job_of(converted.data, f"out.{to}")
    (first, second, third) = samples(job)
    assert [len(signs) for signs in first[0]] == [1, 2, 1] and [len(signs) for signs in second[0]] == [1, 0, 0]
    assert second[0][0] == third[0][0] != first[0][0]
    assert (first[2:], second[2:], third[2:]) == (((0.25, 0.25), 4.0), ((1.0, 0.0), 1.0), ((0.0, 1.0), 2.0))
    if to == "csv":
        assert Path("out.csv").read_text().splitlines()[1] == "0.25,0.25,4,17241709254077376921,5|6,7"


def test_unused_columns_are_kept(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", as_csv(rows(100)))
    data = {"format": "csv", "columns": {"labels": "click", "sparse": ["user_id"], "time": "at"}}
    convert([], Path("b.parquet"), "parquet", job=job_of(data, "a.csv"))
    table = pq.read_table("b.parquet")
    assert set(table.schema.names) == {"click", "user_id", "tags", "price", "visits", "at", "note"}
    assert table["note"].to_pylist() == [row["note"] for row in rows(100)]
    convert([], Path("c.csv"), "csv", job=job_of({**data, "format": "parquet"}, "b.parquet"))
    assert Path("c.csv").read_text().splitlines()[0] == "click,at,user_id,tags,price,visits,note"
    converted = convert([], Path("d.txt"), "paddlerec", job=job_of(data, "a.csv"))
    assert converted.lost == ["at", "tags", "price", "visits", "note"]


def test_times_keep_their_meaning(tmp_path: Path) -> None:
    data = rows(200)
    stamps = pa.array([row["at"] for row in data], pa.timestamp("s"))
    write_parquet(tmp_path / "a.parquet", data, at=stamps)
    columns = {"labels": "click", "sparse": ["user_id"], "time": "at"}
    split = {"time": "2023-11-14T22:30"}
    expected = samples(job_of({"format": "parquet", "columns": columns, "eval": split}, "a.parquet"))
    assert 50 < len(expected) < 150
    described = job_of({"format": "parquet", "columns": columns}, "a.parquet")
    to_csv = convert([], Path("b.csv"), "csv", job=described).data
    assert to_csv is not None
    assert samples(job_of(to_csv | {"eval": split}, "b.csv")) == expected
    back = convert([], Path("c.parquet"), "parquet", job=job_of(to_csv, "b.csv")).data
    assert back is not None
    assert samples(job_of(back | {"eval": split}, "c.parquet")) == expected


def test_unusual_values_are_kept(tmp_path: Path) -> None:
    values = ['a"b', "c,d", " e ", "é", "'", "f\tg", "\\", "#h", "1e5", "true"]
    table: list[Row] = [{"click": n % 2, "v": value} for n, value in enumerate(values * 3)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "a.parquet")
    job = job_of({"format": "parquet", "columns": {"labels": "click", "sparse": ["v"]}}, "a.parquet")
    for name in ("b.csv", "c.tsv", "d.tsv.gz"):
        converted = convert([], Path(name), "csv", job=job)
        assert converted.data is not None
        assert samples(job_of(converted.data, name)) == samples(job)


def test_bytes_that_are_not_utf8_are_kept_in_text(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "a.csv", b"click,v\n1,\xff\xfe\n0,b\n")
    job = job_of({"format": "csv", "columns": {"labels": "click", "sparse": ["v"]}}, "a.csv")
    converted = convert([], Path("b.txt"), "paddlerec", job=job)
    assert converted.data is not None
    assert samples(job_of(converted.data, "b.txt")) == samples(job)
    with pytest.raises(Exception, match="column `v`: expected UTF-8 text"):
        convert([], Path("b.parquet"), "parquet", job=job)
    assert not Path("b.parquet").exists()


def test_a_directory_gets_a_file_per_input(tmp_path: Path, capsys: Capture) -> None:
    for number in range(2):
        write(tmp_path / f"in/{number}/part.csv.gz", as_csv(rows(50, number)))
    assert cli.main(["data", "convert", "in", "out", "--to", "paddlerec"]) == 0
    assert sorted(map(str, Path("out").rglob("*.*"))) == ["out/0/part.txt.gz", "out/1/part.txt.gz"]
    assert len(gzip.decompress(Path("out/1/part.txt.gz").read_bytes()).splitlines()) == 50
    printed = capsys.readouterr().out
    assert printed.startswith("wrote 2 files such as out/0/part.txt.gz: 100 samples")
    section = yaml.safe_load(printed[printed.index("  data:") :])["data"]
    assert (section["format"], section["labels"]) == ("paddlerec", ["click"])
    Path("dir.d").mkdir()
    Path("dir.d/mine.csv").write_text("mine")
    assert cli.main(["data", "convert", "in", "dir.d", "--to", "csv"]) == 2
    assert "dir.d: expected an empty directory, got dir.d/mine.csv in it" in capsys.readouterr().err
    assert cli.main(["data", "convert", "in", "one.parquet"]) == 0
    assert pq.ParquetFile("one.parquet").metadata.num_rows == 100


def test_bad_records_are_skipped_up_to_the_limit(tmp_path: Path, capsys: Capture) -> None:
    content = as_csv(rows(100)) + b"7,1,2,3,4,5,6\nx\n"
    write(tmp_path / "a.csv", content)
    job = job_of({"format": "csv", "columns": {"labels": "click", "sparse": ["user_id"]}}, "a.csv")
    with pytest.raises(Exception, match=r"2 of 102 records are bad, data.max_bad_ratio is 0.001\n.*a.csv:102: label"):
        convert([], Path("b.parquet"), "parquet", job=job)
    assert not list(Path().glob("*b.parquet*"))
    job = job_of(
        {"format": "csv", "columns": {"labels": "click", "sparse": ["user_id"]}, "max_bad_ratio": 0.1}, "a.csv"
    )
    converted = convert([], Path("b.parquet"), "parquet", job=job)
    assert (converted.num_samples, converted.num_bad, len(converted.bad)) == (100, 2, 2)
    converted = convert([], Path("b.txt"), "slots", job=job)
    assert (converted.num_samples, converted.num_bad) == (100, 2)
    lines = [json.dumps(row) for row in rows(100)] + ["{broken", '{"click": 5}']
    write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    assert cli.main(["data", "convert", "a.jsonl", "c.csv"]) == 2
    (first, second, third) = capsys.readouterr().err.splitlines()
    assert first == "error: 2 of 102 records are bad, data.max_bad_ratio is 0.001"
    assert "a.jsonl:101: " in second and "a.jsonl:102: label `click`: expected a number from 0 to 1, got 5.0" in third


def test_bad_parquet_rows_are_skipped(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [1, 0, None], "v": ["a", "b", "c"]}), tmp_path / "a.parquet")
    data = {"format": "parquet", "columns": {"labels": "click", "sparse": ["v"]}, "max_bad_ratio": 0.5}
    converted = convert([], Path("b.csv"), "csv", job=job_of(data, "a.parquet"))
    assert (converted.num_samples, converted.num_bad) == (2, 1)
    assert "a.parquet: row 2: label `click`: expected a number from 0 to 1, got nothing" in converted.bad[0]


def test_values_that_a_format_cannot_hold_are_refused(tmp_path: Path, capsys: Capture) -> None:
    write(tmp_path / "a.csv", as_csv(rows(50)))
    write(tmp_path / "a.txt", as_slots(rows(50)))
    pq.write_table(pa.table({"click": [1, 0] * 9, "v": [["a|b"], ["c d"]] * 9}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"click": [1, 0] * 9, "v": ["a\nb", "c"] * 9}), tmp_path / "n.parquet")
    write(tmp_path / "w.csv", b"click,v,weight\n" + b"0,a,0.5\n1,b,1.5\n" * 9)

    def error(*arguments: str) -> str:
        before = sorted(Path().rglob("*"))
        assert cli.main(["data", "convert", *arguments]) == 2
        assert sorted(Path().rglob("*")) == before
        (line,) = capsys.readouterr().err.splitlines()
        return str(line)

    assert error("a.csv", "o.txt", "--to", "slots") == (
        "error: format `slots` has no dense values, the data has price, visits; give a --job without them"
    )
    assert "`show`: format `paddlerec` has no weights" in error("a.txt", "o.txt", "--to", "paddlerec")
    assert "slot `v`: value `a|b` contains the separator `|`" in error("b.parquet", "o.csv")
    assert "slot `v`: value `c d`: format `paddlerec` allows no spaces" in error(
        "b.parquet", "o.txt", "--to", "paddlerec"
    )
    assert error("n.parquet", "o.csv") == ("error: value `a\\nb`: expected no line end, as a sample is one line")
    assert "expected whole numbers of shows and clicks for slot text" in error("w.csv", "o.txt", "--to", "slots")
    assert error("a.csv", "o.txt") == (
        "error: o.txt: expected a name that ends in a format, or --to with slots, paddlerec, csv, parquet, json"
    )
    assert error("a.csv", "o.x", "--to", "orc") == (
        "error: --to: expected one of slots, paddlerec, csv, parquet, json, got `orc`"
    )
    assert "Parquet has its own compression" in error("a.csv", "o.parquet.gz")
    assert error("a.csv", "w.csv") == "error: w.csv: exists already (--overwrite replaces it)"
    assert error("o.csv") == "error: expected data to read before OUT, or --job"
    assert cli.main(["data", "convert", "b.parquet", "o.csv", "--separator", ";"]) == 0
    assert cli.main(["data", "convert", "a.csv", "w.csv", "--overwrite"]) == 0
    assert len(Path("w.csv").read_text().splitlines()) == 51


@pytest.mark.parametrize(
    ("last", "what"),
    [({"normalize": "minmax", "min": 0, "max": 9}, "minmax"), ({"buckets": 6}, "buckets"), ({}, None)],
)
def test_a_missing_value_between_others(tmp_path: Path, capsys: Capture, last: dict[str, Any], what: str) -> None:
    """PaddleRec text has 0 instead, which `minmax` and `buckets` treat as a value."""
    write(tmp_path / "a.csv", b"click,v,a,b\n" + b"1,x,,2\n0,y,3,\n" * 9)
    dense = [{"name": "d.0", "column": "a", **last}, {"name": "d.1", "column": "b"}]
    data = {"format": "csv", "columns": {"labels": "click", "sparse": ["v"], "dense": dense}}
    Path("job.yaml").write_text(yaml.safe_dump({"name": "a", "data": data | {"train": "a.csv"}}))
    code = cli.main(["data", "convert", "out.txt", "--to", "paddlerec", "--job", "job.yaml"])
    error = capsys.readouterr().err
    if what is None:
        assert (code, Path("out.txt").exists()) == (0, True)
    else:
        line = f"error: dense column `d.0`: `paddlerec` cannot hold a missing value with `{what}`\n"
        assert (code, error, Path("out.txt").exists()) == (2, line, False)


@pytest.mark.parametrize("to", ["csv", "parquet", "paddlerec"])
def test_buckets_are_kept(tmp_path: Path, to: Any) -> None:
    write(tmp_path / "a.csv", as_csv(rows(200)))
    dense = ["price", {"name": "visits", "buckets": 0}]
    columns = {"labels": "click", "sparse": ["user_id"], "dense": dense}
    job = job_of({"format": "csv", "columns": columns, "buckets": 6}, "a.csv")
    assert [slot.name for slot in job.data.inputs] == ["user_id", "price.bucket"]
    converted = convert([], Path(TO[to]), to, job=job)
    assert converted.data is not None
    assert samples(job_of(converted.data, TO[to])) == samples(job)


def test_all_formats_are_covered() -> None:
    assert {kind.partition(".")[0] for kind in WRITERS} == {
        "slots",
        "paddlerec",
        "criteo",
        "csv",
        "tsv",
        "json",
        "parquet",
    }
