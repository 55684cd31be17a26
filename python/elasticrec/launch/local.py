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
from pathlib import Path
from typing import Any

from elasticrec.config import Job
from elasticrec.errors import ElasticRecError, UnavailableError
from elasticrec.launch.logs import log_path, without_stamp
from elasticrec.machine import num_cores
from elasticrec.net import environment
from elasticrec.net.coordinator import CoordinatorClient
from elasticrec.net.security import local_security
from elasticrec.run import Run

Say = Callable[[str], None]

_POLL_S = 0.1
# Between two looks at what the coordinator wants.
_LOOK_S = 0.4
_STOP_S = 20.0
_SAVE_S = 60.0
# A role that dies at once again and again is not mended by another start.
_MAX_QUICK_DEATHS = 5
_QUICK_S = 2.0
# So long a process may take until it asks for its place.
_START_S = 15.0


@dataclass
class Child:
    """A role's process, and those before it."""

    role: str
    index: int
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    quick_deaths: int = 0
    is_leaving: bool = False
    """It was told to go."""
    down_since: float | None = None
    """Since when the coordinator has not heard of its shard."""
    hung: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Processes that were replaced while they lived: stopped ones, which may wake up and do no harm."""

    @property
    def name(self) -> str:
        """Such as `ps-1`."""
        return self.role if self.role == "coordinator" else f"{self.role}-{self.index}"

    def is_running(self) -> bool:
        """Whether its process has not ended."""
        return self.process is not None and self.process.poll() is None


class LocalLauncher:
    """Starts the roles of a run and keeps them alive until the coordinator says that it is finished."""

    def __init__(
        self, job: Job, run: Run, say: Say, *, servers: int | None = None, trainers: int | None = None
    ) -> None:
        """`servers` and `trainers` are those of a resumed run that was scaled; the default is the job's."""
        self._job, self._run, self._say = job, run, say
        self.security = local_security(job, secrets.token_urlsafe(24))
        (run.path / "logs").mkdir(parents=True, exist_ok=True)
        self._needed = {"ps": servers or job.train.servers, "trainer": trainers or job.train.trainers}
        self._held, self._port = hold_port()
        self.url = f"http{'s' if self.security.cert else ''}://127.0.0.1:{self._port}"
        self.children = [Child("coordinator", 0, ["--port", str(self._port)])]
        self.children += [Child(role, index, []) for role, number in self._needed.items() for index in range(number)]
        self._client = CoordinatorClient(self.url, security=self.security, deadline_s=2.0)
        self.stop_requested = False
        self.is_saved = False
        # When the coordinator answered last.
        self._heard = time.monotonic()

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
        security = self.security
        told: dict[str, str | Path | None] = {
            environment.TOKEN: security.token,
            environment.TLS_CERT: security.cert,
            environment.TLS_KEY: security.key,
            environment.TLS_CA: security.ca,
            environment.PARENT: str(os.getpid()),
            environment.NAME: child.name,
            # those of the job share this machine; the same for all, whenever they are started: it may change bits
            environment.THREADS: str(max(num_cores() // self._job.train.trainers, 1)),
        }
        with log_path(self._run, child.name).open("ab") as log:
            child.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment.with_roles_of(told),
                # Ctrl-C is for the launcher: shards have to save before they go
                process_group=0,
            )
        child.started = time.monotonic()
        child.is_leaving, child.down_since = False, None

    def wait(self, progress: Callable[[dict[str, Any]], None]) -> bool:
        """Watch until the run is finished, or `stop_requested`; `progress` gets the coordinator's status now and then.

        Returns whether it is finished.
        """
        next_look = next_line = 0.0
        while True:
            if self._watch():
                return True
            if self.stop_requested:
                return self._save()
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _LOOK_S
                try:
                    status = self._look()
                except UnavailableError:
                    self._replace_silent_coordinator()
                else:
                    self._heard = time.monotonic()
                    if time.monotonic() >= next_line:
                        next_line = time.monotonic() + self._job.train.print_every_s
                        progress(status)
            time.sleep(_POLL_S)

    def _replace_silent_coordinator(self) -> None:
        """End a coordinator that long should have answered: it holds the lock of the run, so that none can replace it
        while it lives."""
        child, now = self.children[0], time.monotonic()
        since = max(self._heard, child.started + _START_S)
        if child.process is not None and child.is_running() and now - since > 2 * self._job.train.ps.lease_s:
            self._say("coordinator is silent, starting another one in its place")
            child.process.kill()

    def _look(self) -> dict[str, Any]:
        """See what the coordinator wants, and do it."""
        # those that ended because the run is over did so after it said so: ask only then
        ended = [child for child in self.children if not child.is_running()]
        status = self._client.status()
        if status["state"] == "running":
            wanted = status["wanted"]
            # those of the old map are needed until the partitions have moved
            self._needed = {"ps": max(wanted["servers"], len(status["shards"])), "trainer": wanted["trainers"]}
            self._fit(ended)
            self._replace_hung(status)
        return status

    def _fit(self, ended: list[Child]) -> None:
        """Start what is missing, let go what is too much."""
        have = {(child.role, child.index) for child in self.children}
        for role, number in self._needed.items():
            for index in range(number):
                if (role, index) not in have:
                    self.children.append(Child(role, index, []))
                    self._spawn(self.children[-1])
        for child in [child for child in self.children if child.role in self._needed]:
            if child.index < self._needed[child.role]:
                has_left = child.process is not None and child.process.poll() == 0
                if child in ended and (child.is_leaving or has_left):
                    if not child.is_leaving:
                        self._count_end(child, 0)
                    self._spawn(child)
            elif not child.is_running():
                self.children.remove(child)
            elif child.role == "trainer" and child.process is not None and not child.is_leaving:
                # a shard that is too much learns of it by the map
                child.is_leaving = True
                child.process.terminate()

    def _save(self) -> bool:
        """Have all shards save what they have; if that takes too long, the checkpoint before has to do.

        Returns whether the run came to its end before that.
        """
        end = time.monotonic() + _SAVE_S
        ticket: int | None = None
        while True:
            try:
                if ticket is None:
                    ticket = self._client.checkpoint()["ticket"]
                status = self._client.status()
            except UnavailableError as error:
                coordinator = self.children[0].process
                code = None if coordinator is None else coordinator.poll()
                if code == 0:
                    return True
                # one that lives may wait for its disk, or for a core
                if coordinator is None or code is not None or time.monotonic() >= end:
                    self._say(f"not saved before the end: {error}")
                    return False
            else:
                if status["state"] == "finished" or self._watch():
                    return True
                self.is_saved = status["checkpoint"]["ticket"] >= ticket
                if self.is_saved or time.monotonic() >= end:
                    return False
            time.sleep(_POLL_S)

    def _watch(self) -> bool:
        """Start again what died; true when the coordinator has ended the run."""
        for child in self.children:
            code = child.process.poll() if child.process else None
            if code is None:
                continue
            if code == 0 and child.role == "coordinator":
                return True
            if code == 0 or child.is_leaving or not self._is_needed(child):
                # a role that was told to stop
                continue
            if code == 2:
                raise ElasticRecError(self._last_line(child))
            lived_s = self._count_end(child, code)
            how = f"signal {-code}" if code < 0 else f"code {code}"
            self._say(f"{child.name} ended with {how} after {lived_s:.0f} s, starting it again")
            self._spawn(child)
        return False

    def _count_end(self, child: Child, code: int) -> float:
        """How long a process lived; too many short lives in a row end the training."""
        lived_s = time.monotonic() - child.started
        # what ends by itself may do so after a long start; what was killed may be killed again
        is_quick = lived_s < (_QUICK_S if code < 0 else _START_S)
        child.quick_deaths = child.quick_deaths + 1 if is_quick else 0
        if child.quick_deaths >= _MAX_QUICK_DEATHS:
            raise ElasticRecError(f"{child.name} died {child.quick_deaths} times: {self._last_line(child)}")
        return lived_s

    def _is_needed(self, child: Child) -> bool:
        """Whether a shard has a place, as far as is known; one that has none says that its number is too high."""
        if child.role != "ps":
            return True
        with contextlib.suppress(UnavailableError):
            status = self._client.status()
            self._needed["ps"] = max(status["wanted"]["servers"], len(status["shards"]))
        return child.index < self._needed["ps"]

    def _replace_hung(self, status: dict[str, Any]) -> None:
        """A role that the coordinator gave up while its process lives is hung: another one takes its place."""
        states = {shard["index"]: shard for shard in status["shards"]}
        silent = {one["figures"].get("pid") for one in status["trainers"] if one["state"] == "silent"}
        for child in self.children:
            if child.process is None or not child.is_running() or child.is_leaving:
                continue
            if child.role == "ps" and child.index in states:
                is_hung = self._is_hung(child, states[child.index])
            else:
                is_hung = child.role == "trainer" and child.process.pid in silent
            if is_hung:
                self._say(f"{child.name} is silent, starting another one in its place")
                child.hung.append(child.process)
                if child.role == "trainer":
                    # when it wakes up it is one too many
                    child.process.terminate()
                self._spawn(child)

    def _is_hung(self, child: Child, shard: dict[str, Any]) -> bool:
        """Whether a shard should long be there."""
        now, lease_s = time.monotonic(), self._job.train.ps.lease_s
        if shard["state"] != "down":
            child.down_since = None
            return False
        child.down_since = child.down_since or now
        pid = None if child.process is None else child.process.pid
        if shard["incarnation"] is None or shard["figures"].get("pid") != pid:
            # its process never had this place: it starts, or was stopped before the partitions moved
            return now - max(child.started, child.down_since) > max(2 * lease_s, _START_S)
        # a coordinator that started again may hear of it a little later
        return now - child.started > 2 * lease_s and now - child.down_since > lease_s

    def _last_line(self, child: Child) -> str:
        lines = log_path(self._run, child.name).read_text(errors="replace").strip().splitlines()
        return without_stamp(lines[-1]).removeprefix("error: ") if lines else f"{child.name} ended without a word"

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
        self._held.close()


def hold_port() -> tuple[socket.socket, int]:
    """A free port, and what keeps others from it until a process of ours listens there, also if that starts again.

    On Linux a socket that does not listen keeps nobody away who sets SO_REUSEADDR as well; elsewhere it would.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port: int = held.getsockname()[1]
    if sys.platform != "linux":
        held.close()
    return held, port
