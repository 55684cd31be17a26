"""A cluster for measurements: real roles with a full table, started by the local launcher."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.bench.processes import cpu_seconds
from elasticrec.config import Job
from elasticrec.errors import ElasticRecError, UnavailableError
from elasticrec.launch.child import Child
from elasticrec.launch.local import LocalLauncher
from elasticrec.manifest import FileEntry, write_manifest
from elasticrec.net.coordinator import CoordinatorClient
from elasticrec.net.messages import StatusResponse
from elasticrec.roles.coordinator import prepare
from elasticrec.roles.start import Start, read_start
from elasticrec.run import Run

Status = StatusResponse
Say = Callable[[str], None]

_POLL_S = 0.05
# Longer than any start takes on a busy machine.
_TIMEOUT_S = 300.0
_CHECKPOINT = "ps-00000000-000000"


def write_checkpoint(job: Job, table: _core.Table, directory: Path) -> Path:
    """Write a checkpoint with the rows of a table and a new network, before the first unit."""
    run = Run.create(job)
    prepare(job, run)
    start = read_start(run.path)
    everything = range(start.num_partitions)
    path = directory / _CHECKPOINT
    path.mkdir(parents=True)
    server = _core.PsServer(
        start.shard_spec(everything),
        address="127.0.0.1:0",
        run=start.run_id,
        token="",
        incarnation=1,
        epoch=1,
        threads=1,
        files=[],
        dense=start.dense_of(everything),
    )
    _, dense = server.snapshot(str(path / "none.rows"), str(path / "shard-00000.dense"))
    server.stop()
    (path / "none.rows").unlink()
    rows = table.snapshot(str(path / "shard-00000.rows"))
    names = {kind: f"shard-00000.{kind}" for kind in ("rows", "dense")}
    part = {"shard": 0, "incarnation": 1, "partitions": [0, start.num_partitions], **names}
    body = {"num_partitions": start.num_partitions, "parts": [part], "passes": [], "boundaries": []}
    files = {names["rows"]: FileEntry(*rows), names["dense"]: FileEntry(*dense)}
    write_manifest(path, "ps checkpoint", body, files)
    return path


@dataclass(frozen=True)
class Rates:
    """Figures of all roles during a measurement."""

    samples_per_s: float
    cpu_s: dict[str, float]
    """CPU seconds per second, by role."""
    shares: dict[str, float]
    """Shares of the trainers' time, by stage."""

    @property
    def cpu_s_a_million(self) -> float:
        """CPU seconds of all roles per million samples."""
        return sum(self.cpu_s.values()) / self.samples_per_s * 1e6


class _MeasurementOverError(Exception):
    """Ends the launcher's wait after the measurement."""


class Cluster:
    """Runs the roles of a job inside a `with` block."""

    def __init__(self, job: Job, checkpoint: Path) -> None:
        run = Run.create(job)
        prepare(job, run)
        self.start: Start = read_start(run.path)
        kept = run.checkpoints / _CHECKPOINT
        kept.mkdir(parents=True)
        for file in checkpoint.iterdir():
            os.link(file, kept / file.name)
        self.launcher = LocalLauncher(job, run)
        self._job = job
        self._client = CoordinatorClient(self.launcher.url, security=self.launcher.security, deadline_s=10.0)
        self._is_over = False
        self._failure: ElasticRecError | None = None
        self._watching = threading.Thread(target=self._watch, name="launcher")

    def __enter__(self) -> "Cluster":
        self.launcher.__enter__()
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self._watching.join()
        self.launcher.stop()
        self._client.close()

    def _watch(self) -> None:
        def check(_: Status) -> None:
            if self._is_over:
                raise _MeasurementOverError

        try:
            self.launcher.wait(check)
        except _MeasurementOverError:
            return
        except ElasticRecError as error:
            self._failure = error

    def status(self) -> Status | None:
        """Return the coordinator's status, or None while it does not answer."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._client.status()
        except UnavailableError:
            return None

    def wait(self, is_reached: Callable[[Status], bool], what: str) -> Status:
        """Wait until the coordinator's status fulfils a condition; `what` names it in the error."""
        end = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            status = self.status()
            if status is not None and is_reached(status):
                return status
            time.sleep(_POLL_S)
        raise ElasticRecError(f"bench: expected {what} within {_TIMEOUT_S:g} s")

    def wait_for_servers(self) -> Status:
        """Wait until all servers have loaded their rows."""
        return self.wait(lambda status: all(s["state"] == "serving" for s in status["shards"]), "serving servers")

    def wait_for_samples(self, count: int) -> Status:
        """Wait until every trainer has trained a number of samples."""

        def are_warm(status: Status) -> bool:
            samples = [trainer["figures"].get("samples", 0) for trainer in status["trainers"]]
            return len(samples) >= self._job.train.trainers and min(samples) >= count

        return self.wait(are_warm, f"{count} samples from each trainer")

    def checkpoint(self) -> int:
        """Request a checkpoint and return its ticket."""
        return int(self._client.checkpoint()["ticket"])

    def measure(self, seconds: float) -> Rates:
        """Measure all roles during the next seconds."""
        before, cpu_before, start = self._figures(), self._cpu_s(), time.monotonic()
        time.sleep(seconds)
        # On a busy machine, trainers report less than once a second.
        least_s = seconds / 2

        def is_new(index: int, figures: dict[str, Any]) -> bool:
            # A trainer without a single step since then was stopped, not just slow.
            clock_s, samples = (figures[name] - before[index][name] for name in ("clock_s", "samples"))
            return bool(clock_s >= least_s and samples > 0)

        after = self._figures(is_new)
        took, cpu_after = time.monotonic() - start, self._cpu_s()
        rates = [
            (figures["samples"] - before[index]["samples"]) / max(figures["clock_s"] - before[index]["clock_s"], 1e-9)
            for index, figures in after.items()
        ]
        return Rates(
            samples_per_s=sum(rates),
            cpu_s={role: (cpu_after[role] - cpu_s) / took for role, cpu_s in cpu_before.items()},
            shares=_mean_shares([(before[index], figures) for index, figures in after.items()]),
        )

    def _figures(self, is_new: Callable[[int, dict[str, Any]], bool] = lambda *_: True) -> dict[int, dict[str, Any]]:
        """Return the figures of each trainer, once all of them are new."""

        def are_new(status: Status) -> bool:
            trainers = status["trainers"]
            return bool(trainers) and all(is_new(trainer["index"], trainer["figures"]) for trainer in trainers)

        status = self.wait(are_new, "trainers")
        return {trainer["index"]: trainer["figures"] for trainer in status["trainers"]}

    def _cpu_s(self) -> dict[str, float]:
        """Return the CPU seconds that the processes of each role have used."""
        seconds: dict[str, float] = {}
        for child in self.launcher.children:
            seconds[child.role] = seconds.get(child.role, 0.0) + cpu_seconds(process_of(child))
        return seconds

    def child(self, name: str) -> Child:
        """Return a role by name, such as `ps-1`."""
        return next(child for child in self.launcher.children if child.name == name)

    @contextlib.contextmanager
    def servers(self, status: Status) -> Iterator[_core.PsClient]:
        """Yield a client of all servers."""
        client = _core.PsClient(
            [shard["address"] or "" for shard in status["shards"]],
            run=self.start.run_id,
            token=self.launcher.security.token or "",
            tls=self.launcher.security.wire_tls(),
            partitions=self.start.num_partitions,
            timeout_s=5.0,
        )
        yield client


def process_of(child: Child) -> int:
    """Return the process id of a running role."""
    assert child.process is not None, "the launcher has started all roles"
    return child.process.pid


def _mean_shares(trainers: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """Return the shares of the trainers' time between two reports; their figures count from their start."""
    shares: dict[str, float] = {}
    for before, after in trainers:
        took = max(after["clock_s"] - before["clock_s"], 1e-9)
        for key, share in after.items():
            if key.startswith("share_"):
                spent = share * after["clock_s"] - before.get(key, 0.0) * before["clock_s"]
                name = key.removeprefix("share_")
                shares[name] = shares.get(name, 0.0) + spent / took / len(trainers)
    return {name: round(share, 4) for name, share in shares.items()}


__all__ = ["Cluster", "Rates", "process_of", "write_checkpoint"]
