"""Checkpoints are complete or ignored, only the newest are kept, and damaged files are refused."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST
from elasticrec.run import Run
from elasticrec.training.checkpoint import (
    Progress,
    State,
    latest,
    list_checkpoints,
    open_checkpoint,
    restore,
    save,
)
from elasticrec.training.dense import FlatParameters
from elasticrec.training.embedding import Embedding
from elasticrec.training.metrics import Metrics, MetricSums
from elasticrec.training.network import Scorer, build_model, loss_of
from support.small import MakeJob, sample_lines

START = Progress(epoch=0, unit=3, batches=2, steps=1, samples=640, records=650, bad_records=10)
FILES = ("dense.bin", "metrics.npz", "table/part-00000")


pytestmark = pytest.mark.usefixtures("own_directory")


class Model:
    """The state that a checkpoint saves, and a step of training on it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.scorer = Scorer(build_model(job))
        model = self.scorer.model
        sums = [MetricSums() for _ in job.data.labels]
        self.state = State(Embedding(job, model.columns), FlatParameters(model, job), sums)
        self.parser = _core.Parser(json.dumps(job.features()))

    def step(self, seed: int) -> None:
        batch = self.parser.parse("\n".join(sample_lines(64, seed)).encode(), labels=True)
        pooled = self.state.embedding.pull(batch)
        logits = self.scorer.logits(pooled, torch.from_numpy(batch.dense))
        loss = loss_of(logits, batch)
        self.state.dense.zero_gradient()
        torch.autograd.backward(loss.mean)
        self.state.embedding.push(batch, pooled, loss.weight, seen=0)
        self.state.dense.step()
        self.state.sums[0].add(logits.detach().numpy()[:, 0], batch.labels[:, 0], batch.weights)

    def save(self, run: Run, steps: int = 1, **changes: object) -> Path:
        return save(run, self.job, self.state, dataclasses.replace(START, steps=steps, **changes)).path


def trained(job: Job, steps: int = 3) -> Model:
    model = Model(job)
    for step in range(steps):
        model.step(step)
    return model


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in FILES}


def test_a_restored_state_continues_with_the_same_bits(make_job: MakeJob) -> None:
    job = make_job()
    run = Run.create(job)
    model = trained(job)
    metrics = [Metrics(samples=9, auc=0.75, log_loss=0.5, copc=None)]
    saved = save(run, job, model.state, START, metrics)
    assert (saved.progress, saved.evaluation, saved.name) == (START, metrics, "step-000000000001")

    found = latest(run)
    assert found == saved
    other = Model(job)
    restore(saved, job, other.state)
    for at in range(3, 6):
        model.step(at)
        other.step(at)
    left, right = model.save(run, 2), other.save(run, 3)
    assert contents(left) == contents(right)
    assert model.state.sums[0].result() == other.state.sums[0].result()


def test_the_content_of_the_manifest(make_job: MakeJob) -> None:
    job = make_job()
    run = Run.create(job)
    model = trained(job)
    path = model.save(run, finished=True)
    manifest = json.loads((path / MANIFEST).read_bytes())
    assert sorted(manifest["files"]) == sorted(FILES)
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == sorted(
        [*FILES, MANIFEST]
    )
    assert manifest["progress"] == {
        "epoch": 0,
        "watermark": 3,
        "complete": [],
        "open": [{"unit": 3, "batches": 2}],
        "upkept": 0,
        "finished": True,
    }
    assert manifest["rows"] == len(model.state.embedding.table)
    vectors = np.fromfile(path / "dense.bin", np.float32).reshape(3, -1)
    np.testing.assert_array_equal(vectors[0], model.state.dense.values)
    assert (manifest["dense"]["vectors"], manifest["dense"]["steps"]) == (["value", "exp_avg", "exp_avg_sq"], 3)


def test_the_newest_checkpoints_are_kept(make_job: MakeJob) -> None:
    job = make_job(train={"checkpoint": {"keep": 2}})
    run = Run.create(job)
    model = trained(job, 1)
    for steps in (1, 2, 9, 10):
        model.save(run, steps)
    assert [checkpoint.name for checkpoint in list_checkpoints(run)] == ["step-000000000009", "step-000000000010"]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000000000009", "step-000000000010"]


def test_an_incomplete_checkpoint_is_ignored_and_removed(make_job: MakeJob) -> None:
    job = make_job()
    run = Run.create(job)
    model = trained(job, 1)
    assert latest(run) is None
    good = model.save(run, 1)
    for steps in (0, 2, 3):
        half = run.checkpoints / f"step-{steps:012d}"
        shutil.copytree(good, half)
        (half / MANIFEST).unlink()
    assert latest(run) == open_checkpoint(good)
    # the new checkpoint replaces an incomplete one of the same name
    model.save(run, 2)
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-000000000001", "step-000000000002"]


def test_a_complete_checkpoint_is_never_replaced(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """An epoch may end at the step of the last checkpoint; a full disk then must not lose that checkpoint."""
    job = make_job(train={"checkpoint": {"keep": 1}})
    run = Run.create(job)
    model = trained(job, 1)
    first = model.save(run, 7)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("elasticrec.training.checkpoint.write_synced", fail)
        with pytest.raises(OSError, match="No space left"):
            model.save(run, 7, epoch=1, batches=0)
    assert [path.name for path in run.checkpoints.iterdir()] == [first.name]
    found = latest(run)
    assert found == open_checkpoint(first)
    restore(found, job, Model(job).state)

    second = model.save(run, 7, epoch=1, batches=0)
    assert [path.name for path in run.checkpoints.iterdir()] == [second.name]
    found = latest(run)
    assert found is not None
    assert (found.progress.epoch, found.progress.steps) == (1, 7)
    assert model.save(run, 8) > second > first


def test_damaged_files_are_refused_by_name(make_job: MakeJob) -> None:
    job = make_job()
    run = Run.create(job)
    path = trained(job).save(run)
    for name, content in contents(path).items():
        file = path / name
        for at in range(0, len(content), max(1, len(content) // 7)):
            flipped = bytearray(content)
            flipped[at] ^= 1 << at % 8
            file.write_bytes(flipped)
            assert refusal(run, job) == f"{file}: sha-256 differs from the manifest, the file is damaged"
        for length in (0, 1, len(content) - 1):
            file.write_bytes(content[:length])
            assert refusal(run, job) == f"{file}: expected {len(content)} bytes, got {length}"
        file.unlink()
        assert refusal(run, job) == f"{file}: named in the manifest but missing"
        file.write_bytes(content)
    restore(open_checkpoint(path), job, Model(job).state)


def refusal(run: Run, job: Job) -> str:
    state = Model(job).state
    with pytest.raises(ModelError) as caught:
        checkpoint = latest(run)
        assert checkpoint is not None
        restore(checkpoint, job, state)
    assert "\n" not in str(caught.value)
    assert len(state.embedding.table) == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"hidden": [8, 9]}}, "`model.hidden`"),
        ({"data": {"pooling": "mean"}}, "`data.slots`"),
        ({"dense": {"optimizer": {"kind": "sgd"}}}, "`dense.optimizer.kind`"),
        ({"train": {"seed": 2}}, "`train.seed`"),
        ({"sparse": {"partitions": 8}}, "`sparse.partitions`"),
    ],
)
def test_a_checkpoint_of_another_job_is_rejected(make_job: MakeJob, changes: dict[str, object], message: str) -> None:
    job = make_job()
    run = Run.create(job)
    path = trained(job).save(run)
    assert refusal(run, make_job(**changes)) == f"{path}: belongs to another job, which differs in {message}"


def test_a_checkpoint_of_another_network_is_rejected(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, another release has other tensors in the model of the same name."""
    job = make_job()
    run = Run.create(job)
    path = trained(job).save(run)
    other = make_job(model={"hidden": [8, 9]})
    monkeypatch.setattr("elasticrec.training.checkpoint.meaning_keys", lambda _: {})
    assert refusal(run, other) == f"{path}: belongs to another model: `deep.2.weight`: expected [9, 8], got [8, 8]"
    sgd = make_job(dense={"optimizer": {"kind": "sgd"}})
    assert refusal(run, sgd) == f"{path}: belongs to another model: dense optimizer: expected sgd, got adam"
    message = refusal(run, make_job(sparse={"partitions": 8}))
    assert message.startswith(f"{path}/table/part-00000: partitions: ")


def test_a_checkpoint_without_rows(make_job: MakeJob) -> None:
    job = make_job()
    run = Run.create(job)
    Model(job).save(run)
    found = latest(run)
    assert found is not None
    restore(found, job, Model(job).state)
