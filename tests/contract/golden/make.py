"""Writes the golden files of the format that this release writes: python tests/contract/golden/make.py

format-<N>/job.yaml        a job that trains in a moment
format-<N>/samples.txt     its samples
format-<N>/checkpoint/     the checkpoint of its end
format-<N>/version/        what was published of it
format-<N>/expected.json   rows by sign, and scores by line

They are written once, by the release that brings a format, and never again: later ones have to read these.
"""

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from elasticrec.config import load_job
from elasticrec.manifest import FORMAT
from elasticrec.publish.local import publish_run
from elasticrec.run import Run
from elasticrec.training.loop import train_job
from elasticrec.training.predict import load_checkpoint

GOLDEN = Path(__file__).parent / f"format-{FORMAT}"
JOB = """\
name: golden
data:
  format: slots
  train: samples.txt
  slots: [0, {name: 1, pooling: mean}, {name: user, pooling: sqrtn}]
  labels: [click, buy]
model: {kind: wide_deep, dim: 3, hidden: [4]}
sparse: {partitions: 2}
train: {batch_size: 16, threads: 1, epochs: 2}
"""
LARGEST_SIGN = 2**64 - 1
ABSENT_SIGN = 123456789


def write_samples(path: Path) -> list[str]:
    """Few signs, the smallest and the largest among them."""
    draw = random.Random(1)
    lines = []
    for _ in range(120):
        show = draw.randint(1, 3)
        click = draw.randint(0, show)
        signs = draw.choices([0, 1, 7, 42, 2**63, LARGEST_SIGN], k=draw.randint(0, 5))
        fields = [f"{sign}:{draw.choice(['0', '1', 'user'])}" for sign in signs]
        lines.append(" ".join([str(show), str(click), f"buy={draw.randint(0, click)}", *fields]))
    path.write_text("".join(f"{line}\n" for line in lines))
    return lines


def make(directory: Path) -> None:
    """Train, publish, and keep what a reader needs."""
    (directory / "job.yaml").write_text(JOB)
    lines = write_samples(directory / "samples.txt")
    job = load_job(directory / "job.yaml")
    train_job(job)
    run = Run.of(job)
    published = publish_run(run)
    loaded = load_checkpoint(run)
    shutil.copytree(loaded.checkpoint.path, directory / "checkpoint")
    shutil.copytree(published.path, directory / "version")
    chosen = [*lines[:20], "1 0", f"1 0 {ABSENT_SIGN}:0 7:user 7:user"]
    table = loaded.state.embedding.table
    signs = sorted({int(field.split(":")[0]) for line in lines for field in line.split() if ":" in field})
    expected: dict[str, Any] = {
        "rows": {str(sign): table.get(sign) for sign in signs},
        "lines": chosen,
        "scores": loaded.predict("\n".join(chosen).encode()).tolist(),
    }
    (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    """Write them where there are none yet."""
    if GOLDEN.exists():
        sys.exit(f"{GOLDEN}: is there already; golden files are written once")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        make(Path(name))
        for entry in ("runs", "models"):
            shutil.rmtree(entry)
        shutil.copytree(name, GOLDEN)
    largest = max(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    print(f"wrote {os.path.relpath(GOLDEN)}, the largest file has {largest:,} bytes")


if __name__ == "__main__":
    main()
