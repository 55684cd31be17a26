"""`eval`: measure one checkpoint or a range of epochs after the training."""

import json
from pathlib import Path

import pytest

from elasticrec import cli
from elasticrec.config import Job
from elasticrec.run import Run
from elasticrec.training.loop import train_job
from support.small import MakeJob, WriteSamples

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob, write_samples: WriteSamples) -> Job:
    """Return a trained job of four epochs; all snapshots are kept."""
    monkeypatch.chdir(tmp_path)
    write_samples(count=640)
    write_samples("eval.txt", count=300, seed=2)
    write_samples("other.txt", count=200, seed=3)
    checkpoint = {"keep": 1, "keep_epochs": True, "keep_best": "auc"}
    job = make_job(data={"eval": "eval.txt"}, train={"epochs": 4, "checkpoint": checkpoint})
    train_job(job)
    return job


def run(capsys: Capture, *arguments: str) -> list[str]:
    capsys.readouterr()
    assert cli.main(["eval", "small", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def fails(capsys: Capture, *arguments: str) -> str:
    capsys.readouterr()
    assert cli.main(["eval", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("epochs", "snapshots"),
    [("0:4", [0, 1, 2, 3]), ("1:3", [1, 2]), ("2:", [2, 3]), (":2", [0, 1]), (":", [0, 1, 2, 3]), ("3", [3])],
)
def test_evaluating_a_range_of_epochs_repeats_the_training_metrics(
    job: Job, capsys: Capture, epochs: str, snapshots: list[int]
) -> None:
    found = [json.loads(line) for line in run(capsys, "--range", epochs, "--json")]
    assert [one["snapshot"] for one in found] == snapshots
    records = [json.loads(line) for line in Run.of(job).metrics_path.read_text().splitlines()]
    expected = {record["epoch"] - 1: record for record in records if record["event"] == "epoch"}
    for one in found:
        record = expected[one["snapshot"]]
        assert one["eval"] == {"click": record["eval"][0]}
        assert (one["steps"], one["samples"]) == (record["steps"], record["samples"])


def test_the_output_without_json_is_a_table(job: Job, capsys: Capture) -> None:
    lines = run(capsys, "--range", "1:3")
    assert lines[0].split() == ["epoch", "checkpoint", "label", "samples", "loss", "auc", "copc"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2"]
    assert lines[1].split()[1:4] == ["step-000000000020.1", "click", "300"]
    assert len({len(line) for line in lines}) == 1


def test_a_single_checkpoint_shows_its_calibration(job: Job, capsys: Capture) -> None:
    lines = run(capsys)
    assert lines[1].split()[0] == "3"
    assert lines[3] == "calibration of click, by tenths of the weight, ordered by prediction:"
    tenths = [[float(value) for value in line.split()] for line in lines[5:]]
    assert len(tenths) == 10
    assert [tenth[0] for tenth in tenths] == sorted(tenth[0] for tenth in tenths)
    assert all(abs(tenth[1] / tenth[0] - tenth[2]) < 0.006 for tenth in tenths)


def test_evaluating_other_data_and_the_best_checkpoint(job: Job, capsys: Capture) -> None:
    (other,) = [json.loads(line) for line in run(capsys, "--data", "other.txt", "--json")]
    assert other["eval"]["click"]["samples"] == 200
    (both,) = [json.loads(line) for line in run(capsys, "--data", "other.txt", "--data", "eval.*", "--json")]
    assert both["eval"]["click"]["samples"] == 500
    ranges = [json.loads(line) for line in run(capsys, "--range", "0:4", "--json")]
    (best,) = [json.loads(line) for line in run(capsys, "--best", "--json")]
    assert best == max(ranges, key=lambda one: float(one["eval"]["click"]["auc"]))


def test_mistakes_of_the_user_are_reported_in_one_line(job: Job, capsys: Capture, make_job: MakeJob) -> None:
    assert fails(capsys, "small", "--range", "0:6") == (
        "runs/small: expected checkpoints of the epochs 0:6, got 0, 1, 2, 3; "
        "`train.checkpoint.keep_epochs: true` keeps them all"
    )
    assert fails(capsys, "small", "--range", "2:2").startswith(
        "runs/small: expected checkpoints of the epochs 2:2, got"
    )
    assert fails(capsys, "small", "--range", "a") == "--range: expected epochs such as `0:4`, `2:` or `3`, got `a`"
    assert fails(capsys, "small", "--range", "0:1", "--best") == "eval: expected one of --range and --best"
    assert fails(capsys, "small", "--data", "no*.txt").startswith("--data: data.eval: no file matches")
    assert fails(capsys, "nothing") == "nothing: no such run, runs/ contains `small`"
    train_job(make_job(name="bare"))
    assert fails(capsys, "bare") == "runs/bare: the job has no `data.eval`, expected --data FILES"
    assert fails(capsys, "bare", "--best") == "runs/bare: expected a checkpoint that was evaluated, got none"
    Path("bad.txt").write_text("1 0 5:0\nx\n")
    capsys.readouterr()
    assert cli.main(["eval", "small", "--data", "bad.txt"]) == 2
    shown, error = capsys.readouterr().err.splitlines()
    assert shown.endswith("bad.txt:2: expected show and click, got nothing") or "bad.txt:2: " in shown
    assert error.startswith("error: --data: data.eval: 1 of 2 records are bad")


def test_the_best_checkpoint_is_published_and_predicts(
    job: Job, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (best,) = [json.loads(line) for line in run(capsys, "--best", "--json")]
    assert cli.main(["publish", "small", "--best"]) == 0
    manifest = json.loads(Path("models/small/1/manifest.json").read_bytes())
    assert manifest["checkpoint"] == best["checkpoint"]
    scores = []
    for source in (["--checkpoint", "small", "--best"], ["--model", "models/small"], ["--checkpoint", "small"]):
        capsys.readouterr()
        assert cli.main(["predict", "eval.txt", *source]) == 0
        scores.append([float(line) for line in capsys.readouterr().out.split()])
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    if best["snapshot"] != 3:
        assert scores[0] != scores[2]
    capsys.readouterr()
    assert cli.main(["predict", "eval.txt", "--model", "models/small", "--best"]) == 2
    assert capsys.readouterr().err == "error: predict: --best needs --checkpoint\n"


def test_an_auc_worse_than_chance_is_reported(job: Job, capsys: Capture) -> None:
    swapped = []
    for line in Path("train.txt").read_text().splitlines():
        show, click, *fields = line.split()
        swapped.append(" ".join([show, str(int(show) - int(click)), *fields]))
    Path("swapped.txt").write_text("\n".join(swapped))
    assert cli.main(["eval", "small", "--data", "swapped.txt"]) == 0
    assert "step-000000000040.1 click: auc 0." in capsys.readouterr().err


@pytest.mark.parametrize("shuffle", [True, False])
def test_held_out_samples_match_the_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_job: MakeJob,
    write_samples: WriteSamples,
    capsys: Capture,
    shuffle: bool,
) -> None:
    """With `data.eval.ratio`, `eval` measures the same samples as the training; with --data, a whole file."""
    monkeypatch.chdir(tmp_path)
    write_samples(count=1000)
    write_samples("other.txt", count=200, seed=3)
    train = {"evaluate": {"every_steps": 5}, "checkpoint": {"keep_best": "auc"}}
    job = make_job(data={"eval": {"ratio": 0.25}, "shuffle": shuffle}, train=train)
    summary = train_job(job)
    assert summary.evaluation is not None
    measured = summary.evaluation["click"]
    assert measured.samples + summary.progress.samples == 1000 and 150 < measured.samples < 350
    (found,) = [json.loads(line) for line in run(capsys, "--json")]
    assert found["eval"]["click"] == measured.to_dict()
    (other,) = [json.loads(line) for line in run(capsys, "--data", "other.txt", "--json")]
    assert other["eval"]["click"]["samples"] == 200


def test_csv_with_other_columns_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{at % 3 == 0:d},{at % 7},{at % 5}\n" for at in range(200))
    Path("train.csv").write_text("click,a,b\n" + rows)
    Path("swapped.csv").write_text("click,b,a\n" + rows)
    columns = {"labels": "click", "sparse": ["a", "b"]}
    job = make_job(data={"format": "csv", "train": "train.csv", "eval": "train.csv", "slots": None, "columns": columns})
    summary = train_job(job)
    assert summary.evaluation is not None
    (found,) = [json.loads(line) for line in run(capsys, "--json")]
    assert found["eval"]["click"] == summary.evaluation["click"].to_dict()
    assert fails(capsys, "small", "--data", "swapped.csv").endswith(
        "swapped.csv:1: expected the header `click,a,b`, got `click,b,a`"
    )
