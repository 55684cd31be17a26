"""A warm start: the parameters of another run, with the data and settings of this run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.audit.audit import audit_run
from elasticrec.config import Job
from elasticrec.errors import ConfigError, ElasticRecError
from elasticrec.roles.train import train_with_servers
from elasticrec.run import Run
from elasticrec.training.checkpoint import Checkpoint, latest
from elasticrec.training.loop import Trainer, train_job
from elasticrec.training.report import Reporter
from support.small import MakeJob, WriteSamples

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_job: MakeJob, write_samples: WriteSamples) -> Job:
    """Train the run that other runs start from."""
    monkeypatch.chdir(tmp_path)
    write_samples(count=640)
    write_samples("other.txt", count=640, seed=5)
    job = make_job(name="first")
    train_job(job)
    return job


def newest(job: Job) -> Checkpoint:
    checkpoint = latest(Run.of(job))
    assert checkpoint is not None
    return checkpoint


def parameters(job: Job) -> dict[str, bytes]:
    return {name: (newest(job).path / name).read_bytes() for name in ("table/part-00000", "dense.bin")}


def warm(make_job: MakeJob, start: str = "first", **sections: Any) -> Job:
    train = {"warm_start": start, **sections.pop("train", {})}
    return make_job(**{"name": "warm", "data": {"train": "other.txt"}, **sections, "train": train})


@pytest.mark.parametrize("start", ["first", "runs/first", "runs/first/checkpoints/step-000000000010"])
def test_a_run_starts_with_the_parameters_of_another_run(
    make_job: MakeJob, first: Job, capsys: Capture, start: str
) -> None:
    job = warm(make_job, start)
    trainer = Trainer(job, Run.create(job), Reporter(None, 1.0))
    assert not trainer.resume()
    path = "runs/first/checkpoints/step-000000000010"
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"starting runs/warm with the parameters of {path}: ")
    step, vectors = trainer.state.dense.state()
    assert (step, vectors["value"].tobytes()) == (
        10,
        (newest(first).path / "dense.bin").read_bytes()[: 4 * len(vectors["value"])],
    )
    trainer.state.embedding.table.snapshot("table")
    assert Path("table").read_bytes() == parameters(first)["table/part-00000"]
    assert trainer.progress.steps == trainer.state.sums[0].result().samples == 0


def test_a_warm_start_continues_like_one_training(make_job: MakeJob) -> None:
    """An epoch after a warm start continues from the learned parameters, so it beats a cold start."""
    job = warm(make_job, data={"train": "train.txt", "shuffle": False})
    summary = train_job(job)
    assert (summary.progress.samples, summary.progress.epoch, summary.progress.finished) == (640, 1, True)
    assert summary.train["click"].samples == 640
    assert summary.train["click"].auc is not None
    cold = make_job(name="cold", data={"shuffle": False})
    assert summary.train["click"].auc > (train_job(cold).train["click"].auc or 1) + 0.02


def test_a_warm_start_is_recorded_and_happens_once(make_job: MakeJob, first: Job) -> None:
    job = warm(make_job)
    train_job(job, callback=lambda event: event.kind != "start")
    saved = newest(job)
    assert saved.progress.warm_start == str(newest(first).path)
    assert saved.manifest["warm_start"] == saved.progress.warm_start
    record = json.loads(Run.of(job).metrics_path.read_text().splitlines()[0])
    assert (record["event"], record["warm_start"]) == ("start", saved.progress.warm_start)
    before = parameters(job)
    # the source run may be removed or changed later
    Run.of(first).discard()
    train_job(job)
    assert parameters(job) != before
    assert newest(job).progress.warm_start == saved.progress.warm_start


def test_a_stop_and_a_resume_end_with_the_same_bits(make_job: MakeJob) -> None:
    whole, stopped = (warm(make_job, name=name, train={"print_every_s": 1e-9}) for name in ("whole", "stopped"))
    train_job(whole)
    train_job(stopped, callback=lambda event: event.steps < 4)
    assert newest(stopped).progress.steps == 4
    train_job(stopped)
    assert parameters(stopped) == parameters(whole)


def test_learning_rates_may_differ(make_job: MakeJob) -> None:
    same, other = (
        warm(
            make_job,
            name=f"rate{rate}".replace(".", "-"),
            dense={"optimizer": {"learning_rate": rate}},
            sparse={"optimizer": {"learning_rate": rate}},
        )
        for rate in (0.001, 0.002)
    )
    train_job(same)
    train_job(other)
    assert parameters(same) != parameters(other)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"hidden": [8, 9]}}, "belongs to another job, which differs in `model.hidden`"),
        ({"model": {"dim": 5}}, "belongs to another job, which differs in `model.dim`"),
        ({"data": {"train": "other.txt", "slots": "0-1"}}, "belongs to another job, which differs in `data.slots`"),
        (
            {"sparse": {"optimizer": {"kind": "sgd"}}},
            "belongs to another job, which differs in `sparse.optimizer.kind`",
        ),
        ({"dense": {"optimizer": {"kind": "sgd"}}}, "belongs to another job, which differs in `dense.optimizer.kind`"),
    ],
)
def test_another_model_is_refused(make_job: MakeJob, first: Job, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ElasticRecError) as caught:
        train_job(warm(make_job, **sections))
    assert str(caught.value) == f"job.yaml: train.warm_start: {newest(first).path}: {message}"
    assert latest(Run(Path("runs/warm"))) is None


def test_a_missing_checkpoint_is_rejected(make_job: MakeJob, first: Job) -> None:
    with pytest.raises(ConfigError, match=r"^job.yaml: train.warm_start: nothing: no such run, runs/ contains `first`"):
        train_job(warm(make_job, "nothing"))
    path = newest(first).path
    (path / "dense.bin").write_bytes(b"")
    with pytest.raises(ElasticRecError, match=r"^job.yaml: train.warm_start: .*/dense.bin: expected \d+ bytes, got 0$"):
        train_job(warm(make_job))


def test_a_failed_fresh_warm_start_keeps_the_run(make_job: MakeJob) -> None:
    job = warm(make_job)
    train_job(job)
    before = parameters(job)
    for start, message in (("warm", "expected another run, got the job's own"), ("nothing", "no such run")):
        with pytest.raises(ConfigError, match=message):
            train_job(warm(make_job, start), fresh=True)
    with pytest.raises(ElasticRecError, match=r"differs in `model\.hidden`"):
        train_job(warm(make_job, model={"hidden": [9]}), fresh=True)
    assert parameters(job) == before
    train_job(job, fresh=True)
    assert parameters(job) == before


def test_a_resumed_run_must_keep_its_warm_start(make_job: MakeJob) -> None:
    train_job(warm(make_job))
    with pytest.raises(ConfigError, match=r"differs from the job of runs/warm in `train.warm_start`"):
        train_job(make_job(name="warm", data={"train": "other.txt"}))


def test_ages_restart_with_the_new_run(make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path) -> None:
    """Rows last seen in the fifth epoch of the source run are not newer than epochs of this run."""
    old = make_job(name="old", train={"epochs": 5})
    train_job(old)
    (tmp_path / "other.txt").write_text("".join(f"1 0 {9000 + sign}:0\n" for sign in range(100)))
    job = warm(make_job, "old", sparse={"evict": {"max_age": 0}}, train={"epochs": 2})
    summary = train_job(job)
    assert summary.rows == 100 and summary.progress.evicted > 0


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
def test_a_warm_start_with_servers(make_job: MakeJob, first: Job, capsys: Capture, optimizer: str) -> None:
    """One trainer with one batch in flight learns the same as local training, from the same warm start."""
    sections: dict[str, Any] = {"dense": {"optimizer": {"kind": optimizer}}, "sparse": {"partitions": 8}}
    train_job(make_job(name="start", **sections))
    alone = warm(make_job, "start", name="alone", **sections)
    train_job(alone)
    ps = {"mode": "ps", "servers": 2, "threads": 1, "ps": {"max_in_flight": 1, "lease_s": 60}}
    served = warm(make_job, "start", name="served", train=ps, **sections)
    summary = train_with_servers(served)
    assert summary.progress.warm_start == newest(alone).manifest["warm_start"]
    assert summary.progress.steps == newest(alone).progress.steps
    dense = [np.fromfile(newest(job).path / "dense.bin", np.float32) for job in (alone, served)]
    np.testing.assert_allclose(dense[1], dense[0], atol=1e-5)
    audit = audit_run(Run.of(served))
    assert not audit.differs and any("the counts include those of" in note for note in audit.notes), audit.lines()


def test_a_failed_fresh_warm_start_with_servers_keeps_the_run(make_job: MakeJob, first: Job) -> None:
    before = parameters(first)
    job = make_job(name="first", train={"mode": "ps", "warm_start": "nothing"})
    with pytest.raises(ConfigError, match="no such run"):
        train_with_servers(job, fresh=True)
    assert parameters(first) == before
