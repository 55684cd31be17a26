"""Publishing from a training in one process: when a version is cut, its content, and failures."""

import json
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import _core, cli
from elasticrec.config import Job
from elasticrec.errors import ConfigError, ModelError
from elasticrec.publish import live, local_versions
from elasticrec.publish.live import LivePublisher, open_publisher
from elasticrec.publish.train import train_and_publish
from elasticrec.repository.repository import Repository
from elasticrec.repository.verify import verify
from elasticrec.run import Run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.training.hook import NoHook
from elasticrec.training.loop import Trainer
from elasticrec.training.predict import load_checkpoint
from support.small import MakeJob, WriteSamples

CUSTOM_MODEL = """\
import torch
from torch import nn

from elasticrec.models import Column, Model


class Mine(Model):
    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        self.out = nn.Linear(shape.num_slots * options.dim, shape.num_labels)

    def forward(self, columns, dense_BD):
        deep = columns["deep"]
        return self.out(deep.flatten(1)) + torch.linalg.qr(deep)[0].sum((1, 2))[:, None]
"""


pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture
def job_of(make_job: MakeJob, write_samples: WriteSamples) -> Any:
    write_samples(count=600)

    def make(**sections: Any) -> Job:
        return make_job(**{"publish": {"every": "epoch"}, **sections})

    return make


def local() -> Repository:
    return Repository.open("models", "small")


def test_without_every_nothing_is_published(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=100)
    with open_publisher(make_job()) as hook:
        assert isinstance(hook, NoHook)
    train_and_publish(make_job())
    assert not Path("models").exists()


def test_a_version_at_the_end_of_each_epoch(job_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    train_and_publish(job_of(train={"epochs": 3, "threads": 1, "batch_size": 64}))
    repository = local()
    assert (repository.versions(), repository.current()) == ([1, 2, 3], 3)
    assert [repository.version(number).manifest["data"]["samples"] for number in (1, 2, 3)] == [600, 1200, 1800]
    for number in (1, 2, 3):
        assert verify(repository, number) == []
    rows = r"(?:[\d,]+ rows changed, 0 removed, of [\d,]+|[\d,]+ rows)"
    published = re.findall(
        rf"published models/small/(\S+): {rows}, [\d,]+ bytes, [\d.]+ s; offered", capsys.readouterr().err
    )
    assert published == ["1", "1/deltas/2", "1/deltas/3"]
    # the last version scores like the checkpoint
    text = Path("train.txt").read_bytes()
    scores = _core.Predictor("models/small/1/deltas/3", str(library_path())).predict(text)
    np.testing.assert_allclose(scores, load_checkpoint(Run(Path("runs/small"))).predict(text), atol=1e-5)
    # a finished run trains and publishes nothing
    train_and_publish(job_of(train={"epochs": 3, "threads": 1, "batch_size": 64}))
    assert repository.versions() == [1, 2, 3]


def test_versions_by_time_and_one_at_the_end(job_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Clocked(LivePublisher):
        def __init__(self, job: Job, repository: Repository) -> None:
            super().__init__(job, repository, lambda: now[0])

        def between(self, trainer: Trainer) -> None:
            now[0] += 7.0
            super().between(trainer)

    monkeypatch.setattr(live, "LivePublisher", Clocked)
    train_and_publish(job_of(publish={"every": "30s", "keep": 9}))
    repository = local()
    # ten batches of seven seconds each
    samples = [repository.version(number).manifest["data"]["samples"] for number in repository.versions()]
    assert samples == [5 * 64, 600]
    assert repository.version(1).manifest["checkpoint"] == "step-000000000005"
    assert repository.current() == 2


def test_a_model_that_cannot_be_exported_fails_before_the_first_batch(job_of: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CUSTOM_MODEL)
    job = job_of(model={"kind": "mine.py:Mine", "dim": 4})
    steps = []
    with pytest.raises(ModelError) as caught:
        train_and_publish(job, callback=lambda event: steps.append(event.steps))
    assert str(caught.value) == (
        "model: cannot be exported to ONNX: operator `aten.linalg_qr` is not supported by ONNX"
    )
    assert max(steps, default=0) == 0
    assert local().versions() == []
    # without `publish.every` the model trains
    train_and_publish(job_of(model={"kind": "mine.py:Mine", "dim": 4}, publish={}))


def test_a_failed_publish_does_not_end_the_training(
    job_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commit, calls = local_versions.commit_version, []

    def sometimes(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return commit(*arguments)

    monkeypatch.setattr(local_versions, "commit_version", sometimes)
    summary = train_and_publish(job_of(train={"epochs": 3, "threads": 1, "batch_size": 64}))
    assert summary.progress.finished
    # the number of a failed publish is not used again
    assert local().versions() == [1, 3]
    assert local().version(3).manifest["data"]["samples"] == 1800
    assert (
        "publish failed: [Errno 28] No space left on device; the next version will include its changes"
        in capsys.readouterr().err
    )


def test_a_failed_last_publish_is_retried_at_the_end(job_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commit, calls = local_versions.commit_version, []

    def once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return commit(*arguments)

    monkeypatch.setattr(local_versions, "commit_version", once)
    train_and_publish(job_of())
    assert local().versions() == [2]


def test_another_job_that_publishes_the_model_is_named(job_of: Any) -> None:
    with local().locked():
        with pytest.raises(ConfigError, match=rf"publishing it: process {os.getpid()} on "):
            train_and_publish(job_of())
    assert not Path("runs").exists()


def test_a_rollback_during_a_training_holds(job_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(train={"epochs": 4, "threads": 1, "batch_size": 64}, publish={"every": "epoch", "keep": 9})
    rolled_back = threading.Event()

    def watch(event: Any) -> None:
        if event.kind == "epoch" and event.values["epoch"] == 3 and not rolled_back.is_set():
            local().rollback(1)
            rolled_back.set()

    train_and_publish(job, callback=watch)
    assert rolled_back.is_set()
    state = local().state()
    assert state is not None
    assert (state.version, state.is_held) == (1, True)
    assert local().versions() == [1, 2, 3, 4]
    assert "not offered: a rollback holds the model" in capsys.readouterr().err


def test_versions_of_hours_record_the_last_hour(make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path) -> None:
    for hour in ("00", "01"):
        directory = tmp_path / "logs/20260101" / hour
        directory.mkdir(parents=True)
        write_samples(str(directory / "part.txt"), count=100)
        (directory / "_SUCCESS").touch()
    hours = {"start": "2026-01-01T00", "end": "2026-01-01T01"}
    job = make_job(data={"train": "logs", "hours": hours}, publish={"every": "hour"})
    train_and_publish(job)
    repository = local()
    found = [repository.version(number).manifest["data"] for number in repository.versions()]
    assert [one["until"] for one in found][:2] == ["2026-01-01T00", "2026-01-01T01"]


def test_elasticrec_train_publishes(job_of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    raw = job_of().to_dict(references=True)
    Path("job.yaml").write_text(json.dumps(raw))
    assert cli.main(["train", "job.yaml"]) == 0
    assert local().current() == 1
    assert cli.main(["models", "list"]) == 0
    assert "models/small: current 1" in capsys.readouterr().out
