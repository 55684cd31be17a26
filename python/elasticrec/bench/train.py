"""Training compared with its network alone: PaddleRec text on disk, ten million rows, no staleness.

The shape is Criteo's: 26 slots and 13 dense values; Wide & Deep with dim 9 and an MLP of 400-400-400, with Adam.
"""

import contextlib
import io
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticrec.bench.network import dense_only_rate
from elasticrec.bench.processes import require_clone
from elasticrec.config import parse_job
from elasticrec.data.batches import open_batches
from elasticrec.data.units import UnitSplit, plan_units
from elasticrec.errors import ModelError
from elasticrec.machine import num_cores
from elasticrec.run import Run
from elasticrec.training.loop import Trainer
from elasticrec.training.report import Reporter

Result = dict[str, Any]

SLOTS, DENSE = 26, 13
BATCH_SIZES = (512, 4096)
RIVAL_BATCH_SIZE = 512
ZIPF = 1.05
_RIVAL_SCRIPT = Path(__file__).parents[3] / "benchmarks" / "train_torch.py"
# Batches that warm up caches, threads and the allocator.
_WARM_UP_BATCHES = 20


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    samples: int
    rows: int
    repeats: int
    seconds: float
    """Duration of a measurement of the network alone."""
    rivals: bool


def run(sizes: Sizes, say: Callable[[str], None]) -> Result:
    """Return all figures, medians of `repeats`; training, the network alone and the rival take turns."""
    script = require_clone(_RIVAL_SCRIPT) if sizes.rivals else None
    with tempfile.TemporaryDirectory(prefix="elasticrec-bench-") as scratch, contextlib.chdir(scratch):
        values = sizes.rows // SLOTS
        files = {}
        for kind in ("zipf", "uniform"):
            say(f"writing {sizes.samples:,} samples of PaddleRec slot text, {kind} signs")
            files[kind] = write_samples(Path(f"{kind}.txt"), sizes.samples, values, kind)
        result: Result = {"samples": sizes.samples, "rows": sizes.rows, "repeats": sizes.repeats, "cores": num_cores()}
        rival = None
        if script is not None:
            say("plain PyTorch (DataLoader workers, EmbeddingBag, sparse Adagrad): searching for its best settings")
            rival = Rival(script, files["zipf"], values)
        for size in BATCH_SIZES:
            measurement = Measurement(size, values, files, sizes, say)
            result.update(measurement.run(rival if size == RIVAL_BATCH_SIZE else None))
        result["samples_per_s"] = result["samples_per_s_512"]
        result["dense_only_samples_per_s"] = result["dense_only_samples_per_s_512"]
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text, with the shares of time."""
    lines = []
    for size in BATCH_SIZES:
        lines.append(
            f"batch {size}: {result[f'samples_per_s_{size}']:,.0f} samples/s (uniform signs "
            f"{result[f'uniform_samples_per_s_{size}']:,.0f}), {result[f'ratio_{size}']:.2f} of the network alone "
            f"({result[f'dense_only_samples_per_s_{size}']:,.0f})"
        )
        shares = sorted(result[f"shares_{size}"].items(), key=lambda item: -item[1])
        lines.append("  time: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005))
    if "vs_torch" in result:
        lines.append(
            f"plain PyTorch: {result['torch_samples_per_s']:,.0f} samples/s, with one bag for all slots "
            f"{result['torch_one_bag_samples_per_s']:,.0f}; ours is {result['vs_torch']:.1f} and "
            f"{result['vs_torch_one_bag']:.1f} times as fast"
        )
    return lines


def write_samples(path: Path, samples: int, values: int, kind: str) -> Path:
    """Write lines in the shape of Criteo: `click:0 dense_feature:0.05 … 1:737395 …`."""
    chance = np.random.default_rng(1)
    signs = np.stack([_draw(chance, samples, values, kind) for _ in range(SLOTS)], axis=1)
    dense = chance.random((samples, DENSE), dtype=np.float32)
    clicks = chance.random(samples) < 0.25
    names = [f"{slot}:" for slot in range(1, SLOTS + 1)]
    with path.open("w") as file:
        for start in range(0, samples, 4096):
            part = slice(start, start + 4096)
            lines = []
            for click, numbers, row in zip(clicks[part], dense[part].tolist(), signs[part].tolist(), strict=True):
                fields = [f"click:{int(click)}", *[f"dense_feature:{number:.4f}" for number in numbers]]
                fields += [name + str(value) for name, value in zip(names, row, strict=True)]
                lines.append(" ".join(fields))
            file.write("\n".join(lines) + "\n")
    return path


def _draw(chance: np.random.Generator, samples: int, values: int, kind: str) -> npt.NDArray[np.int64]:
    if kind == "uniform":
        return chance.integers(0, values, samples)
    weights = np.arange(1, values + 1, dtype=np.float64) ** -ZIPF
    ranks = np.searchsorted(np.cumsum(weights / weights.sum()), chance.random(samples)).clip(0, values - 1)
    # Shuffle, so that frequent values are not neighbours.
    drawn: npt.NDArray[np.int64] = chance.permutation(values)[ranks]
    return drawn


def raw_job(batch_size: int, train: list[str]) -> dict[str, Any]:
    """Return the measured job as a job file would have it."""
    return {
        "name": "bench",
        "data": {
            "format": "paddlerec",
            "train": train,
            "slots": [f"1-{SLOTS}"],
            "dense": [{"name": "dense_feature", "count": DENSE}],
        },
        "model": {"kind": "wide_deep", "dim": 9, "hidden": [400, 400, 400]},
        "dense": {"optimizer": {"kind": "adam"}},
        "sparse": {"optimizer": {"kind": "adagrad"}},
        "train": {"batch_size": batch_size, "print_every_s": 3600},
    }


@dataclass(frozen=True)
class Measurement:
    """Rates at one batch size, measured in turn."""

    size: int
    """Samples in a batch."""
    values: int
    files: dict[str, Path]
    sizes: Sizes
    say: Callable[[str], None]

    def run(self, rival: "Rival | None") -> Result:
        """Return the medians of training, of the network alone and, if given, of the rival."""
        job = parse_job(raw_job(self.size, [str(self.files["zipf"])]), base=Path.cwd(), source="bench")
        text = read_head(self.files["zipf"], self.size)
        # Keep the trainer's own lines out of the output.
        reporter = Reporter(Path("metrics.jsonl"), 3600, stream=io.StringIO())
        rates: defaultdict[str, list[float]] = defaultdict(list)
        shares: dict[str, float] = {}
        with closing(reporter):
            trainer = Trainer(job, Run.create(job), reporter)
            self.say(f"batch {self.size}: filling the table")
            fill_table(trainer, self.values)
            for repeat in range(self.sizes.repeats):
                self.say(
                    f"batch {self.size}, {repeat + 1}/{self.sizes.repeats}: the whole loop, then its network alone"
                )
                torch.set_num_threads(num_cores())
                for kind, file in self.files.items():
                    rate, own = _train_rate(trainer, file, self.sizes.samples)
                    rates[kind].append(rate)
                    shares = own if kind == "zipf" else shares
                rates["dense"].append(dense_only_rate(job, text, self.sizes.seconds)[0])
                for name, rate in rival.rates().items() if rival else ():
                    rates[name].append(rate)
        middle = {name: statistics.median(found) for name, found in rates.items()}
        ours = middle["zipf"]
        result: Result = {
            f"samples_per_s_{self.size}": ours,
            f"uniform_samples_per_s_{self.size}": middle["uniform"],
            f"dense_only_samples_per_s_{self.size}": middle["dense"],
            f"ratio_{self.size}": ours / middle["dense"],
            f"shares_{self.size}": {name: round(share, 4) for name, share in shares.items()},
        }
        for name in ("torch", "torch_one_bag") if rival else ():
            result |= {f"{name}_samples_per_s": middle[name], f"vs_{name}": ours / middle[name]}
        return result


class Rival:
    """Plain PyTorch over the same file, in its own process with its best settings."""

    def __init__(self, script: Path, file: Path, values: int) -> None:
        self._command = [sys.executable, str(script), str(file), "--values", str(values)]
        self._settings = self._run()

    def rates(self) -> dict[str, float]:
        """Return samples per second with one bag per slot, and with one bag for all slots."""
        names = ("torch", "torch_one_bag")
        return {
            name: self._run("--setting", *map(str, setting))
            for name, setting in zip(names, self._settings, strict=True)
        }

    def _run(self, *arguments: str) -> Any:
        finished = subprocess.run([*self._command, *arguments], stdout=subprocess.PIPE, text=True, check=False)
        if finished.returncode != 0:
            raise ModelError(f"{self._command[1]}: expected figures, got exit code {finished.returncode}")
        return json.loads(finished.stdout.splitlines()[-1])


def read_head(path: Path, count: int) -> bytes:
    """Return the first lines of a file."""
    with path.open("rb") as file:
        return b"".join(file.readline() for _ in range(count))


def fill_table(trainer: Trainer, values: int) -> None:
    """Give every value of every slot a row, as a push without a gradient does."""
    embedding = trainer.state.embedding
    names = [f"{slot}:" for slot in range(1, SLOTS + 1)]
    for start in range(0, values, 4096):
        lines = (
            "click:0 " + " ".join(name + str(value) for name in names)
            for value in range(start, min(start + 4096, values))
        )
        batch = trainer.parser.parse("\n".join(lines).encode(), labels=True)
        pooled = embedding.pull(batch)
        pooled.grad = torch.zeros_like(pooled)
        embedding.push(batch, pooled, scale=1.0, seen=0)


def _train_rate(trainer: Trainer, file: Path, num_samples: int) -> tuple[float, dict[str, float]]:
    """Return samples per second over a file, from disk to step, and the share of each stage."""
    data, train = trainer.job.data, trainer.job.train
    units = plan_units([file], UnitSplit(data.unit_bytes, True, train.seed, "bench", data.format), 0, 0)
    warm_up = min(_WARM_UP_BATCHES, num_samples // train.batch_size // 4)
    with closing(open_batches(trainer.job, trainer.parser, units, shuffle=True)) as batches:
        for batch in itertools.islice(batches, warm_up):
            trainer.step(batch)
        clock = trainer.restart_clock()
        samples = 0
        start = time.perf_counter()
        for batch in trainer.time_batches(batches):
            trainer.step(batch)
            samples += batch.num_samples
        return samples / (time.perf_counter() - start), clock.shares()


__all__ = ["Sizes", "describe", "fill_table", "raw_job", "read_head", "run", "write_samples"]
