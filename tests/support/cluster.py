"""Real trainings with parameter servers for tests: started with the command line, disturbed, counted by hand."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from elasticrec import _core
from elasticrec.config import load_job
from elasticrec.training.embedding import table_spec
from elasticrec.training.network import build_model

TIMEOUT_S = 1800.0
STRATEGIES = ("async", "sync", "half_async", "geo")

_ROLE = re.compile(r"\s*(\d+)\s+(\d+)\s.* -m elasticrec (\w+) ")


# The dense values with the state of their optimizer; of every sign its weights and counts.
Parameters = tuple[bytes, dict[int, Any]]


@dataclass(frozen=True)
class Undisturbed:
    """A training in which nothing happened."""

    auc: float
    seconds: float
    parameters: "Parameters"

    @property
    def every_s(self) -> float:
        """How often a training like it is disturbed: every few seconds, and several times on a fast machine too.

        On a slow machine roles take longer to come back.
        """
        return max(min(4.0, self.seconds / 4), self.seconds / 12)


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
        """Process ids and names of the roles that run now."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        found = [match for match in map(_ROLE.match, listed.splitlines()) if match]
        return [(int(m[1]), m[3]) for m in found if int(m[2]) == self.process.pid and (not wanted or m[3] in wanted)]

    def wait_for(self, pattern: str) -> None:
        """Until the log says something."""
        end = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.output()):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def progress(self) -> float:
        """Share of its units that are complete, as it last said."""
        said = re.findall(r"units (\d+) of (\d+)", self.output())
        return int(said[-1][0]) / int(said[-1][1]) if said else 0.0

    def disturb(self, seed: int, every_s: float, roles: Iterable[str], *, hang_s: float | None = None) -> None:
        """Kill a random role every few seconds until the training ends, or stop it and let it go on after a while.

        Sooner when it gets on fast: at the latest in its first fifth, and then after less than a third of the whole.
        """
        chance = random.Random(seed)
        end = time.monotonic() + TIMEOUT_S
        next_kill, next_progress = time.monotonic() + every_s, chance.uniform(0.01, 0.2)
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
            next_kill = time.monotonic() + every_s * chance.uniform(0.5, 1.5)
            next_progress = self.progress() + chance.uniform(0.1, 0.3)
            # so that a run in which nothing is saved between two kills comes to an end too
            every_s *= 1.1

    def send(self, process: int, number: signal.Signals) -> None:
        """A signal to one of its processes, which may just have ended."""
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return

    def finish(self) -> str:
        """Wait for its end, which must be a good one; returns what it said."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(self.output()) from None
        assert code == 0, self.output()
        return self.output()

    def stop(self) -> None:
        """End it and everything it started."""
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
        """What it said so far."""
        return self.log.read_text(errors="replace")


@cache
def count(files: tuple[Path, ...], epochs: int) -> dict[int, tuple[int, int]]:
    """Show and click of every sign of slot text, by hand."""
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
    """The table of a checkpoint."""
    job = load_job(run / "job.yaml")
    table = _core.Table(json.dumps(table_spec(job, build_model(job).columns)))
    table.load([str(path) for path in (checkpoint / "table").iterdir()])
    return table


def check_counts(run: Path, files: Iterable[Path], epochs: int) -> Path:
    """Every sign is counted as often as it stands in the files; returns the last checkpoint of the run."""
    checkpoint = max((run / "checkpoints").glob("step-*"))
    table = load_rows(run, checkpoint)
    expected = count(tuple(files), epochs)
    assert len(table) == len(expected)
    differ = {sign: (row, counts) for sign, counts in expected.items() if (row := table.get(sign))[:2] != counts}
    assert differ == {}
    return checkpoint


def wait_for_end(processes: Iterable[int]) -> None:
    """Until none of these processes is there."""
    deadline = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline, "roles end with the process that started them"
        time.sleep(0.05)


class Trainings:
    """Trainings on three hours of demo data, and what they must come to."""

    SETTINGS = (
        "train.servers=2",
        "train.trainers=2",
        "train.ps.lanes=2",
        "train.ps.lease_s=2",
        "train.ps.heartbeat_s=0.5",
        "train.checkpoint.every_s=3",
    )

    def __init__(self, directory: Path, data: Path) -> None:
        self.directory, self.data, self.started = directory, data, list[Training]()
        self.run = directory / "runs/cluster"
        hours = [str(data / f"20260101/0{hour}") for hour in range(4)]
        job = {
            "name": "cluster",
            "data": {
                "format": "slots",
                "train": hours[:3],
                "eval": hours[3],
                "slots": "0-19",
                "unit_bytes": 2**20,
            },
            # a model that has learned the data to its end: another order of batches moves its AUC by less than 0.001
            "model": {"kind": "deepfm", "dim": 8, "hidden": [64, 32]},
            "sparse": {"init_scale": 0.02, "optimizer": {"learning_rate": 0.03}},
            # the deltas of several trainers cannot be added up with Adam
            "dense": {"optimizer": {"kind": "adagrad", "learning_rate": 0.02}},
            "train": {"mode": "ps", "threads": 1, "batch_size": 256, "print_every_s": 0.5},
        }
        (directory / "job.yaml").write_text(yaml.safe_dump(job))

    def start(self, *settings: str, **environment: str) -> Training:
        """Another one."""
        training = Training.start(self.directory, *self.SETTINGS, *settings, **environment)
        self.started.append(training)
        return training

    def check(self, epochs: int = 1) -> float:
        """Every sign is counted as often as it stands in the files, and the audit agrees; returns the AUC."""
        checkpoint = check_counts(self.run, self._files(), epochs)
        audit = subprocess.run(
            [sys.executable, "-m", "elasticrec", "audit", str(self.run)], capture_output=True, text=True, check=False
        )
        assert audit.returncode == 0, audit.stdout + audit.stderr
        auc: float = json.loads((checkpoint / "manifest.json").read_text())["metrics"]["eval"][0]["auc"]
        return auc

    def _files(self) -> list[Path]:
        return sorted(self.data.glob("20260101/0[012]/*.txt"))

    def parameters(self) -> Parameters:
        """All that was learned."""
        checkpoint = max((self.run / "checkpoints").glob("step-*"))
        table = load_rows(self.run, checkpoint)
        signs = count(tuple(self._files()), 1)
        return (checkpoint / "dense.bin").read_bytes(), {sign: table.get(sign) for sign in signs}

    def stop(self) -> None:
        """End all of them."""
        for training in self.started:
            training.stop()
