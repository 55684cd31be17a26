"""One trainer that is never stale learns on servers what local training learns."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from cluster import Training
from elasticrec import _core
from elasticrec.config import load_job
from elasticrec.data.demo import write_demo
from elasticrec.training.embedding import table_spec
from elasticrec.training.network import build_model

Rows = dict[int, tuple[Any, ...]]


def learned(directory: Path, mode: str, optimizer: str) -> tuple[Rows, np.ndarray]:
    """Rows and dense values after a training on demo data."""
    rates = {"sgd": 0.05, "adagrad": 0.05, "adam": 0.002}
    job = {
        "name": "equal",
        "data": {"format": "slots", "train": "data/20260101/00", "slots": "0-7", "unit_bytes": 65536},
        "model": {"kind": "wide_deep", "dim": 4, "hidden": [16]},
        "sparse": {"partitions": 16, "optimizer": {"kind": optimizer, "learning_rate": rates[optimizer]}},
        "dense": {"optimizer": {"kind": optimizer, "learning_rate": rates[optimizer]}},
        "train": {"mode": mode, "threads": 1, "batch_size": 128, "epochs": 2, "ps": {"max_in_flight": 1}},
    }
    if mode == "ps":
        job["train"]["servers"] = 3  # type: ignore[index]
    directory.mkdir()
    write_demo(directory / "data", samples=20_000, slots=8, hours=1, seed=1)
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
        for path in directory.glob("data/*/*/*.txt")
        for line in path.read_text().splitlines()
        for field in line.split()[2:]
    }
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    dense = np.fromfile(checkpoint / "dense.bin", np.float32)[: manifest["dense"]["length"]]
    return {sign: row for sign in signs if (row := table.get(sign)) is not None}, dense


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_rows_and_network_are_those_of_local_training(tmp_path: Path, optimizer: str) -> None:
    local, local_dense = learned(tmp_path / "local", "local", optimizer)
    remote, remote_dense = learned(tmp_path / "ps", "ps", optimizer)
    assert remote.keys() == local.keys() and len(local) > 1000
    # Adam's steps are of one size, so that a rounding of a tiny gradient shows
    tolerance = 1e-3 if optimizer == "adam" else 1e-5
    np.testing.assert_allclose(remote_dense, local_dense, atol=tolerance, rtol=0)
    for sign, row in local.items():
        assert remote[sign][:3] == row[:3]
        np.testing.assert_allclose(remote[sign][3], row[3], atol=tolerance, rtol=0)
