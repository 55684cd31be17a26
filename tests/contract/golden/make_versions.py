"""Writes the golden files of manifest format 2: python tests/contract/golden/make_versions.py

versions-2/model/          a model: base 1 with rows of f16, delta 2 onto it, a rollback that holds, a pin
versions-2/expected.json   of each version: rows by sign, signs without one, and scores by line

They are written once, by the release that brings a format, and never again: later ones have to read these.
"""

import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np

from elasticrec import _core
from elasticrec.config import load_job
from elasticrec.publish.local import publish_run
from elasticrec.repository.find import find_chain
from elasticrec.repository.repository import Repository
from elasticrec.repository.rows import open_rows
from elasticrec.run import Run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.training.loop import train_job
from elasticrec.training.predict import load_checkpoint
from support.deltas import publish_delta

GOLDEN = Path(__file__).parent / "versions-2"
SAMPLES = Path(__file__).parent / "format-1" / "samples.txt"
JOB = """\
name: {name}
data:
  format: slots
  train: samples.txt
  slots: [0, {{name: 1, pooling: mean}}, {{name: user, pooling: sqrtn}}]
  labels: [click, buy]
model: {{kind: wide_deep, dim: 3, hidden: [4]}}
sparse: {{partitions: 2}}
train: {{batch_size: 16, threads: 1, epochs: {epochs}}}
publish: {{model: model, row_type: f16, outputs: [buy, click]}}
"""
ABSENT_SIGN = 123456789
REMOVED_SIGN = 42


def train(name: str, epochs: int) -> Run:
    """A run over the golden samples."""
    Path(f"{name}.yaml").write_text(JOB.format(name=name, epochs=epochs))
    job = load_job(f"{name}.yaml")
    train_job(job)
    return Run.of(job)


def expected_of(version: int, signs: list[int], lines: list[str]) -> dict[str, Any]:
    """Return the values that a reader of the version must find."""
    fetched = find_chain(f"models/model:{version}")
    rows, present = open_rows(fetched).lookup(np.array(signs, np.uint64))
    scores = _core.Predictor(str(fetched.directory), str(library_path())).predict("\n".join(lines).encode())
    return {
        "rows": {str(sign): row.tolist() for sign, row, found in zip(signs, rows, present, strict=True) if found},
        "absent": [sign for sign, found in zip(signs, present, strict=True) if not found],
        "lines": lines,
        "scores": scores.tolist(),
    }


def make(directory: Path) -> None:
    """Train twice, publish a base and a delta."""
    shutil.copy(SAMPLES, directory)
    lines = SAMPLES.read_text().splitlines()
    signs = sorted({int(field.split(":")[0]) for line in lines for field in line.split() if ":" in field})
    publish_run(train("first", 2))
    repository = Repository.open("models", "model")
    kept = set(signs) - {REMOVED_SIGN}
    later = load_checkpoint(train("second", 4))
    publish_delta(repository, later, 1, set(sorted(kept)[:3]), {REMOVED_SIGN}, len(kept))
    repository.offer(2)
    repository.rollback(1)
    repository.pin(2)
    chosen = [*lines[:20], "1 0", f"1 0 {ABSENT_SIGN}:0 7:user 7:user {REMOVED_SIGN}:1"]
    expected = {str(version): expected_of(version, [*signs, ABSENT_SIGN], chosen) for version in (1, 2)}
    (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    """Write them where there are none yet."""
    if GOLDEN.exists():
        sys.exit(f"{GOLDEN}: is there already; golden files are written once")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        make(Path(name))
        shutil.copytree("models/model", GOLDEN / "model", ignore=shutil.ignore_patterns(".*"))
        shutil.copy("expected.json", GOLDEN)


if __name__ == "__main__":
    main()
