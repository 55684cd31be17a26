"""Training with parameter servers compared with its network alone: real roles, with the model of `bench train`.

All figures come from processes that the local launcher started, and leave out their warm-up.
"""

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.bench import ps_fault, ps_pull, ps_speed, train
from elasticrec.bench.cluster import write_checkpoint
from elasticrec.config import Job, parse_job
from elasticrec.machine import num_cores
from elasticrec.run import Run
from elasticrec.training.loop import Trainer
from elasticrec.training.report import Reporter

Result = dict[str, Any]

BATCH_SIZE = 512
# Links to the data file, so that a pass outlasts a measurement: at its end all servers write a checkpoint.
_LINKS = 40

PARTS = {"speed": ps_speed.speed, "growth": ps_speed.growth, "pull": ps_pull.run, "fault": ps_fault.run}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    samples: int
    rows: int
    repeats: int
    seconds: float
    max_trainers: int


@dataclass
class Bench:
    """The settings and files that all parts share."""

    sizes: Sizes
    say: Callable[[str], None]
    raw: dict[str, Any]
    text: bytes
    checkpoint: Path
    num_jobs: int = 0

    def job(self, servers: int, trainers: int, **settings: Any) -> Job:
        """Return a new job with these numbers of roles."""
        self.num_jobs += 1
        roles = {"mode": "ps", "servers": servers, "trainers": trainers, "print_every_s": 1.0}
        ps = settings.pop("ps", {})
        # At the end of a measurement roles are stopped without a checkpoint.
        checkpoint = {"every_s": 86400.0, "keep": 1}
        section = {**self.raw["train"], **roles, "checkpoint": checkpoint, "ps": ps, **settings}
        raw = {**self.raw, "name": f"bench-{self.num_jobs}", "train": section}
        return parse_job(raw, base=Path.cwd(), source="bench")


def run(sizes: Sizes, parts: list[str], say: Callable[[str], None]) -> Result:
    """Return the figures of the parts, medians of `repeats`; compared figures are measured in turn."""
    result: Result = {"samples": sizes.samples, "rows": sizes.rows, "repeats": sizes.repeats, "cores": num_cores()}
    with tempfile.TemporaryDirectory(prefix="elasticrec-bench-") as scratch, contextlib.chdir(scratch):
        bench = _prepare(sizes, say)
        for part in parts:
            result |= PARTS[part](bench)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


def _prepare(sizes: Sizes, say: Callable[[str], None]) -> Bench:
    """Write the samples, and a checkpoint with all rows for the servers to load."""
    values = sizes.rows // train.SLOTS
    say(f"writing {sizes.samples:,} samples of PaddleRec slot text")
    file = train.write_samples(Path("zipf.txt"), sizes.samples, values, "zipf")
    Path("files").mkdir()
    for number in range(_LINKS):
        os.link(file, Path("files") / f"{number:03d}.txt")
    raw = train.raw_job(BATCH_SIZE, ["files"])
    job = parse_job(raw, base=Path.cwd(), source="bench")
    say(f"filling a table with {sizes.rows:,} rows")
    with closing(Reporter(Path("metrics.jsonl"), 3600, stream=io.StringIO())) as reporter:
        trainer = Trainer(job, Run.create(job), reporter)
        train.fill_table(trainer, values)
        checkpoint = write_checkpoint(job, trainer.state.embedding.table, Path("filled"))
    return Bench(sizes, say, raw, train.read_head(file, BATCH_SIZE), checkpoint)


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text, with the shares of time."""
    lines = []
    if "ratio_1_1" in result:
        lines += ps_speed.describe_speed(result)
    if "cpu_growth" in result:
        lines += ps_speed.describe_growth(result)
    if "pull_socket_ratio" in result:
        lines += ps_pull.describe(result)
    if "recovery_s" in result:
        lines += ps_fault.describe(result)
    return lines


__all__ = ["PARTS", "Bench", "Sizes", "describe", "run"]
