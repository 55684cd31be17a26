"""`predict`: how files are read, what is printed, and how scores are compared with labels."""

import gzip
import io
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.cli import main
from elasticrec.errors import SampleError, UnavailableError
from elasticrec.predict import Scores, ScoreSource, score_lines, scores_of, with_metrics
from elasticrec.score_metrics import LabelReader, ScoreMetrics
from support.certificates import write_certificates
from support.scripted import CLOSE, HANG, counted, scripted

Capture = pytest.CaptureFixture[str]

FEATURES: dict[str, Any] = {
    "format": "slots",
    "hash": 1,
    "slots": [{"name": "0", "pooling": "sum"}],
    "dense": [],
    "labels": ["click"],
}
METADATA = {"labels": ["click"], "features": FEATURES}


def score(text: bytes) -> Scores:
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        if line == b"bad":
            raise SampleError(f"line {number}: not good")
    return np.array([[len(line)] for line in lines], np.float32).reshape(len(lines), 1)


def test_a_bad_line_has_its_number_in_the_file() -> None:
    text = b"ok\n" * 1500 + b"\n" + b"bad\n" + b"ok\n" * 10
    with pytest.raises(SampleError, match=r"^f\.txt:1502: not good$"):
        list(score_lines(io.BytesIO(text), "f.txt", ScoreSource(score)))


def test_long_lines_are_scored_in_smaller_chunks() -> None:
    sizes = []

    def counted(text: bytes) -> Scores:
        sizes.append(len(text))
        return score(text)

    text = (b"x" * 50_000 + b"\n") * 100
    assert sum(len(scores) for scores in score_lines(io.BytesIO(text), "f.txt", ScoreSource(counted))) == 100
    assert max(sizes) < 2 << 20


def test_blank_lines_have_no_scores_and_missing_scores_are_an_error() -> None:
    assert list(score_lines(io.BytesIO(b"\n \n"), "f.txt", ScoreSource(score))) == []
    with pytest.raises(UnavailableError, match="expected 3 scores, got 1"):
        source = ScoreSource(lambda text: score(text)[:1], is_remote=True)
        list(score_lines(io.BytesIO(b"a\nb\nc\n"), "f.txt", source))


def test_a_header_has_no_score() -> None:
    source = ScoreSource(lambda text: score(text.replace(b"head\n", b"")), is_remote=True)
    assert [len(scores) for scores in score_lines(io.BytesIO(b"head\na\nb\n"), "f.txt", source)] == [2]


def test_a_file_is_read_as_in_training(tmp_path: Path) -> None:
    """Plain or compressed, without a byte order mark; a bad line is named by its number."""
    lines = b"\xef\xbb\xbfone\r\n\ntwo\n" * 1 + b"three\n" * 3000
    for path, content in ((tmp_path / "a.txt", lines), (tmp_path / "a.txt.gz", gzip.compress(lines))):
        path.write_bytes(content)
        scores = np.concatenate(list(scores_of(ScoreSource(score), str(path))))
        assert scores[:3, 0].tolist() == [3, 3, 5] and len(scores) == 3002
        path.write_bytes(gzip.compress(lines + b"bad\n") if path.suffix == ".gz" else lines + b"bad\n")
        with pytest.raises(SampleError, match=rf"{path.name}:3004: not good$"):
            list(scores_of(ScoreSource(score), str(path)))


def test_a_named_pipe_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(b"one\nthree\n"))
    writer.start()
    scores = np.concatenate(list(scores_of(ScoreSource(score), str(tmp_path / "pipe"))))
    writer.join()
    assert scores[:, 0].tolist() == [3, 5]
    with pytest.raises(FileNotFoundError):
        list(scores_of(ScoreSource(score), str(tmp_path / "nothing")))


# Scores and labels


def metrics_of(features: dict[str, Any] = FEATURES, scored: list[str] | None = None) -> ScoreMetrics:
    reader = LabelReader.of_features(features, scored or features["labels"])
    assert reader is not None
    return ScoreMetrics(reader)


def column(*scores: float) -> Scores:
    return np.array(scores, np.float32).reshape(-1, 1)


def naive_auc(scores: list[float], labels: list[int]) -> float:
    pairs = [(a, b) for a, x in zip(scores, labels, strict=True) for b, y in zip(scores, labels, strict=True) if x > y]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def test_auc_and_log_loss_of_labels() -> None:
    chance = np.random.default_rng(3)
    scores = chance.random(500).astype(np.float32)
    labels = (chance.random(500) < scores).astype(int)
    metrics = metrics_of()
    for part in np.array_split(np.arange(500), 7):
        metrics.add(b"".join(b"1 %d 5:0\n" % label for label in labels[part]), scores[part].reshape(-1, 1))
    (line,) = metrics.lines()
    auc, loss = (float(word) for word in line.replace(",", "").split() if word.startswith("0."))
    assert line == f"click: AUC {auc:.6f}, log loss {loss:.6f}, samples 500"
    assert auc == pytest.approx(naive_auc(scores.tolist(), labels.tolist()), abs=1e-4)
    assert loss == pytest.approx(-np.mean(np.log(np.where(labels, scores, 1 - scores.astype(float)))), abs=1e-5)


def test_samples_are_weighted() -> None:
    metrics = metrics_of()
    metrics.add(b"4 1 5:0\n", column(0.25))
    (line,) = metrics.lines()
    assert line == f"click: AUC 0.500000, log loss {-(np.log(0.25) + 3 * np.log(0.75)) / 4:.6f}, samples 1"


def test_scores_of_0_and_1_have_a_finite_loss() -> None:
    metrics = metrics_of()
    metrics.add(b"1 1 5:0\n1 0 5:0\n1 1 5:0\n", column(1, 0, 0))
    (line,) = metrics.lines()
    assert "AUC 0.750000" in line and np.isfinite(float(line.replace(",", "").split()[5]))


def test_identical_labels_have_no_auc() -> None:
    metrics = metrics_of()
    metrics.add(b"1 0 5:0\n", column(0.5))
    assert metrics.lines() == ["click: AUC none, all labels are equal, log loss 0.693147, samples 1"]


def test_lines_without_labels_are_not_measured() -> None:
    metrics = metrics_of()
    metrics.add(b"- - 5:0\n", column(0.5))
    assert metrics.lines() == []


def test_labels_that_end_in_the_middle_are_reported() -> None:
    metrics = metrics_of()
    metrics.add(b"1 1 5:0\n1 0 5:0\n", column(0.5, 0.4))
    metrics.add(b"- - 5:0\n", column(0.5))
    metrics.add(b"1 1 5:0\n", column(0.5))
    problem = "show: expected a count below 2^32, got `-`"
    assert metrics.lines() == [f"no AUC: cannot read labels after 2 samples: {problem}"]


def test_only_scored_labels_are_measured() -> None:
    """A version may score only some of the labels."""
    metrics = metrics_of({**FEATURES, "labels": ["click", "buy"]}, ["buy"])
    metrics.add(b"1 1 buy=0 5:0\n1 1 buy=1 5:0\n", column(0.1, 0.9))
    (line,) = metrics.lines()
    assert line.startswith("buy: AUC 1.000000")


@pytest.mark.parametrize("format", ["reader", "parquet"])
def test_formats_without_a_label_reader(format: str) -> None:
    assert LabelReader.of_features({**FEATURES, "format": format}, ["click"]) is None


def test_a_source_is_measured_on_the_lines_it_scores() -> None:
    reader = LabelReader.of_features(FEATURES, ["click"])
    source, metrics = with_metrics(ScoreSource(lambda text: column(*(0.5 for _ in text.splitlines())), labels=reader))
    assert metrics is not None and with_metrics(ScoreSource(score))[1] is None
    text = b"1 1 5:0\n1 0 5:0\n" * 2000
    assert sum(len(scores) for scores in score_lines(io.BytesIO(text), "f.txt", source)) == 4000
    assert metrics.lines() == ["click: AUC 0.500000, log loss 0.693147, samples 4,000"]


# The command


@pytest.fixture
def lines(tmp_path: Path) -> str:
    """Return a file of 3,000 lines, which takes three requests."""
    path = tmp_path / "samples.txt"
    path.write_bytes(b"1 1 5:0\n1 0 6:0\n" * 1500)
    return str(path)


def test_scores_go_to_stdout_and_auc_to_stderr(lines: str, capsys: Capture) -> None:
    with scripted(model=METADATA, predict=counted([0.75, 0.25] * 1500)) as server:
        assert main(["predict", lines, "--server", server.url]) == 0
    output = capsys.readouterr()
    assert output.out == "0.75\n0.25\n" * 1500
    assert output.err == "click: AUC 1.000000, log loss 0.287682, samples 3,000\n"
    assert len(server.predictions()) == 3


@pytest.mark.parametrize("metadata", [{"labels": ["click"]}, {"labels": ["other"], "features": FEATURES}])
def test_without_a_description_of_the_labels_there_is_no_auc(metadata: Any, lines: str, capsys: Capture) -> None:
    with scripted(model=metadata, predict=counted([0.5] * 3000)) as server:
        assert main(["predict", lines, "--server", server.url]) == 0
    assert capsys.readouterr() == ("0.5\n" * 3000, "")


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        (CLOSE, "did not answer: the connection was closed (3 attempts)"),
        ((500, {"error": "a bug"}), "500: a bug"),
        (HANG, "did not answer in 0.5 s"),
    ],
)
def test_a_server_that_fails_in_the_middle(end: Any, problem: str, lines: str, capsys: Capture) -> None:
    first = counted([0.5] * 1024)
    with scripted(model=METADATA, predict=[first, end]) as server:
        assert main(["predict", lines, "--server", server.url, "--timeout", "0.5"]) == 2
    output = capsys.readouterr()
    assert output.out == "0.5\n" * 1024, "finished scores are printed in full"
    assert output.err == f"error: {lines}:1025: {server.url.partition('//')[2]}: {problem}\n"


def test_a_server_with_tls(lines: str, tmp_path: Path, capsys: Capture) -> None:
    files = write_certificates(tmp_path / "tls")
    with scripted(tls=files, predict=counted([0.5] * 3000)) as server:
        assert main(["predict", lines, "--server", server.url]) == 2
        assert "its certificate is not signed by an authority of the `ca` file" in capsys.readouterr().err
        assert main(["predict", lines, "--server", server.url, "--ca", str(files.ca)]) == 0


@pytest.mark.parametrize("option", [["--timeout", "3"], ["--ca", "x"], ["--name", "x"], ["--token", "file:x"]])
def test_server_options_need_a_server(option: list[str], lines: str, capsys: Capture) -> None:
    assert main(["predict", lines, "--model", "models/none", *option]) == 2
    assert capsys.readouterr().err == "error: predict: --name, --token, --timeout and --ca need --server\n"


def test_progress_on_a_terminal(lines: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown when the scores go to a file, and erased before other output."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with scripted(predict=[counted([0.5] * 1024), (500, {"error": "a bug"})]) as server:
        assert main(["predict", lines, "--server", server.url]) == 2
    shown, _, error = capsys.readouterr().err.rpartition("\r\x1b[2K")
    assert shown == "\r\x1b[2K1,024 samples" and error.startswith("error: ")
