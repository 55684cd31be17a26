"""Custom metrics: measured over the evaluation; errors name the file and line."""

import json
from pathlib import Path

import pytest

from elasticrec.errors import ConfigError, ModelError
from elasticrec.run import Run
from elasticrec.training.checkpoint import best, latest, list_checkpoints
from elasticrec.training.loop import train_job
from support.small import MakeJob, WriteSamples

GOOD = '''\
import numpy as np


class Error:
    """Mean squared error, and the largest prediction."""

    def __init__(self):
        self.sum = self.weight = self.most = 0.0

    def update(self, scores, labels, weights):
        assert scores.shape == labels.shape == weights.shape and scores.dtype == np.float32
        self.sum += float((weights * (scores - labels) ** 2).sum())
        self.weight += float(weights.sum())
        self.most = max(self.most, scores.max())

    def result(self):
        return {"mse": self.sum / self.weight, "most": self.most}
'''


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_samples: WriteSamples) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(count=640)
    write_samples("eval.txt", count=200, seed=2)


def test_custom_metrics_are_reported_with_the_standard_ones(
    make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.py").write_text(GOOD)
    train = {
        "metrics": "mine.py:Error",
        "evaluate": {"every_steps": 4},
        "checkpoint": {"keep_best": "mse", "best_is": "lowest"},
    }
    job = make_job(data={"eval": "eval.txt"}, train=train)
    summary = train_job(job)
    assert summary.evaluation is not None
    own = summary.evaluation["click"].own
    assert own.keys() == {"mse", "most"}
    assert 0.1 < own["mse"] < 0.25 and 0.3 < own["most"] < 1
    assert f" mse {own['mse']:.4f} most {own['most']:.4f}" in capsys.readouterr().err.splitlines()[-1]
    records = [json.loads(line) for line in Run.of(job).metrics_path.read_text().splitlines()]
    values = [record["eval"][0]["own"]["mse"] for record in records if record.get("eval")]
    assert len(values) == 3 and values[-1] == own["mse"]
    saved = latest(Run.of(job))
    assert saved is not None and saved.evaluation == [summary.evaluation["click"]]
    found = best(Run.of(job), job)
    assert found is not None and found.evaluation is not None
    assert found.evaluation[0].own["mse"] == min(values)


def test_each_label_is_measured_separately(make_job: MakeJob, tmp_path: Path) -> None:
    Path("mine.py").write_text(GOOD)
    for name in ("train.txt", "eval.txt"):
        lines = (tmp_path / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join(f"{line} buy=0" for line in lines))
    job = make_job(data={"eval": "eval.txt", "labels": ["click", "buy"]}, train={"metrics": "mine.py:Error"})
    evaluation = train_job(job).evaluation
    assert evaluation is not None
    assert evaluation["click"].own["mse"] != evaluation["buy"].own["mse"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Error\n", "{path}:1: SyntaxError: expected ':'"),
        ("x = 1\nimport nothing_like_it\n", "{path}:2: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("class Other:\n    pass\n", "{path}: expected a class `Error`, got `Other`"),
        ("", "{path}: expected a class `Error`, got none"),
        ("class Error:\n    def update(self): ...\n", "{path}: `Error`: expected a method `result`, got none"),
        (GOOD.replace("__init__(self)", "__init__(self, x)"), "{path}: TypeError: Error.__init__() missing 1 required"),
        (GOOD.replace("= 0.0", "= 1 / 0"), "{path}:8: ZeroDivisionError: division by zero"),
    ],
)
def test_a_bad_metric_file_is_reported_before_training(make_job: MakeJob, source: str, message: str) -> None:
    path = Path("mine.py").absolute()
    path.write_text(source)
    job = make_job(data={"eval": "eval.txt"}, train={"metrics": "mine.py:Error"})
    with pytest.raises(ModelError) as caught:
        train_job(job)
    assert str(caught.value).startswith(message.format(path=path))
    assert "\n" not in str(caught.value)
    assert list_checkpoints(Run.of(job)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("self.weight += ", "self.weight += nothing + "), "{path}:13: NameError: name 'nothing' is not defined"),
        (('"mse": self.sum / self.weight', '"mse": 0 / 0'), "{path}:17: ZeroDivisionError: division by zero"),
        (("return {", "return 1 or {"), "{path}: `Error.result`: expected a dict of names and numbers, got int"),
        (
            ('"mse": self.sum / self.weight', '"auc": 1'),
            "{path}: `Error.result`: `auc` is taken, expected another name",
        ),
        (
            ('"mse": self.sum / self.weight', '"mse": float("nan")'),
            "{path}: `Error.result`: `mse`: expected a finite number, got nan",
        ),
        (
            ('"mse": self.sum / self.weight', '"mse": "x"'),
            "{path}: `Error.result`: `mse`: expected a finite number, got 'x'",
        ),
        (('"mse": self.sum / self.weight', "1: 2"), "{path}: `Error.result`: expected names as keys, got 1"),
    ],
)
def test_a_failing_metric_loses_no_training(make_job: MakeJob, change: tuple[str, str], message: str) -> None:
    path = Path("mine.py").absolute()
    path.write_text(GOOD.replace(*change))
    job = make_job(data={"eval": "eval.txt"}, train={"metrics": "mine.py:Error"})
    with pytest.raises(ModelError) as caught:
        train_job(job)
    assert str(caught.value) == message.format(path=path)
    saved = latest(Run.of(job))
    assert saved is not None and saved.progress.samples == 640
    path.write_text(GOOD)
    assert train_job(job).progress.finished


def test_a_missing_metric_file(make_job: MakeJob) -> None:
    with pytest.raises(FileNotFoundError, match=r"mine\.py"):
        train_job(make_job(data={"eval": "eval.txt"}, train={"metrics": "mine.py:Error"}))


def test_keep_best_with_an_unknown_metric(make_job: MakeJob) -> None:
    Path("mine.py").write_text(GOOD)
    train = {"metrics": "mine.py:Error", "checkpoint": {"keep_best": "msa"}}
    job = make_job(data={"eval": "eval.txt"}, train=train)
    with pytest.raises(ConfigError) as caught:
        train_job(job)
    assert str(caught.value) == (
        "job.yaml: train.checkpoint.keep_best: expected one of `auc`, `log_loss`, `mse`, `most`, got `msa`"
    )
    saved = latest(Run.of(job))
    assert saved is not None and saved.progress.samples == 640
    with pytest.raises(ConfigError, match=r"`checkpoint\.keep_best`: expected `auc`, `log_loss` or a metric of"):
        make_job(data={"eval": "eval.txt"}, train={"checkpoint": {"keep_best": "msa"}})


def test_a_fresh_start_with_a_bad_metric_file_keeps_the_run(make_job: MakeJob) -> None:
    job = make_job(data={"eval": "eval.txt"})
    train_job(job)
    before = latest(Run.of(job))
    Path("mine.py").write_text("class Error\n")
    with pytest.raises(ModelError, match="SyntaxError"):
        train_job(make_job(data={"eval": "eval.txt"}, train={"metrics": "mine.py:Error"}), fresh=True)
    assert latest(Run.of(job)) == before


def test_a_metric_may_be_a_dataclass(make_job: MakeJob) -> None:
    Path("mine.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass, field\n\n\n"
        "@dataclass\nclass Count:\n    seen: list[int] = field(default_factory=list)\n\n"
        "    def update(self, scores, labels, weights):\n        self.seen.append(len(scores))\n\n"
        "    def result(self):\n        return {'count': sum(self.seen)}\n"
    )
    evaluation = train_job(make_job(data={"eval": "eval.txt"}, train={"metrics": "mine.py:Count"})).evaluation
    assert evaluation is not None and evaluation["click"].own == {"count": 200.0}


def test_duplicate_metric_names_are_rejected_and_empty_batches_skipped(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text(GOOD + GOOD.replace("class Error", "class Other"))
    # a batch of bad lines only is empty, and has no largest prediction
    bad = "".join("1 x\n" for _ in range(64))
    (tmp_path / "eval.txt").write_text(bad + (tmp_path / "eval.txt").read_text())
    data = {"eval": "eval.txt", "max_bad_ratio": 1.0}
    summary = train_job(make_job(data=data, train={"metrics": ["metrics.py:Error"]}))
    assert summary.evaluation is not None and summary.evaluation["click"].own["most"] > 0
    both = make_job(name="both", data=data, train={"metrics": ["metrics.py:Error", "metrics.py:Other"]})
    with pytest.raises(
        ModelError, match=r"metrics.py: `mo?s[te]`: two metrics have this name, expected distinct names"
    ):
        train_job(both)
