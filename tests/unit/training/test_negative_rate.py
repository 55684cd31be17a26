"""Training data with a share of its negatives: scores refer to the data before sampling."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from elasticrec import _core
from elasticrec.models import LR, Options, Shape
from elasticrec.publish.local import publish_run
from elasticrec.run import Run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.training.loop import train_job
from elasticrec.training.network import Scorer
from elasticrec.training.predict import load_checkpoint
from support.small import MakeJob


def test_probabilities_refer_to_the_data_before_sampling() -> None:
    """Check against counts: all clicks of a million samples are kept, and a share of the rest."""
    rate, clicks, buys, total = 0.1, 20_000, 5_000, 1_000_000
    kept = clicks + rate * (total - clicks)
    learned = torch.tensor([[clicks / kept, buys / kept]], dtype=torch.float64)
    scorer = Scorer(LR(Shape(1, 0, 2), Options()), rate)
    scores = scorer.probabilities(torch.logit(learned))
    np.testing.assert_allclose(scores.numpy(), [[clicks / total, buys / total]], rtol=1e-12)
    assert torch.equal(Scorer(scorer.model).probabilities(torch.logit(learned)), torch.sigmoid(torch.logit(learned)))


def test_local_and_served_scores_are_calibrated(
    tmp_path: Path, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(3)
    rates = {1: 0.05, 2: 0.2}
    full, sampled = [], []
    for _ in range(40_000):
        sign = rng.choice([1, 2])
        click = rng.random() < rates[sign]
        full.append(f"1 {int(click)} {sign}:0\n")
        if click or rng.random() < 0.25:
            sampled.append(full[-1])
    (tmp_path / "train.txt").write_text("".join(sampled))
    job = make_job(
        data={"negative_rate": 0.25, "slots": "0"},
        model={"kind": "lr"},
        sparse={"optimizer": {"kind": "adagrad", "learning_rate": 0.2}},
        dense={"optimizer": {"learning_rate": 0.01}},
        train={"epochs": 3},
    )
    train_job(job)
    lines = b"1 0 1:0\n1 0 2:0\n"
    scores = load_checkpoint(Run.of(job)).predict(lines)
    np.testing.assert_allclose(scores[:, 0], [0.05, 0.2], rtol=0.15)
    version = publish_run(Run.of(job)).path
    served = _core.Predictor(str(version), str(library_path())).predict(lines)
    np.testing.assert_allclose(served, scores, atol=1e-6)
