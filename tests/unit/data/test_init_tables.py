"""`init` on unusual tables: headers, times, numbers, labels, encodings and quotes."""

import contextlib
import gzip
import os
import shlex
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from elasticrec import cli
from elasticrec.config import load_job
from elasticrec.data.init.job_file import write_job
from elasticrec.training.loop import train_job
from support.tables import batches_of, samples_of, write

Capture = pytest.CaptureFixture[str]
COUNT = 400


pytestmark = pytest.mark.usefixtures("own_directory")


def table(header: str, row: Callable[[int], str], count: int = COUNT) -> str:
    return "\n".join([header, *map(row, range(count))]) + "\n"


def columns_of(content: str | bytes) -> tuple[dict[str, Any], str]:
    """Return `data.columns` and the text of the job for a file, after a training with it."""
    write(Path("a.csv"), content.encode() if isinstance(content, str) else content)
    text = write_job(Path("job"), ["a.csv"], force=True).path.read_text()
    train_job(load_job("job/job.yaml", ["train.threads=1", "model.hidden=[4]", "model.dim=2"]), fresh=True)
    return yaml.safe_load(text)["data"]["columns"], text


def refused(capsys: Capture, name: str, *options: str) -> str:
    """Return the error line of `init` for a file; nothing may be written."""
    assert cli.main(["init", "job", "--from", name, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert not Path("job").exists()
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("header", "label", "slots"),
    [
        # A data frame without column names.
        ("0,1,2,3", "0", ["1", "2"]),
        ("1,2,3,4", "1", ["2", "3"]),
        # A word that cannot be a value of its column marks the line as a header, even if the others occur as values.
        ("click,101,102,2020", "click", ["101", "102"]),
        ("label,u1,7,2", "label", ["u1", "7"]),
    ],
)
def test_numbers_can_be_column_names(header: str, label: str, slots: list[str]) -> None:
    text = table(header, lambda n: f"{n % 2},{n * 31 % 97},{n * 17 % 89},{n % 7 + 0.5}")
    columns, _ = columns_of(text)
    assert (columns["labels"], columns["sparse"]) == ([label], slots)
    assert "header" not in columns
    assert sum(batch.num_samples for batch in batches_of(load_job("job/job.yaml"))) > 300


@pytest.mark.parametrize("first", ["1,77,5.5", "0,NA,5.5", "0,abc,5.5", ",,"])
def test_a_first_sample_is_not_a_header(first: str) -> None:
    write(Path("a.csv"), table(first, lambda n: f"{n % 2},{n % 9},{n % 7 + 0.5}").encode())
    detection = write_job(Path("job"), ["a.csv"]).detection
    assert detection is not None and detection.columns["header"] is False


def test_a_first_sample_with_a_missing_number_is_not_a_header() -> None:
    """Labels are shares, so the values of the first sample do not repeat."""
    write(Path("a.csv"), table("0.9876,NA,7", lambda n: f"{n / 1000},{n % 9},u{n % 9}").encode())
    detection = write_job(Path("job"), ["a.csv"], label="c0").detection
    assert detection is not None and detection.columns["header"] is False


@pytest.mark.parametrize(
    ("header", "repeated"), [("click,user,user,price", "`user` 2 times"), ("click,,,price", "an empty name 2 times")]
)
def test_a_repeated_column_name_is_refused(capsys: Capture, header: str, repeated: str) -> None:
    write(Path("a.csv"), table(header, lambda n: f"{n % 2},u{n % 9},v{n % 5},{n % 7}.5").encode())
    line = refused(capsys, "a.csv")
    assert line == f"a.csv:1: expected each column once in the header, got {repeated}; rename them"


def times(odd: dict[int, str | None], count: int = COUNT) -> list[str | None]:
    return [odd.get(n, f"2026-01-{1 + n * 20 // count:02d}T{n % 24:02d}:00:00") for n in range(count)]


def test_one_bad_time_among_many_is_a_comment() -> None:
    at = times({77: "unknown"}, 4000)
    columns, text = columns_of(table("click,user,at", lambda n: f"{n % 2},u{n % 9},{at[n]}", 4000))
    assert (columns["time"], columns["sparse"]) == ("at", ["user"])
    assert "    # 1 of 4,000 are bad records, such as `unknown`\n    time: at\n" in text
    assert "time" in yaml.safe_load(text)["data"]["eval"]


@pytest.mark.parametrize(("odd", "reason"), [("soon", "a time, but `soon` is not one (1 of 400)"), ("", "a time that")])
def test_a_time_column_with_too_many_gaps_is_left_out(odd: str, reason: str) -> None:
    at = times({77: odd})
    columns, text = columns_of(table("click,user,at", lambda n: f"{n % 2},u{n % 9},{at[n]}"))
    assert "time" not in columns and columns["sparse"] == ["user"]
    assert f"#   at: {reason}" in text


def test_an_odd_number_among_times() -> None:
    columns, text = columns_of(table("click,user,ts", lambda n: f"{n % 2},u{n % 9},{n != 77 and 1_700_000_000 + n}"))
    assert "ts" not in columns["sparse"] and columns.get("time") is None, "`False` is no time, and 1 of 400 is too many"
    text_of = table("click,user,ts", lambda n: f"{n % 2},u{n % 9},{1_700_000_000 + n * 60 if n != 77 else 0}")
    columns, text = columns_of(text_of)
    assert columns["time"] == "ts"
    assert "# 1 of 400 are odd times, such as `0`" in text


@pytest.mark.parametrize("odd", [None, "unknown", "2026-02-30T00:00:00"])
def test_times_as_text_in_parquet(odd: str | None, capsys: Capture) -> None:
    count = 4000
    at = times({77: odd} if odd else {}, count)
    labels, users = [n % 2 for n in range(count)], [f"u{n % 9}" for n in range(count)]
    pq.write_table(pa.table({"click": labels, "user": users, "at": at}), "a.parquet")
    raw = yaml.safe_load(write_job(Path("job"), ["a.parquet"]).path.read_text())["data"]
    assert (raw["columns"]["time"], raw["columns"]["sparse"]) == ("at", ["user"])
    job = load_job("job/job.yaml", ["train.threads=1", "model.hidden=[4]", "model.dim=2"])
    sides = [list(batches_of(job, held_out=side)) for side in (False, True)]
    num_train, num_eval = (sum(batch.num_samples for batch in side) for side in sides)
    bad = [line for side in sides for batch in side for line in batch.bad]
    assert num_train + num_eval + len(bad) == count and 200 < num_eval < 900
    row = f"{Path.cwd() / 'job/../a.parquet'}: row 77"
    assert bad == ([f"{row}: time: expected seconds since 1970 or a date, got `{odd}`"] if odd else [])
    # The job allows this number of bad records.
    train_job(job)
    assert ("bad record: " in capsys.readouterr().err) == (odd is not None)


def test_infinite_numbers_are_missing_values_with_a_comment() -> None:
    values = {3: "inf", 7: "-inf", 9: "Infinity"}
    columns, text = columns_of(table("click,user,price", lambda n: f"{n % 2},u{n % 9},{values.get(n % 50, n / 3)}"))
    read = load_job("job/job.yaml").data.columns
    assert columns["dense"] == ["price"] and read is not None and read.null == ("-inf", "Infinity", "inf")
    assert "# texts that mean a missing value; `inf` and `-inf` and `Infinity` too, as a model cannot learn" in text


@pytest.mark.parametrize(("value", "shown"), [(float("nan"), "NaN"), (float("inf"), "inf"), (float("-inf"), "-inf")])
def test_parquet_numbers_that_are_not_finite(value: float, shown: str) -> None:
    prices = [value if n == 3 else n / 3 for n in range(COUNT)]
    labels, users = [n % 2 for n in range(COUNT)], [f"u{n % 9}" for n in range(COUNT)]
    pq.write_table(pa.table({"click": labels, "user": users, "price": prices}), "a.parquet")
    text = write_job(Path("job"), ["a.parquet"]).path.read_text()
    assert f"#   price: has {shown} in 1 of 400 rows; store null for missing values" in text


def test_json_numbers_that_are_not_finite() -> None:
    lines = [
        f'{{"click": {n % 2}, "user": "u{n % 9}", "price": {"Infinity" if n % 9 == 3 else n / 3}}}' for n in range(90)
    ]
    write(Path("a.jsonl"), "\n".join(lines).encode())
    text = write_job(Path("job"), ["a.jsonl"]).path.read_text()
    assert "- price  # inf in it, read as missing" in text
    samples = list(samples_of(batches_of(load_job("job/job.yaml"))))
    assert sum(batch.num_bad for batch in batches_of(load_job("job/job.yaml"))) == 0 and len(samples) > 50


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("label", ("-1", "1")),
        ("label", ("-1.0", "1.0")),
        ("click", ("no", "yes")),
        ("target", ("FALSE", "TRUE")),
        ("y", ("1", "2")),
        # Not the name of a label, but the only candidate.
        ("flag", ("n", "y")),
    ],
)
def test_labels_with_two_other_values_are_refused(capsys: Capture, name: str, values: Sequence[str]) -> None:
    write(Path("a.csv"), table(f"{name},user", lambda n: f"{values[n % 2]},u{n % 9}").encode())
    problem = (
        f"column `{name}`: expected 0 and 1 for a label, got `{values[0]}` and `{values[1]}`; write 0 and 1 instead"
    )
    hint = ", or map them in a reader of your own (`data.reader`, see docs/guide/data.md)"
    assert refused(capsys, "a.csv") == f"a.csv: {problem}{hint}"
    assert refused(capsys, "a.csv", "--label", name) == f"a.csv: {problem}{hint}"
    pq.write_table(pa.table({name: list(values) * 50, "user": list("abcde") * 20}), "a.parquet")
    assert refused(capsys, "a.parquet") == f"a.parquet: {problem}"


LATIN = table("click,user,city", lambda n: f"{n % 2},u{n % 9},Münch{n % 5}")


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        (
            "latin-1",
            "got `1,u1,M\\xfcnch1`; convert it: iconv -f ENCODING -t UTF-8 'my file.csv' > 'my file.csv.utf8', ",
        ),
        ("utf-16", "got UTF-16; convert it: iconv -f UTF-16 -t UTF-8 'my file.csv' > 'my file.csv.utf8'"),
        ("utf-16-le", "got UTF-16; convert it: iconv -f UTF-16LE -t UTF-8"),
        ("utf-16-be", "got UTF-16; convert it: iconv -f UTF-16BE -t UTF-8"),
        ("utf-32", "got UTF-32; convert it: iconv -f UTF-32 -t UTF-8 'my file.csv' > 'my file.csv.utf8'"),
        ("utf-32-le", "got UTF-32; convert it: iconv -f UTF-32LE -t UTF-8"),
        ("utf-32-be", "got UTF-32; convert it: iconv -f UTF-32BE -t UTF-8"),
    ],
)
def test_other_encodings_are_refused(capsys: Capture, encoding: str, message: str) -> None:
    write(Path("my file.csv"), LATIN.encode(encoding))
    assert refused(capsys, "my file.csv").startswith(f"my file.csv: expected UTF-8 text, {message}")
    Path("a.csv.gz").write_bytes(gzip.compress(LATIN.encode(encoding)))
    assert "; write it as UTF-8 (`iconv -f " in refused(capsys, "a.csv.gz")


def test_a_few_lines_in_another_encoding_are_a_warning(capsys: Capture) -> None:
    text = table("click,user,city", lambda n: f"{n % 2},u{n % 9},{'Köln' if n == 300 else 'Bonn'}")
    write(Path("a.csv"), text.encode("latin-1"))
    assert cli.main(["init", "job", "--from", "a.csv"]) == 0
    warning = "1 of 401 lines are not UTF-8, such as `0,u3,K\\xf6ln`: their values do not match the values in requests"
    assert capsys.readouterr().err.startswith(f"warning: {warning}")
    assert f"\n# {warning}" in Path("job/job.yaml").read_text()


@pytest.mark.parametrize("every", [1, 100])
def test_line_ends_in_quotes_are_refused(capsys: Capture, every: int) -> None:
    def row(n: int) -> str:
        return f'{n % 2},u{n % 9},"a{n % 5}{"" if n % every else chr(10)}b"'

    write(Path("a.csv"), table("click,user,note", row).encode())
    assert refused(capsys, "a.csv") == (
        'a.csv: expected a sample on each line, got a quoted field with a line end in `0,u0,"a0`; '
        "remove line ends from fields, or write the data as Parquet"
    )


def test_files_without_columns_are_refused(capsys: Capture) -> None:
    pq.write_table(pa.table({}), "a.parquet")
    assert refused(capsys, "a.parquet") == "a.parquet: expected columns, got none"
    write(Path("a.jsonl"), b"{}\n" * 20)
    assert refused(capsys, "a.jsonl") == "a.jsonl: expected columns, got none"


def test_printed_commands_can_be_pasted(capsys: Capture) -> None:
    Path("my data").mkdir()
    write(Path("my data/the log.csv"), table("click,user", lambda n: f"{n % 2},u{n % 9}").encode())
    assert cli.main(["init", "my job", "--from", "my data/the log.csv"]) == 0
    commands = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  elasticrec")]
    assert commands[0] == "elasticrec check 'my job/job.yaml'"
    assert len(commands) == 3
    for command in commands[:2]:
        assert cli.main(shlex.split(command)[1:]) == 0
    assert cli.main(["init", "an other"]) == 0
    assert "  then: elasticrec check 'an other/job.yaml'" in capsys.readouterr().out
    assert cli.main(["publish", "my job/job.yaml"]) == 2
    assert "train it first: elasticrec train 'my job/job.yaml'" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_utf16_and_utf32_of_other_scripts_and_short_fields(capsys: Capture, encoding: str) -> None:
    name = encoding[:6].upper()
    for line in ("1,用户,商品,北京\n", "1\x010\x011\x01a\x01b\n", "1\t0\t1\ta\tb\n"):
        if encoding.startswith("utf-16") and "用" in line:
            # Few of its bytes are 0.
            continue
        Path("a.csv").write_bytes((line * 300).encode(encoding))
        assert f"got {name}; convert it: iconv -f {encoding.upper().replace('-LE', 'LE').replace('-BE', 'BE')} " in (
            refused(capsys, "a.csv")
        )


def test_binary_numbers_are_refused(capsys: Capture) -> None:
    Path("a.dat").write_bytes(struct.pack("<200i", *range(200)))
    assert "got binary data `00 00 00 00 01 00 00 00`" in refused(capsys, "a.dat")


def test_pipes_sockets_and_devices_are_refused(capsys: Capture) -> None:
    """The pipe has no writer, so opening it would block forever."""
    os.mkfifo("p")
    assert refused(capsys, "p") == "`p`: expected a regular file, got a pipe"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind("s")
        assert refused(capsys, "s") == "`s`: expected a regular file, got a socket"
    assert refused(capsys, os.devnull) == f"`{os.devnull}`: expected a regular file, got a device"


def test_names_of_any_bytes_are_printable(capsys: Capture) -> None:
    lines = ["clic\x1bk,us\x85er,c", *(f"{n % 7},u{n % 9},{n % 5}" for n in range(300))]
    write(Path("a.csv"), "\n".join(lines).encode())
    assert "got none in clic\\x1bk, us\\x85er, c; name one" in refused(capsys, "a.csv")
    write(Path("a.csv"), "\n".join(["a\x1b,b,a\x1b", *lines[1:]]).encode())
    assert "got `a\\x1b` 2 times" in refused(capsys, "a.csv")
    write(Path("a.csv"), "\n".join([",".join(f"n{at}" for at in range(99)), *[",".join(["7"] * 99)] * 50]).encode())
    assert "n39 and 59 more; name one" in refused(capsys, "a.csv")
    write(Path("a.txt"), b"a:7 b:8 c:x\na:9 b:7 c:y\n" * 30)
    assert "got none in a, b, c; name one" in refused(capsys, "a.txt")
