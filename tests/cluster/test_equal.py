"""Training with servers and without staleness equals local training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from elasticrec import _core
from elasticrec.config import load_job
from elasticrec.data.demo import write_demo
from elasticrec.training.embedding import table_spec
from elasticrec.training.network import build_model
from support.cluster import Training

Rows = dict[int, tuple[Any, ...]]
RATES = {"sgd": 0.05, "adagrad": 0.05, "adam": 0.002}
BATCH = 128
# No lease expires, so no role is replaced: replayed batches would be stale.
LONG_LEASE = {"lease_s": 60}


def job_of(optimizer: str, **train: Any) -> dict[str, Any]:
    return {
        "name": "equal",
        "data": {"format": "slots", "train": "data/20260101/00", "slots": "0-7", "unit_bytes": 65536},
        "model": {"kind": "wide_deep", "dim": 4, "hidden": [16]},
        "sparse": {"partitions": 16, "optimizer": {"kind": optimizer, "learning_rate": RATES[optimizer]}},
        "dense": {"optimizer": {"kind": optimizer, "learning_rate": RATES[optimizer]}},
        "train": {"threads": 1, "batch_size": BATCH, "epochs": 2, **train},
    }


TrainingResult = tuple[Rows, np.ndarray, list[float]]


def train(directory: Path, job: dict[str, Any]) -> TrainingResult:
    """Train in a directory with `data`; return rows, dense values and the loss of every pass."""
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    training = Training.start(directory)
    try:
        training.finish()
    finally:
        training.stop()
    checkpoint = max((directory / "runs/equal/checkpoints").glob("step-*"))
    loaded = load_job(directory / "runs/equal/job.yaml")
    table = _core.Table(json.dumps(table_spec(loaded, build_model(loaded).columns)))
    table.load([str(path) for path in (checkpoint / "table").iterdir()])
    signs = {
        int(field.partition(":")[0])
        for path in directory.glob("data/**/*.txt")
        for line in path.read_text().splitlines()
        for field in line.split()[2:]
    }
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    dense = np.fromfile(checkpoint / "dense.bin", np.float32)[: manifest["dense"]["length"]]
    kind = "pass" if loaded.train.mode == "ps" else "epoch"
    records = [json.loads(line) for line in (directory / "runs/equal/metrics.jsonl").read_text().splitlines()]
    losses = [record["train"][0]["log_loss"] for record in records if record["event"] == kind]
    assert len(losses) == loaded.train.epochs
    return {sign: row for sign in signs if (row := table.get(sign)) is not None}, dense, losses


def check_equal(local: TrainingResult, remote: TrainingResult, optimizer: str) -> None:
    assert remote[0].keys() == local[0].keys() and len(local[0]) > 1000
    assert local[2][-1] < local[2][0] - 0.005, "the loss must decrease, or the comparison proves nothing"
    np.testing.assert_allclose(remote[2], local[2], atol=1e-4, rtol=0)
    # Adam's steps do not shrink with the gradient, so rounding of tiny gradients becomes visible.
    tolerance = 1e-3 if optimizer == "adam" else 1e-5
    np.testing.assert_allclose(remote[1], local[1], atol=tolerance, rtol=0)
    for sign, row in local[0].items():
        assert remote[0][sign][:3] == row[:3]
        np.testing.assert_allclose(remote[0][sign][3], row[3], atol=tolerance, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_one_trainer_with_one_batch_in_flight_equals_local_training(tmp_path: Path, optimizer: str) -> None:
    trained = []
    for mode in ("local", "ps"):
        more: dict[str, Any] = {"servers": 3, "ps": {"max_in_flight": 1, **LONG_LEASE}} if mode == "ps" else {}
        write_demo(tmp_path / mode / "data", samples=20_000, slots=8, hours=1, seed=1)
        trained.append(train(tmp_path / mode, job_of(optimizer, mode=mode, **more)))
    check_equal(*trained, optimizer)


WITH_BUFFERS = """
from torch import nn

from elasticrec.models import Column, Model


class MyModel(Model):
    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        self.normal = nn.BatchNorm1d(shape.num_slots * options.dim)
        self.out = nn.Linear(shape.num_slots * options.dim, shape.num_labels)

    def forward(self, columns, dense):
        return self.out(self.normal(columns["deep"].flatten(1)))
"""


@pytest.mark.slow
def test_batch_norm_statistics_equal_those_of_local_training(tmp_path: Path) -> None:
    trained = []
    for mode in ("local", "ps"):
        more: dict[str, Any] = {"servers": 2, "ps": {"max_in_flight": 1, **LONG_LEASE}} if mode == "ps" else {}
        write_demo(tmp_path / mode / "data", samples=10_000, slots=8, hours=1, seed=1)
        (tmp_path / mode / "my_model.py").write_text(WITH_BUFFERS)
        job = job_of("adagrad", mode=mode, **more)
        job["model"] = {"kind": "my_model.py:MyModel", "dim": 4}
        # Rows that start at zero have no deviation to divide by.
        job["sparse"]["init_scale"] = 0.5
        trained.append(train(tmp_path / mode, job))
    (_, local, _), (_, remote, _) = trained
    # Scale, shift, weights and bias, then the running mean and variance, of 32 inputs.
    assert len(local) >= 5 * 32 and np.abs(local[-64:-32]).max() > 0.001
    np.testing.assert_allclose(remote, local, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_batch_norm_statistics_stay_stable_with_many_lanes(tmp_path: Path) -> None:
    """Each change of a mean is computed from a value that is dozens of pushes old: a plain sum would diverge."""
    trained = []
    for mode, more in (("local", {}), ("ps", {"trainers": 3, "ps": {"lanes": 12, **LONG_LEASE}})):
        write_demo(tmp_path / mode / "data", samples=100_000, slots=8, hours=1, seed=1)
        (tmp_path / mode / "my_model.py").write_text(WITH_BUFFERS)
        job = job_of("adagrad", mode=mode, **more)
        job["model"] = {"kind": "my_model.py:MyModel", "dim": 4}
        job["data"]["unit_bytes"] = 2**18
        job["sparse"]["init_scale"] = 0.5
        trained.append(train(tmp_path / mode, job)[1][-64:])
    local, remote = trained
    # The variance of means of rows between -0.5 and 0.5, before and after training.
    assert 0.05 < local[32:].min() and local[32:].max() < 1
    np.testing.assert_allclose(remote[:32], local[:32], atol=0.2, rtol=0)
    ratios = remote[32:] / local[32:]
    assert 0.3 < ratios.min() and ratios.max() < 3


def write_pairs(lines: list[str], directory: Path) -> None:
    """Write pairs of files for `sync`, which trains two units at a time, and files with the joined batches."""
    for which in ("sync", "local"):
        (directory / which / "data").mkdir(parents=True)
    for pair in range(2):
        # One unit of a pair ends before the other.
        both = lines[pair * 9000 : pair * 9000 + 5000], lines[pair * 9000 + 5000 : (pair + 1) * 9000]
        for at, part in enumerate(both):
            (directory / f"sync/data/{pair}{at}.txt").write_text("".join(part))
        batches = [[part[start : start + BATCH] for part in both] for start in range(0, 5000, BATCH)]
        # Each joined batch is a file of its own, because batches do not cross files and the last ones are shorter.
        for step, parts in enumerate(batches):
            (directory / f"local/data/{pair}-{step:03d}.txt").write_text("".join(parts[0] + parts[1]))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_sync_equals_local_training_on_the_joined_batches(tmp_path: Path, optimizer: str) -> None:
    write_demo(tmp_path / "all", samples=18_000, slots=8, hours=1, seed=1)
    lines = "".join(path.read_text() for path in sorted((tmp_path / "all").glob("*/*/*.txt"))).splitlines(keepends=True)
    write_pairs(lines, tmp_path)
    trained = []
    for mode, settings in (
        ("local", {"mode": "local", "batch_size": 2 * BATCH}),
        ("sync", {"mode": "ps", "strategy": "sync", "servers": 2, "trainers": 2, "step_batches": 2, "ps": LONG_LEASE}),
    ):
        # 80 steps per epoch.
        job = job_of(optimizer, **settings, epochs=4)
        job["data"] |= {"train": "data", "unit_bytes": 2**24, "shuffle": False}
        trained.append(train(tmp_path / mode, job))
    check_equal(*trained, optimizer)
