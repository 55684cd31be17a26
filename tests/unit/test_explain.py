"""`explain`: signs and rows with counts that match the data, and the scores of `predict`."""

import collections
import gzip
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elasticrec import _core, cli
from elasticrec.config import Job
from elasticrec.errors import ConfigError, SampleError
from elasticrec.explain import Row, RowAddress, _pool, explain, open_source, read_sample, text_lines
from elasticrec.publish.local import publish_run
from elasticrec.run import Run
from elasticrec.training.loop import train_job
from elasticrec.training.predict import load_checkpoint
from support.small import MakeJob, WriteSamples

Capture = pytest.CaptureFixture[str]
# A frequent sign, an unknown sign, and a sign that is repeated; slot 2 is empty.
SAMPLE = "1 0 1:0 999999:0 1001:1 1001:1"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob, write_samples: WriteSamples) -> Job:
    monkeypatch.chdir(tmp_path)
    write_samples(count=640)
    slots = ["0", {"name": "1", "pooling": "mean"}, {"name": "2", "pooling": "sqrtn"}]
    job = make_job(data={"slots": slots, "labels": ["click"]}, train={"epochs": 2})
    train_job(job)
    return job


def counted(path: str, sign: str, epochs: int) -> tuple[int, int]:
    """Count shows and clicks of a sign in the file, once per occurrence in a line."""
    show = click = 0
    for line in Path(path).read_text().splitlines():
        shows, clicks, *fields = line.split()
        times = collections.Counter(field.partition(":")[0] for field in fields)[sign]
        show += int(shows) * times
        click += int(clicks) * times
    return epochs * show, epochs * click


def test_a_checkpoint_explains_a_sample(job: Job) -> None:
    result = explain(SAMPLE.encode(), open_source("small", None))
    loaded = load_checkpoint(Run.of(job))
    batch = loaded.parser.parse(SAMPLE.encode(), labels=False)
    assert result["source"] == str(loaded.checkpoint.path)
    assert [[sign["sign"] for sign in slot["signs"]] for slot in result["slots"]] == [[1, 999999], [1001, 1001], []]
    known, unknown = result["slots"][0]["signs"]
    assert unknown == {"sign": 999999, "found": False}
    row = loaded.state.embedding.table.get(1)
    assert row is not None
    assert (known["found"], known["show"], known["click"], known["weights"]) == (True, row[0], row[1], row[3])
    assert (row[0], row[1]) == counted("train.txt", "1", 2)
    pooled = loaded.state.embedding.pull(batch).detach().numpy()[0]
    np.testing.assert_array_equal([slot["pooled"] for slot in result["slots"]], pooled)
    assert result["scores"] == {"click": float(loaded.predict(SAMPLE.encode())[0, 0])}


def test_a_published_model_pools_like_the_checkpoint(job: Job) -> None:
    publish_run(Run.of(job))
    ours, theirs = (
        explain(SAMPLE.encode(), open_source("small", None)),
        explain(SAMPLE.encode(), open_source(None, Path("models/small"))),
    )
    for left, right in zip(ours["slots"], theirs["slots"], strict=True):
        np.testing.assert_allclose(left["pooled"], right["pooled"], rtol=1e-6)
        assert [sign["found"] for sign in left["signs"]] == [sign["found"] for sign in right["signs"]]
        assert all(sign["show"] is None for sign in right["signs"] if sign["found"])
    assert theirs["scores"]["click"] == pytest.approx(ours["scores"]["click"], abs=1e-5)
    assert "a published version has no shows and clicks; use --checkpoint to see them" in text_lines(theirs)


def test_a_row_of_zeros_is_a_row(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_run(Run.of(job))
    read = _core.read_cube
    monkeypatch.setattr(
        "elasticrec.explain._core.read_cube", lambda paths, signs: (0 * read(paths, signs)[0], read(paths, signs)[1])
    )
    result = explain(SAMPLE.encode(), open_source(None, Path("models/small")))
    assert [sign["found"] for sign in result["slots"][0]["signs"]] == [True, False]


def test_text_output(job: Job, capsys: Capture) -> None:
    capsys.readouterr()
    assert cli.main(["explain", SAMPLE, "--checkpoint", "small"]) == 0
    lines = capsys.readouterr().out.splitlines()
    show, click = counted("train.txt", "1", 2)
    assert lines[0] == "runs/small/checkpoints/step-000000000020: 3 of 4 signs have a row"
    assert lines[1].startswith("slot 0: sum [")
    assert lines[2].startswith(f"  1: show {show:,} click {click:,} weights [")
    assert lines[3] == "  999999: no row, reads as zero"
    assert lines[4].startswith("slot 1: mean [") and lines[5] == lines[6]
    assert lines[7] == "slot 2: empty, reads as zero"
    assert lines[8].startswith("click: 0.") and len(lines) == 9
    assert cli.main(["explain", SAMPLE, "--checkpoint", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == explain(SAMPLE.encode(), open_source("small", None))


def test_dense_values_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob) -> None:
    monkeypatch.chdir(tmp_path)
    row = "\t".join(["1", "3", *["0"] * 12, *[f"{column:08x}" for column in range(26)]])
    Path("train.txt").write_text(f"{row}\n")
    train_job(make_job(data={"format": "criteo", "slots": None, "dense": None}))
    result = explain(row.encode(), open_source("small", None))
    assert list(result["dense"]) == [f"I{number}" for number in range(1, 14)]
    assert result["dense"]["I1"] == pytest.approx(np.log(4))
    assert result["slots"][0]["signs"][0]["show"] == 1
    assert "dense I1: 1.38629" in text_lines(result)


def test_a_sample_is_read_from_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a:b.txt"
    path.write_text("one\ntwo\n")
    assert read_sample("1 0 5:0", "slots") == b"1 0 5:0"
    assert read_sample(f"@{path}:2", "slots") == b"two\n"
    assert read_sample(f"@{path}", "slots") == b"one\n"
    path.write_text("\ufeffone\n")
    assert read_sample(f"@{path}", "slots") == b"one\n", "the byte order mark is removed, as the reader does"
    assert read_sample("@a b.parquet:7", "parquet") == RowAddress(Path("a b.parquet"), 7)
    assert read_sample("@a.parquet", "parquet") == RowAddress(Path("a.parquet"), 0)

    class Input:
        buffer = io.BytesIO(b"first\nsecond\n")

    monkeypatch.setattr("sys.stdin", Input)
    assert read_sample("-", "slots") == b"first\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SAMPLE], "explain: expected one of --checkpoint, --model and --server"),
        (
            [SAMPLE, "--checkpoint", "small", "--model", "m"],
            "explain: expected one of --checkpoint, --model and --server",
        ),
        ([SAMPLE, "--model", "m", "--best"], "explain: --best needs --checkpoint"),
        ([SAMPLE, "--model", "m"], "m: no such model, expected"),
        (["1 0 x:0", "--checkpoint", "small"], "line 1: slot `0`: sign `x` is not a u64"),
        ([f"{SAMPLE}\n{SAMPLE}", "--checkpoint", "small"], "sample: expected 1, got 2"),
        (["", "--checkpoint", "small"], "sample: expected 1, got none: the line is blank or holds no sample"),
        (["@train.txt:641", "--checkpoint", "small"], "train.txt: expected at least 641 lines, got 640"),
        (["@none.txt:1", "--checkpoint", "small"], "none.txt: no such file or directory"),
    ],
)
def test_user_errors_are_one_line(job: Job, capsys: Capture, arguments: list[Any], message: str) -> None:
    capsys.readouterr()
    assert cli.main(["explain", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_a_sequence_is_not_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob, write_samples: WriteSamples
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(count=300)
    slots = ["0", {"name": "1", "sequence": 3, "share": "0"}, "2"]
    train_job(make_job(data={"slots": slots}))
    publish_run(Run(Path("runs/small")))
    line = b"1 0 1:0 1001:1 999999:1 1002:1 1003:1 1:2"
    ours = explain(line, open_source("small", None))
    theirs = explain(line, open_source(None, Path("models/small")))
    weights = [sign.get("weights", [0.0] * 5) for sign in ours["slots"][1]["signs"]]
    assert [sign["sign"] for sign in ours["slots"][1]["signs"]] == [999999, 1002, 1003], "the last three"
    np.testing.assert_array_equal(ours["slots"][1]["pooled"], np.array(weights, np.float32).flatten())
    for left, right in zip(ours["slots"], theirs["slots"], strict=True):
        np.testing.assert_allclose(left["pooled"], right["pooled"], rtol=1e-6)
    assert theirs["scores"]["click"] == pytest.approx(ours["scores"]["click"], abs=1e-5)


def test_a_sample_that_starts_with_a_dash_is_not_an_option(job: Job, capsys: Capture) -> None:
    """`- -` stands for show and click."""
    train_job(job)
    assert cli.main(["explain", "- - 1:0 1001:1", "--checkpoint", job.name]) == 0
    assert "1001" in capsys.readouterr().out
    assert cli.main(["explain", "1 0 1:0", "--chekpoint", job.name]) == 2


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_line_of_a_compressed_file(job: Job, capsys: Capture, kind: str) -> None:
    text = Path("train.txt").read_bytes()
    if kind == "gz":
        Path("a.dat").write_bytes(gzip.compress(text))
    else:
        with pa.output_stream("a.dat", compression="zstd") as file:
            file.write(text)
    plain, compressed = (read_sample(f"@{name}:77", "slots") for name in ("train.txt", "a.dat"))
    assert plain == compressed == text.splitlines(keepends=True)[76]
    assert cli.main(["explain", "@a.dat:641", "--checkpoint", "small"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: a.dat: expected at least 641 lines, got 640"
    Path("a.dat").write_bytes(Path("a.dat").read_bytes()[:-20])
    assert cli.main(["explain", "@a.dat:640", "--checkpoint", "small"]) == 2
    assert capsys.readouterr().err.startswith("error: a.dat: damaged or truncated: ")


def test_a_row_of_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob, capsys: Capture) -> None:
    monkeypatch.chdir(tmp_path)
    prices = [float("nan") if n == 250 else n / 10 for n in range(300)]
    table = pa.table({"click": [n % 2 for n in range(300)], "user": [f"u{n % 7}" for n in range(300)], "price": prices})
    pq.write_table(table, "train.parquet", row_group_size=70)
    columns = {"labels": "click", "sparse": ["user"], "dense": ["price"], "weight": None}
    data = {"format": "parquet", "train": "train.parquet", "slots": None, "columns": columns, "max_bad_ratio": 0.01}
    train_job(make_job(data=data))
    publish_run(Run(Path("runs/small")))
    source = open_source("small", None)
    for row in (0, 69, 70, 299):
        result = explain(read_sample(f"@train.parquet:{row}", "parquet"), source)
        assert result["dense"]["price"] == pytest.approx(np.log(1 + row / 10), rel=1e-6)
    pq.write_table(table.slice(0, 100), "some.parquet")
    model = load_checkpoint(Run(Path("runs/small")))
    expected = np.concatenate(list(model.predict_file("some.parquet")))[:, 0]
    explained = [explain(RowAddress(Path("train.parquet"), row), source)["scores"]["click"] for row in (3, 71)]
    assert explained == pytest.approx([expected[3], expected[71]], rel=1e-6)

    def error(*arguments: str) -> str:
        capsys.readouterr()
        assert cli.main(["explain", *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("error: ")

    of_run = ("--checkpoint", "small")
    assert error("@train.parquet:300", *of_run) == ("train.parquet: expected row 300 (counted from 0), got 300 rows")
    assert error("@nofile.parquet:1", *of_run) == "nofile.parquet: no such file or directory"
    assert error("@train.parquet:-1", *of_run) == "train.parquet: expected a row number of at least 0, got -1"
    assert error("@train.parquet:250", *of_run) == (
        "train.parquet: row 250: dense `price`: expected a finite number, got NaN"
    )
    for text in ("1,u3,4", "-"):
        assert error(text, *of_run) == (
            "sample: format `parquet` has no lines, expected `@FILE:ROW`, with rows counted from 0"
        )
    assert error("@train.parquet:3", "--model", "models/small") == (
        "models/small/1: Parquet needs the job's columns; use --checkpoint RUN instead of --model"
    )


def test_invalid_sample_addresses_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text, format, message in [
        ("@a.parquet:-1", "parquet", "a.parquet: expected a row number of at least 0, got -1"),
        ("@a.txt:-1", "slots", "a.txt: expected a line number of at least 1, got -1"),
        ("@a.txt:0", "slots", "a.txt: expected a line number of at least 1, got 0"),
    ]:
        with pytest.raises(SampleError) as caught:
            read_sample(text, format)
        assert str(caught.value) == message
    os.mkfifo("pipe")
    with pytest.raises(ConfigError, match=r"^`pipe`: expected a regular file, got a pipe$"):
        read_sample("@pipe:1", "slots")
    Path("a:-1").write_text("one\n")
    assert read_sample("@a:-1", "slots") == b"one\n"


def test_pooling_by_sum_mean_and_sqrtn() -> None:
    rows = [Row([1.0, 2.0]), None, Row([3.0, 4.0]), Row([4.0, 10.0])]
    for pooling, expected in {"sum": [8.0, 16.0], "mean": [2.0, 4.0], "sqrtn": [4.0, 8.0]}.items():
        assert _pool(rows, 2, {"pooling": pooling}).tolist() == expected
        assert _pool([], 2, {"pooling": pooling}).tolist() == [0.0, 0.0]


def test_parquet_is_not_read_as_lines(job: Job, capsys: Capture) -> None:
    pq.write_table(pa.table({"click": [1]}), "a.parquet")
    assert cli.main(["explain", "@a.parquet:1", "--checkpoint", "small"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: a.parquet: expected lines of format `slots`, got Parquet"
