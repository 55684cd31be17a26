"""All roles of a training as processes of this machine: started, watched, started again when they die."""

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elasticrec.config import Job
from elasticrec.coordinator.client import CoordinatorClient
from elasticrec.errors import ElasticRecError, UnavailableError
from elasticrec.run import Run

Say = Callable[[str], None]

_POLL_S = 0.1
_STOP_S = 20.0
_SAVE_S = 60.0
# A role that dies at once again and again is not mended by another start.
_MAX_QUICK_DEATHS = 5
_QUICK_S = 2.0


@dataclass
class Child:
    """A role's process, and those before it."""

    role: str
    index: int
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    quick_deaths: int = 0
    hung: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Processes that were replaced while they lived: stopped ones, which may wake up and do no harm."""

    @property
    def name(self) -> str:
        """Such as `ps-1`."""
        return self.role if self.role == "coordinator" else f"{self.role}-{self.index}"


class LocalLauncher:
    """Starts the roles of a run and keeps them alive until the coordinator says that it is finished."""

    def __init__(self, job: Job, run: Run, say: Say) -> None:
        self._job, self._run, self._say = job, run, say
        self._token = secrets.token_urlsafe(24)
        self._port = _free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._logs = run.path / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self.children = [Child("coordinator", 0, ["--port", str(self._port)])]
        self.children += [Child("ps", index, []) for index in range(job.train.servers)]
        self.children += [Child("trainer", index, []) for index in range(job.train.trainers)]
        self._client = CoordinatorClient(self.url, token=self._token, deadline_s=2.0)
        self.stop_requested = False

    def __enter__(self) -> "LocalLauncher":
        for child in self.children:
            self._spawn(child)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _spawn(self, child: Child) -> None:
        command = [sys.executable, "-m", "elasticrec", child.role, "--run", str(self._run.path), *child.arguments]
        if child.role != "coordinator":
            command += ["--coordinator", self.url]
        if child.role == "ps":
            command += ["--index", str(child.index)]
        # roles that nobody watches any more would hold the run for ever
        environment = {**os.environ, "ELASTICREC_TOKEN": self._token, "ELASTICREC_PARENT": str(os.getpid())}
        with self._log(child) as log:
            child.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)
        child.started = time.monotonic()

    @contextlib.contextmanager
    def _log(self, child: Child) -> Any:
        with (self._logs / f"{child.name}.log").open("ab") as log:
            yield log

    def wait(self, progress: Callable[[dict[str, Any]], None]) -> bool:
        """Watch until the run is finished, or `stop_requested`; `progress` gets the coordinator's status now and then.

        Returns whether it is finished.
        """
        next_look = 0.0
        while True:
            if self._watch():
                return True
            if self.stop_requested:
                self._save()
                return False
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + self._job.train.print_every_s
                with contextlib.suppress(UnavailableError):
                    status = self._client.status()
                    progress(status)
                    self._replace_hung(status)
            time.sleep(_POLL_S)

    def _save(self) -> None:
        """Have all shards save what they have; if that takes too long, the checkpoint before has to do."""
        end = time.monotonic() + _SAVE_S
        try:
            ticket = self._client.checkpoint()["ticket"]
            while self._client.status()["checkpoint"]["ticket"] < ticket and time.monotonic() < end:
                self._watch()
                time.sleep(_POLL_S)
        except UnavailableError as error:
            self._say(f"not saved before the end: {error}")

    def _watch(self) -> bool:
        """Start again what died; true when the coordinator has ended the run."""
        for child in self.children:
            code = child.process.poll() if child.process else None
            if code is None:
                continue
            if code == 0:
                if child.role == "coordinator":
                    return True
                # a role that was told to stop
                continue
            if code == 2:
                raise ElasticRecError(self._last_line(child))
            lived_s = time.monotonic() - child.started
            child.quick_deaths = child.quick_deaths + 1 if lived_s < _QUICK_S else 0
            if child.quick_deaths >= _MAX_QUICK_DEATHS:
                raise ElasticRecError(f"{child.name} died {child.quick_deaths} times: {self._last_line(child)}")
            how = f"signal {-code}" if code < 0 else f"code {code}"
            self._say(f"{child.name} ended with {how} after {lived_s:.0f} s, starting it again")
            self._spawn(child)
        return False

    def _replace_hung(self, status: dict[str, Any]) -> None:
        """A shard that the coordinator gave up while its process lives is hung: another one takes its place."""
        if status["state"] != "running":
            return
        down = {shard["index"] for shard in status["shards"] if shard["state"] == "down" and shard["incarnation"]}
        for child in self.children:
            is_old = time.monotonic() - child.started > 2 * self._job.train.ps.lease_s
            if child.role == "ps" and child.index in down and child.process and is_old:
                self._say(f"{child.name} is silent, starting another one in its place")
                child.hung.append(child.process)
                self._spawn(child)

    def _last_line(self, child: Child) -> str:
        lines = (self._logs / f"{child.name}.log").read_text(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else f"{child.name} ended without a word"

    def stop(self) -> None:
        """End all processes: politely, then not."""
        processes = [
            process
            for child in reversed(self.children)
            for process in (child.process, *child.hung)
            if process is not None and process.poll() is None
        ]
        for process in processes:
            # one that is stopped hears nothing else
            process.send_signal(signal.SIGCONT)
            process.terminate()
        end = time.monotonic() + _STOP_S
        for process in processes:
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._client.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
