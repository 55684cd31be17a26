"""A served score equals the trainer's score: every format, every model, known, unknown and empty samples."""

from pathlib import Path

import numpy as np
import pytest

from elasticrec.serving.client import Client
from harness import instance_of, odd_lines, serving, succeed, write_job

NUM_SAMPLES = 1000
TOLERANCE = 1e-5


def scores_of(text: str) -> np.ndarray:
    return np.array([[float(value) for value in line.split("\t")] for line in text.splitlines()])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dnn", "wide_deep", "deepfm"])
@pytest.mark.parametrize("format", ["slots", "criteo"])
def test_trainer_file_and_server_agree(tmp_path: Path, format: str, kind: str) -> None:
    # a request has the numbers of a row; their buckets come from the parser
    buckets = {"data__buckets": 6} if format == "criteo" and kind != "dnn" else {}
    write_job(tmp_path, format=format, kind=kind, data__pooling="mean" if kind == "dnn" else "sum", **buckets)
    succeed("train", "job.yaml", cwd=tmp_path)
    succeed("publish", "tiny", cwd=tmp_path)
    (part,) = (tmp_path / "data/20260101/01").glob("*.txt")
    lines = odd_lines(part.read_bytes().splitlines(), format, NUM_SAMPLES)
    (tmp_path / "samples.txt").write_bytes(b"".join(lines))

    trainer = scores_of(succeed("predict", "samples.txt", "--checkpoint", "job.yaml", cwd=tmp_path))
    assert trainer.shape == (NUM_SAMPLES, 1)
    assert len(np.unique(trainer.round(6))) > NUM_SAMPLES / 3, "scores that are all alike would prove nothing"
    in_process = scores_of(succeed("predict", "samples.txt", "--model", "models/tiny", cwd=tmp_path))
    np.testing.assert_allclose(in_process, trainer, atol=TOLERANCE, rtol=0)
    with serving("models/tiny", cwd=tmp_path) as server:
        served = scores_of(succeed("predict", "samples.txt", "--server", server.url, cwd=tmp_path))
        np.testing.assert_allclose(served, trainer, atol=TOLERANCE, rtol=0)
        with Client(server.url) as client:
            named = client.predict([instance_of(line, format) for line in lines])
        np.testing.assert_allclose(named, trainer, atol=TOLERANCE, rtol=0)


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
