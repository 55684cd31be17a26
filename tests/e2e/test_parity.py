"""Served scores equal the trainer's, for every format and model, with known, unknown and empty samples."""

import re
from pathlib import Path

import numpy as np
import pytest

from elasticrec.serving.client import Client
from support.harness import instance_of, odd_lines, serving, succeed, write_job

NUM_SAMPLES = 1000
TOLERANCE = 1e-5


OWN_MODEL = """
import torch
from torch import nn

from elasticrec.models import Column, Model


class MyModel(Model):
    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        self.norm = nn.BatchNorm1d(shape.num_slots * options.dim + shape.num_dense)
        self.out = nn.Linear(shape.num_slots * options.dim + shape.num_dense, shape.num_labels)

    def forward(self, columns, dense):
        return self.out(self.norm(torch.cat([columns["deep"].flatten(1), dense], 1)))
"""


def scores_of(text: str) -> np.ndarray:
    return np.array([[float(value) for value in line.split("\t")] for line in text.splitlines()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "kind"),
    [
        *((format, kind) for format in ("slots", "criteo") for kind in ("dnn", "wide_deep", "deepfm")),
        ("slots", "lr"),
        ("criteo", "fm"),
        ("criteo", "dcn_v2"),
        ("criteo", "my_model.py:MyModel"),
    ],
)
def test_trainer_file_and_server_agree(tmp_path: Path, format: str, kind: str) -> None:
    (tmp_path / "my_model.py").write_text(OWN_MODEL)
    # A request has the numbers of a row; the parser computes their buckets.
    buckets = {"data__buckets": 6} if format == "criteo" and kind != "dnn" else {}
    write_job(tmp_path, format=format, kind=kind, data__pooling="mean" if kind == "dnn" else "sum", **buckets)
    succeed("train", "job.yaml", cwd=tmp_path)
    succeed("publish", "tiny", cwd=tmp_path)
    lines = odd_lines(lines_of_last_hour(tmp_path), format, NUM_SAMPLES)
    assert check_scores(tmp_path, "tiny", lines, format).shape == (NUM_SAMPLES, 1)


# A history holds at most 12 signs: most histories of unknown signs, and of two lines together, are truncated.
SEQUENCE_SLOTS = ("0", "1", "item", *["history"] * 21)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "slots", "labels"), [("sequence", SEQUENCE_SLOTS, 1), ("multitask", tuple("01234567"), 2)]
)
def test_sequences_and_two_labels_agree(tmp_path: Path, kind: str, slots: tuple[str, ...], labels: int) -> None:
    """DIN and MMoE, with the jobs of their demo data."""
    succeed("data", "demo", "data", "--kind", kind, "--samples", "8000", "--hours", "2", "--slots", "8", cwd=tmp_path)
    succeed("train", "data/job.yaml", "--set", "train.threads=1", cwd=tmp_path)
    succeed("publish", "demo", cwd=tmp_path)
    written = lines_of_last_hour(tmp_path)
    histories = [b"".join(re.findall(rb" \d+:history", line)) for line in written]
    longer = [line + histories[number - 1] for number, line in enumerate(written)]
    lines = odd_lines(longer, "slots", NUM_SAMPLES, slots)
    scores = check_scores(tmp_path, "demo", lines, "slots")
    assert scores.shape == (NUM_SAMPLES, labels)
    if kind == "multitask":
        assert np.abs(scores[:, 0] - scores[:, 1]).mean() > 0.01, "equal labels would hide a wrong order"
        return
    # The history must affect the scores.
    without = [re.sub(rb" \d+:history", b"", line) for line in lines]
    (tmp_path / "without.txt").write_bytes(b"".join(without))
    others = scores_of(succeed("predict", "without.txt", "--checkpoint", "demo", cwd=tmp_path))
    assert (np.abs(others - scores) > 100 * TOLERANCE).mean() > 0.3


def lines_of_last_hour(directory: Path) -> list[bytes]:
    (part,) = (directory / "data/20260101/01").glob("*.txt")
    return part.read_bytes().splitlines()


def check_scores(directory: Path, name: str, lines: list[bytes], format: str) -> np.ndarray:
    """Return the trainer's scores after checking that a version, served text and served JSON give the same."""
    (directory / "samples.txt").write_bytes(b"".join(lines))
    trainer = scores_of(succeed("predict", "samples.txt", "--checkpoint", name, cwd=directory))
    for column in trainer.T:
        assert len(np.unique(column.round(6))) > len(lines) / 3, "equal scores would prove nothing"
    in_process = scores_of(succeed("predict", "samples.txt", "--model", f"models/{name}", cwd=directory))
    np.testing.assert_allclose(in_process, trainer, atol=TOLERANCE, rtol=0)
    with serving(f"models/{name}", cwd=directory) as server:
        served = scores_of(succeed("predict", "samples.txt", "--server", server.url, cwd=directory))
        np.testing.assert_allclose(served, trainer, atol=TOLERANCE, rtol=0)
        with Client(server.url) as client:
            named = client.predict([instance_of(line, format) for line in lines])
        np.testing.assert_allclose(named, trainer, atol=TOLERANCE, rtol=0)
    return trainer


@pytest.mark.slow
def test_two_labels_and_weights_are_served_in_order(tmp_path: Path) -> None:
    write_job(
        tmp_path,
        format="slots",
        kind="wide_deep",
        data__labels=["click", "buy"],
        train__epochs=4,
        samples=2000,
        dense__optimizer={"learning_rate": 0.02},
    )
    for part in tmp_path.glob("data/20260101/*/*.txt"):
        changed = []
        for number, line in enumerate(part.read_text().splitlines()):
            _, click, rest = line.split(" ", 2)
            changed.append(f"{3 if number % 5 == 0 else 1} {click} buy={number % 2 * int(click)} {rest}\n")
        part.write_text("".join(changed))
    succeed("train", "job.yaml", cwd=tmp_path)
    succeed("publish", "runs/tiny", cwd=tmp_path)
    (part,) = (tmp_path / "data/20260101/01").glob("*.txt")
    trainer = scores_of(succeed("predict", str(part), "--checkpoint", "runs/tiny", cwd=tmp_path))
    in_process = scores_of(succeed("predict", str(part), "--model", "models/tiny/1", cwd=tmp_path))
    assert trainer.shape == (1000, 2)
    np.testing.assert_allclose(in_process, trainer, atol=TOLERANCE, rtol=0)
    assert trainer[:, 0].mean() > 1.3 * trainer[:, 1].mean(), "buys are half as many as clicks"


def auc_of(labels: np.ndarray, scores: np.ndarray) -> float:
    """Return the AUC of scores, ignoring ties."""
    ranks = scores.argsort().argsort() + 1
    positives = labels.sum()
    return float((ranks[labels].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives)))


@pytest.mark.slow
@pytest.mark.parametrize(("row_type", "bound"), [("f16", 0.0002), ("int8", 0.001)])
def test_smaller_row_types_barely_change_the_auc(tmp_path: Path, row_type: str, bound: float) -> None:
    """The AUC stays close to that of the checkpoint."""
    write_job(tmp_path, format="slots", kind="deepfm", samples=40_000, publish__row_type=row_type)
    succeed("train", "job.yaml", cwd=tmp_path)
    succeed("publish", "tiny", cwd=tmp_path)
    (part,) = (tmp_path / "data/20260101/01").glob("*.txt")
    labels = np.array([line.split(b" ")[1] == b"1" for line in part.read_bytes().splitlines()])
    trained = scores_of(succeed("predict", str(part), "--checkpoint", "tiny", cwd=tmp_path))[:, 0]
    with serving("models/tiny", cwd=tmp_path) as server:
        served = scores_of(succeed("predict", str(part), "--server", server.url, cwd=tmp_path))[:, 0]
    assert 0 < np.abs(served - trained).max() < 0.02
    assert auc_of(labels, trained) > 0.6
    assert auc_of(labels, trained) - auc_of(labels, served) <= bound
