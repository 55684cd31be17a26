"""Trainings with parameter servers, started with the command line; tests kill their roles and count the samples."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import yaml

from elasticrec import _core
from elasticrec.audit.audit import audit_run
from elasticrec.config import load_job
from elasticrec.run import Run
from elasticrec.training.embedding import table_spec
from elasticrec.training.network import build_model

TIMEOUT_S = 1800.0
# Hours of demo data; the last one is for evaluation.
HOURS = 4
SAMPLES_PER_HOUR = 100_000

_ROLE = re.compile(r"\s*(\d+)\s+(\d+)\s.* -m elasticrec (\w+) ")


# Dense values with the state of their optimizer; weights and counts of every sign.
Parameters = tuple[bytes, dict[int, Any]]


@dataclass(frozen=True)
class Undisturbed:
    """A training without any fault."""

    trainings: "Trainings"
    auc: float
    seconds: float

    @property
    def fault_interval_s(self) -> float:
        """Seconds between faults: short on a fast machine, so that there are several.

        Longer on a slow machine, where roles take longer to restart.
        """
        return max(min(4.0, self.seconds / 4), self.seconds / 12)

    @cached_property
    def parameters(self) -> Parameters:
        """Parameters of its last checkpoint."""
        return self.trainings.parameters()


@dataclass
class Training:
    """`elasticrec train` in a process of its own, and the processes it started."""

    process: subprocess.Popen[bytes]
    log: Path
    kills: Counter[str] = field(default_factory=Counter)

    @classmethod
    def start(cls, directory: Path, *settings: str, **environment: str) -> "Training":
        """Train `job.yaml` of a directory with these settings."""
        log = directory / "train.log"
        command = [sys.executable, "-m", "elasticrec", "train", "job.yaml"]
        command += [part for setting in settings for part in ("--set", setting)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, cwd=directory, stdout=output, stderr=output, env=os.environ | environment
            )
        return cls(process, log)

    def roles(self, *wanted: str) -> list[tuple[int, str]]:
        """Return process ids and names of the running roles."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        found = [match for match in map(_ROLE.match, listed.splitlines()) if match]
        return [(int(m[1]), m[3]) for m in found if int(m[2]) == self.process.pid and (not wanted or m[3] in wanted)]

    def wait_for(self, pattern: str) -> None:
        """Wait until the output matches a pattern."""
        self.wait_until(lambda: re.search(pattern, self.output()))

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Poll a condition until it holds, while the training runs."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.output()
            time.sleep(0.05)

    def progress(self) -> float:
        """Return the share of complete units, from the last progress line."""
        counts = re.findall(r"units (\d+) of (\d+)", self.output())
        return int(counts[-1][0]) / int(counts[-1][1]) if counts else 0.0

    def disturb(self, seed: int, interval_s: float, roles: Iterable[str], *, hang_s: float | None = None) -> None:
        """Kill a random role every few seconds until the training ends; with `hang_s`, pause it for that long instead.

        If the training is faster than `interval_s`, its progress triggers the faults: the first within the first fifth
        of the units, each later one less than a third of the units after the previous one.
        """
        chance = random.Random(seed)
        end = time.monotonic() + TIMEOUT_S
        next_kill, next_progress = time.monotonic() + interval_s, chance.uniform(0.01, 0.2)
        while self.process.poll() is None:
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)
            if time.monotonic() < next_kill and self.progress() < next_progress:
                continue
            if not (running := self.roles(*roles)):
                continue
            process, role = chance.choice(running)
            self.send(process, signal.SIGKILL if hang_s is None else signal.SIGSTOP)
            self.kills[role] += 1
            if hang_s is not None:
                time.sleep(hang_s)
                self.send(process, signal.SIGCONT)
            next_kill = time.monotonic() + interval_s * chance.uniform(0.5, 1.5)
            next_progress = self.progress() + chance.uniform(0.1, 0.3)
            # The pauses grow, so that a run that saves no checkpoint between two kills still ends.
            interval_s *= 1.1

    def send(self, process: int, number: signal.Signals) -> None:
        """Send a signal to one of its processes, which may just have ended."""
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return

    def finish(self) -> str:
        """Wait until it ends, check that it succeeded, and return its output."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(self.output()) from None
        assert code == 0, self.output()
        return self.output()

    def stop(self) -> None:
        """Stop it and every process it started."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                for process, _ in self.roles():
                    self.send(process, signal.SIGKILL)
                self.process.kill()
                self.process.wait()

    def output(self) -> str:
        """Return its output so far."""
        return self.log.read_text(errors="replace")


@cache
def count(files: tuple[Path, ...], epochs: int) -> dict[int, tuple[int, int]]:
    """Return show and click of every sign in files of slot text, counted without code of the product."""
    counts: dict[int, list[int]] = {}
    for path in files:
        with path.open() as lines:
            for line in lines:
                show, click, *fields = line.split()
                for item in fields:
                    found = counts.setdefault(int(item.partition(":")[0]), [0, 0])
                    found[0] += int(show)
                    found[1] += int(click)
    return {sign: (show * epochs, click * epochs) for sign, (show, click) in counts.items()}


def load_rows(run: Path, checkpoint: Path) -> _core.Table:
    """Load the table of a checkpoint."""
    job = load_job(run / "job.yaml")
    table = _core.Table(json.dumps(table_spec(job, build_model(job).columns)))
    table.load([str(path) for path in (checkpoint / "table").iterdir()])
    return table


def check_counts(run: Path, files: Iterable[Path], epochs: int) -> Path:
    """Check the counts of every sign against the files; return the last checkpoint of the run."""
    checkpoint = max((run / "checkpoints").glob("step-*"))
    table = load_rows(run, checkpoint)
    expected = count(tuple(files), epochs)
    assert len(table) == len(expected)
    differ = {sign: (row, counts) for sign, counts in expected.items() if (row := table.get(sign))[:2] != counts}
    assert differ == {}
    return checkpoint


def wait_for_end(processes: Iterable[int]) -> None:
    """Wait until all of these processes have ended."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, "roles end with the process that started them"
        time.sleep(0.05)


class Trainings:
    """Trainings of one job on the first hours of the demo data, in one directory."""

    SETTINGS = (
        "train.servers=2",
        "train.trainers=2",
        "train.ps.lanes=2",
        "train.ps.lease_s=2",
        "train.ps.heartbeat_s=0.5",
        "train.checkpoint.every_s=3",
    )
    # On a busy machine `async` computes gradients on older values; with smaller steps its AUC does not depend on it.
    ASYNC_RATE = "dense.optimizer.learning_rate=0.014"

    def __init__(self, directory: Path, data: Path, num_hours: int = HOURS - 1) -> None:
        self.directory, self.data, self.num_hours = directory, data, num_hours
        self.started = list[Training]()
        self.num_samples = num_hours * SAMPLES_PER_HOUR
        """Samples of an epoch."""
        self.run = directory / "runs/cluster"
        hours = [str(data / f"20260101/0{hour}") for hour in range(HOURS)]
        job = {
            "name": "cluster",
            "data": {
                "format": "slots",
                "train": hours[:num_hours],
                "eval": hours[-1],
                "slots": "0-19",
                "unit_bytes": 2**20,
            },
            # Rates with which the model converges: another order of batches changes its AUC by less than 0.001.
            "model": {"kind": "deepfm", "dim": 8, "hidden": [64, 32]},
            "sparse": {"init_scale": 0.02, "optimizer": {"learning_rate": 0.03}},
            # The increments of several geo trainers cannot be added up with Adam.
            "dense": {"optimizer": {"kind": "adagrad", "learning_rate": 0.02}},
            "train": {"mode": "ps", "threads": 1, "batch_size": 256, "print_every_s": 0.5},
        }
        (directory / "job.yaml").write_text(yaml.safe_dump(job))

    def settings(self, *settings: str) -> tuple[str, ...]:
        """Return the settings of a training: those of all tests, and these."""
        is_async = all(one == "train.strategy=async" for one in settings if one.startswith("train.strategy="))
        return (*self.SETTINGS, *([self.ASYNC_RATE] if is_async else []), *settings)

    def start(self, *settings: str, **environment: str) -> Training:
        """Start a training with these settings."""
        training = Training.start(self.directory, *self.settings(*settings), **environment)
        self.started.append(training)
        return training

    def check(self, epochs: int = 1) -> float:
        """Check with the audit that every sample was counted once per epoch; return the AUC of the last evaluation."""
        audit = audit_run(Run(self.run))
        assert not audit.differs, audit.lines()
        assert (audit.num_passes, audit.num_samples) == (epochs, epochs * self.num_samples), audit.lines()
        checkpoint = max((self.run / "checkpoints").glob("step-*"))
        auc: float = json.loads((checkpoint / "manifest.json").read_text())["metrics"]["eval"][0]["auc"]
        return auc

    def check_by_hand(self) -> None:
        """Check the counts of one epoch without the audit."""
        check_counts(self.run, self._files(), 1)

    def signs(self) -> list[int]:
        """Return every sign of the training data in ascending order."""
        return sorted(count(tuple(self._files()), 1))

    def _files(self) -> list[Path]:
        return sorted(path for hour in range(self.num_hours) for path in self.data.glob(f"20260101/0{hour}/*.txt"))

    def parameters(self) -> Parameters:
        """Return the dense values and the rows of the last checkpoint."""
        checkpoint = max((self.run / "checkpoints").glob("step-*"))
        table = load_rows(self.run, checkpoint)
        return (checkpoint / "dense.bin").read_bytes(), {sign: table.get(sign) for sign in self.signs()}

    def stop(self) -> None:
        """Stop all trainings."""
        for training in self.started:
            training.stop()
