"""`init` writes a job that trains for data of every format, and one error line for data that it cannot read."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from elasticrec import _core, cli
from elasticrec.config import Job, load_job, match_files
from elasticrec.data.batches import line_parser
from elasticrec.data.init.job_file import summary_lines, write_job
from elasticrec.training.loop import train_job
from support.tables import (
    FIRST_AT,
    WRITERS,
    as_csv,
    as_json,
    as_slots,
    batches_of,
    rows,
    samples_of,
    write,
    write_kind,
    write_parquet,
)

Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("own_directory")


def job_for(source: Path, **options: Any) -> Job:
    written = write_job(Path("job"), [str(source)], **options)
    return load_job(written.path)


@pytest.mark.parametrize("kind", WRITERS)
def test_the_job_of_every_format_trains(tmp_path: Path, kind: str, capsys: Capture) -> None:
    path = write_kind(tmp_path, kind, rows())
    assert cli.main(["init", "job", "--from", str(path.name)]) == 0
    printed = capsys.readouterr().out
    assert "1,500" in printed and "slots: " in printed and "elasticrec train job/job.yaml" in printed
    assert cli.main(["check", "job/job.yaml"]) == 0
    job = load_job("job/job.yaml", ["train.threads=1", "model.hidden=[8]", "model.dim=2"])
    summary = train_job(job)
    assert summary.evaluation is not None
    num_train, num_eval = (next(iter(side.values())).samples for side in (summary.train, summary.evaluation))
    assert num_train + num_eval == 1500
    assert 100 < num_eval < 300


def test_columns_of_csv(tmp_path: Path) -> None:
    job = job_for(write(tmp_path / "a.csv", as_csv(rows(), null="NA")))
    data = job.data
    assert data.columns is not None
    assert (data.format, data.labels) == ("csv", ("click",))
    assert [(slot.name, slot.separator) for slot in data.slots] == [("user_id", None), ("tags", "|"), ("note", None)]
    assert [column.name for column in data.dense] == ["price", "visits"]
    assert (data.columns.time, data.columns.null) == ("at", ("NA",))
    assert [path.resolve() for path in match_files(job, "train")] == [tmp_path / "a.csv"]
    # About the last tenth of the time.
    train, held_out = (list(samples_of(batches_of(job, held_out=side))) for side in (False, True))
    assert len(train) + len(held_out) == 1500
    assert 100 < len(held_out) < 300


def test_columns_without_a_header_and_invalid_names(tmp_path: Path) -> None:
    job = job_for(write(tmp_path / "a.tsv", as_csv(rows(), "\t", header=False)))
    assert job.data.columns is not None
    assert (job.data.columns.header, job.data.columns.delimiter) == (False, "\t")
    assert job.data.columns.names == ("c0", "c1", "c2", "c3", "c4", "c5", "c6")
    assert job.data.labels == ("c0",)
    text = "is_click,user name,1-5\n" + "".join(f"{n % 2},u{n % 7},v{n % 5}\n" for n in range(200))
    write(tmp_path / "b.csv", text.encode())
    job = job_for(tmp_path / "b.csv", force=True)
    assert [(slot.name, slot.column) for slot in job.data.slots] == [("user_name", "user name"), ("1_5", "1-5")]
    assert sum(len(signs[0]) for signs, *_ in samples_of(batches_of(job))) > 100


def test_guesses_are_marked_by_comments(tmp_path: Path) -> None:
    lines = ["label,request,purchase,constant,count,buyer_age,story"]
    for n in range(400):
        lines.append(f"{n % 2},r{n},{n % 3 == 0:d},same,{n * 7 % 401},{20 + n % 50},{'long text ' * 8}{n}")
    write(tmp_path / "a.csv", "\n".join(lines).encode())
    text = write_job(Path("job"), ["a.csv"]).path.read_text()
    assert "- request  # nearly every value differs (400 of 400)" in text
    assert "#   purchase: looks like an outcome that is known only after the sample was shown" in text
    assert "#   constant: one value only" in text
    assert "#   story: free text" in text
    assert "- count  # whole numbers, taken for a quantity" in text
    raw = yaml.safe_load(text)
    assert raw["data"]["columns"]["sparse"] == ["request"]
    assert raw["data"]["columns"]["dense"] == ["count", "buyer_age"]


def test_tables_of_other_tools(tmp_path: Path) -> None:
    lines = [
        ",user,is_click,price,ts",
        *(f'{n},u{n % 9},{n % 2 == 0},"{n % 7},5",{FIRST_AT + n}000' for n in range(300)),
    ]
    job = job_for(write(tmp_path / "pandas.csv", "\n".join(lines).encode()))
    assert (job.data.labels, [slot.name for slot in job.data.slots]) == (("is_click",), ["user"])
    text = Path("job/job.yaml").read_text()
    assert "(a column): has no name" in text and "price: numbers with a decimal comma" in text
    assert job.data.columns is not None and job.data.columns.time == "ts"
    assert sum(batch.num_samples for batch in batches_of(job)) > 200


def test_the_number_of_long_lines_is_estimated(tmp_path: Path) -> None:
    lines = [f"1 {n % 2} " + " ".join(f"{n * k}:{k}" for k in range(1, 1500)) for n in range(600)]
    detection = write_job(Path("job"), [str(write(tmp_path / "a.txt", "\n".join(lines).encode()))]).detection
    assert detection is not None and detection.num_samples is not None
    assert detection.num_inspected < 590 < detection.num_samples < 700


def test_the_number_of_many_samples_is_estimated(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", as_csv(rows(20_000)))
    detection = write_job(Path("job"), [str(path)]).detection
    assert detection is not None and detection.num_samples is not None
    assert 5990 < detection.num_inspected <= 6000
    assert abs(detection.num_samples - 20_000) < 1000
    # The start, middle and end were inspected, so the split is near the end of the time.
    held_out = len(list(samples_of(batches_of(load_job("job/job.yaml"), held_out=True))))
    assert 1000 < held_out < 4000


def test_the_label_is_found_or_given(tmp_path: Path, capsys: Capture) -> None:
    lines = ["user,flag,bought,rate", *(f"u{n % 9},{n % 2},{n % 3 == 0:d},{n % 5 / 4}" for n in range(300))]
    write(tmp_path / "a.csv", "\n".join(lines).encode())
    assert job_for(tmp_path / "a.csv").data.labels == ("flag",)
    assert job_for(tmp_path / "a.csv", label="bought", force=True).data.labels == ("bought",)
    assert job_for(tmp_path / "a.csv", label="rate", force=True).data.labels == ("rate",)
    assert cli.main(["init", "job", "--from", "a.csv", "--label", "user", "--force"]) == 2
    assert capsys.readouterr().err == "error: a.csv: column `user`: expected labels from 0 to 1, got such as `u0`\n"
    assert cli.main(["init", "job", "--from", "a.csv", "--label", "nope", "--force"]) == 2
    assert "expected a column `nope` for the label, got user, flag, bought, rate" in capsys.readouterr().err
    write(tmp_path / "b.csv", b"user,item\n" + b"".join(b"u%d,i%d\n" % (n, n % 7) for n in range(50)))
    assert cli.main(["init", "other", "--from", "b.csv"]) == 2
    assert "b.csv: expected a column of 0 and 1 for the label, got none in user, item" in capsys.readouterr().err
    assert not Path("other").exists()


def test_slots_and_labels_of_slot_text(tmp_path: Path) -> None:
    extra = b"".join(b"1 0 5:%d 6:%d 7:name\n" % (n, n + 1) for n in range(100, 110))
    job = job_for(write(tmp_path / "a.txt", as_slots(rows()) + extra))
    assert [slot.name for slot in job.data.slots] == [*map(str, range(100, 111)), "name"]
    lines = [f"2 {n % 3} buy={n % 2} {n % 40}:1 {n % 50}:2" for n in range(300)]
    written = write_job(Path("shared"), [str(write(tmp_path / "b.txt", "\n".join(lines).encode()))])
    assert load_job(written.path).data.labels == ("click", "buy")
    assert written.detection is not None and written.detection.roles.label_rate == pytest.approx(0.5)
    (text,) = written.warnings
    assert "`data.separate_slots: true`" in text


def test_slots_and_dense_values_of_paddlerec(tmp_path: Path) -> None:
    job = job_for(write_kind(tmp_path, "paddlerec", rows()))
    assert sorted(slot.name for slot in job.data.slots) == ["3", "tags", "user"]
    assert [column.name for column in job.data.dense] == ["dense_feature.0", "dense_feature.1"]


def test_nested_json(tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {
                "event": {"click": n % 3 == 0},
                "user": {"id": n % 20, "tags": ["a", "b"][: n % 3]},
                "words": "|".join(f"w{n * k % 7}" for k in range(1 + n % 3)),
                "price": n / 7,
                "new": n % 2 == 0,
            }
        )
        for n in range(300)
    ]
    job = job_for(write(tmp_path / "a.jsonl", "\n".join(lines).encode()))
    assert job.data.labels == ("event.click",)
    assert [slot.name for slot in job.data.slots] == ["user.id", "user.tags", "words", "new"]
    assert [column.name for column in job.data.dense] == ["price"]
    samples = [*samples_of(batches_of(job)), *samples_of(batches_of(job, held_out=True))]
    assert len(samples) == 300
    assert sum(labels[0] for *_, labels, _ in samples) == 100
    assert sum(len(signs[1]) for signs, *_ in samples) == 300
    assert sum(len(signs[2]) for signs, *_ in samples) == 600
    # Requests have no label.
    batch = line_parser(job, _core.Parser(json.dumps(job.features())))(b'{"user": {"id": 3}, "price": 2}\n{}\n')
    assert [len(signs[0]) for signs, *_ in samples_of([batch])] == [1, 0]


def test_parquet_types(tmp_path: Path) -> None:
    count = 300
    write_parquet(
        tmp_path / "a.parquet",
        rows(count),
        click=[n % 2 == 0 for n in range(count)],
        at=pa.array([FIRST_AT + n * 3600 for n in range(count)], pa.timestamp("s")),
        shop_id=[float(n % 9) for n in range(count)],
        vector=[[0.5, 1.0]] * count,
        holes=pa.array([0.5, float("nan"), None] * (count // 3)),
        note=pa.array(["x", "y", None] * (count // 3)).dictionary_encode(),
    )
    written = write_job(Path("job"), ["a.parquet"])
    job = load_job(written.path)
    assert [slot.name for slot in job.data.slots] == ["user_id", "tags", "note"]
    assert [column.name for column in job.data.dense] == ["price", "visits", "shop_id"]
    assert job.data.columns is not None and job.data.columns.time == "at"
    text = written.path.read_text()
    assert "stored as floating-point numbers; if it is an id, store whole numbers" in text
    assert "vector: its type cannot be a feature" in text
    assert "holes: has NaN in 100 of 300 rows; store null for missing values" in text
    held_out = len(list(samples_of(batches_of(job, held_out=True))))
    assert 15 < held_out < 80


def test_directories_of_hours(tmp_path: Path) -> None:
    for hour in range(20):
        write(tmp_path / f"logs/202601{1 + hour // 24:02}/{hour % 24:02}/part-0", as_csv(rows(60, hour)))
    # Files beside the data are ignored.
    write(tmp_path / "logs/job.yaml", b"name: old\n")
    write(tmp_path / "logs/_SUCCESS", b"")
    job = job_for(tmp_path / "logs")
    assert len(match_files(job, "train")) == 18
    assert [path.parent.name for path in match_files(job, "eval")] == ["18", "19"]
    assert sum(batch.num_bad for batch in batches_of(job)) == 0
    assert job.data.columns is not None and job.data.columns.time is None


def test_globs_and_several_sources(tmp_path: Path) -> None:
    for number in range(3):
        write(tmp_path / f"in/day-{number}.csv.gz", as_csv(rows(100, number)))
    write_job(Path("job"), ["in/day-*.gz"])
    job = load_job("job/job.yaml")
    assert len(match_files(job, "train")) == 3
    assert yaml.safe_load(Path("job/job.yaml").read_text())["data"]["train"] == ["../in/day-*.gz"]
    write_job(Path("two"), ["in/day-0.csv.gz", "in/day-2.csv.gz"])
    assert len(match_files(load_job("two/job.yaml"), "train")) == 2


def test_a_job_without_data(capsys: Capture) -> None:
    assert cli.main(["init", "new"]) == 0
    assert "wrote new/job.yaml: a job to fill in" in capsys.readouterr().out
    job = load_job("new/job.yaml")
    assert (job.name, job.data.format) == ("new", "slots")
    before = Path("new/job.yaml").read_text()
    Path("new/job.yaml").write_text("mine")
    assert cli.main(["init", "new"]) == 2
    assert capsys.readouterr().err == "error: new/job.yaml: exists already (--force replaces it)\n"
    assert Path("new/job.yaml").read_text() == "mine"
    assert cli.main(["init", "new", "--force"]) == 0
    assert Path("new/job.yaml").read_text() == before


def test_a_reader_is_not_overwritten(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", as_json(rows(50)))
    write(tmp_path / "job/reader.py", b"mine")
    with pytest.raises(Exception, match=r"job/reader\.py: exists already"):
        write_job(Path("job"), ["a.jsonl"])
    assert not Path("job/job.yaml").exists()


APACHE = b'127.0.0.1 - - [10/Oct/2000:13:55:36 -0700] "GET /a.gif HTTP/1.0" 200 2326 and more\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a.dat: is empty, expected samples"),
        (b"\n \n\n", "a.dat: expected samples, got only blank lines"),
        (
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" * 9,
            "a.dat: expected text, gzip, zstd or Parquet, got binary data `89 50 4e 47",
        ),
        (
            b"\xff\xfe\x31\x00" * 9,
            "a.dat: expected UTF-8 text, got UTF-16; convert it: iconv -f UTF-16 -t UTF-8 a.dat > a.dat.utf8",
        ),
        (b"BZh91AY&SY", "a.dat: expected text, gzip, zstd or Parquet, got bzip2"),
        (b"PAR1 is not all", "a.dat: expected a Parquet file"),
        (gzip.compress(b"1 0 5:1\n" * 999, mtime=0)[:-20], "a.dat: damaged or truncated in line"),
        (APACHE * 3 + b"x\n", "got the first line `127.0.0.1 - - [10/Oct"),
        (b'[{"click": 1}]\n', 'got the first line `[{"click": 1}]`; write a reader for it'),
        (b"click,user\n", "a.dat: expected samples after the header, got none"),
        (b"1 3:0.5 9:1\n0 4:1 9:1\n" * 9, "got the first line `1 3:0.5 9:1`; write a reader for it"),
        (b"{not json}\n", "a.dat:1: expected a JSON object, got `{not json}`"),
    ],
)
def test_unreadable_data_is_one_error_line(tmp_path: Path, capsys: Capture, content: bytes, message: str) -> None:
    (tmp_path / "a.dat").write_bytes(content)
    assert cli.main(["init", "job", "--from", "a.dat"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not Path("job").exists()


def test_missing_and_mixed_files_are_refused(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["init", "--from", "nope.csv"]) == 2
    assert capsys.readouterr().err == "error: nope.csv: no such file\n"
    (tmp_path / "empty").mkdir()
    assert cli.main(["init", "--from", "empty"]) == 2
    assert capsys.readouterr().err == "error: empty: expected data files, got none\n"
    write(tmp_path / "a.csv", as_csv(rows(20)))
    write(tmp_path / "b.txt", as_slots(rows(20)))
    assert cli.main(["init", "--from", "a.csv", "--from", "b.txt"]) == 2
    assert capsys.readouterr().err == "error: b.txt: expected csv as in a.csv, got slots; give files of one format\n"


def test_column_names_that_yaml_must_quote(tmp_path: Path) -> None:
    names = ["y", "no", "null", "1e3", "a: b", "é", "#x", "ab"]
    table = {name: [f"{name}{n % 4}" for n in range(100)] for name in names} | {"click": [n % 2 for n in range(100)]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    job = job_for(tmp_path / "a.parquet")
    assert [slot.column or slot.name for slot in job.data.slots] == names


def test_without_pyarrow_the_error_is_one_line(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", rows(20))
    write(tmp_path / "a.csv", as_csv(rows(200)))
    for arguments, ok in (
        (["init", "one", "--from", "a.parquet"], False),
        (["data", "convert", "a.csv", "b.parquet"], False),
        (["init", "two", "--from", "a.csv"], True),
        (["data", "stats", "two/job.yaml"], True),
        (["data", "convert", "a.csv", "b.jsonl.gz"], True),
    ):
        code = (
            f"import sys; sys.modules['pyarrow'] = None\nfrom elasticrec.cli import main; sys.exit(main({arguments}))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        expected = "error: this command needs `pyarrow`; install it: pip install 'elasticrec[train]'\n"
        assert (done.returncode, done.stderr) == ((0, "") if ok else (2, expected))


def test_summary(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", as_slots(rows()))
    lines = summary_lines(write_job(Path("job"), ["a.txt"]))
    assert lines[0].startswith("found slot text `show click sign:slot …`: 1 file, 1,500 of about 1,500 samples")
    assert lines[2] == "  3 slots: 101-103"
