"""Runs all roles of a training as processes of this machine: starts them, watches them, and restarts those that die."""

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from elasticrec.config import Job
from elasticrec.errors import ElasticRecError, UnavailableError
from elasticrec.launch.child import Child
from elasticrec.launch.logs import log_path
from elasticrec.machine import num_cores
from elasticrec.net import environment
from elasticrec.net.coordinator import CoordinatorClient
from elasticrec.net.logs import without_stamp
from elasticrec.net.messages import ShardStatus, StatusResponse
from elasticrec.net.security import local_security
from elasticrec.run import Run

_POLL_S = 0.1
# Interval between two requests for the coordinator's status.
_STATUS_INTERVAL_S = 0.4
_STOP_S = 20.0
_SAVE_S = 60.0
# Give up on a role after this many processes in a row that died soon after their start.
_MAX_QUICK_DEATHS = 5
_QUICK_S = 2.0
# The longest time from the start of a process to its registration.
_START_S = 15.0

logger = logging.getLogger(__name__)


class LocalLauncher:
    """Starts the roles of a run and keeps them alive until the coordinator reports that the run is finished."""

    def __init__(self, job: Job, run: Run, *, servers: int | None = None, trainers: int | None = None) -> None:
        """`servers` and `trainers` are the numbers of a resumed run that was scaled; the default is the job's."""
        self._job, self._run = job, run
        self.security = local_security(job, secrets.token_urlsafe(24))
        (run.path / "logs").mkdir(parents=True, exist_ok=True)
        self._num_needed = {"ps": servers or job.train.servers, "trainer": trainers or job.train.trainers}
        self._reserved_port, self._port = reserve_port()
        self.url = f"http{'s' if self.security.cert else ''}://127.0.0.1:{self._port}"
        self.children = [Child("coordinator", 0, ["--port", str(self._port)])]
        self.children += [
            Child(role, index, []) for role, number in self._num_needed.items() for index in range(number)
        ]
        self._client = CoordinatorClient(self.url, security=self.security, deadline_s=2.0)
        self.stop_requested = False
        self.is_saved = False
        # Time of the coordinator's last answer.
        self._answered_at = time.monotonic()

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
        security = self.security
        variables: dict[str, str | Path | None] = {
            environment.TOKEN: security.token,
            environment.TLS_CERT: security.cert,
            environment.TLS_KEY: security.key,
            environment.TLS_CA: security.ca,
            # Roles end with their launcher: otherwise an orphaned coordinator would keep the run's lock.
            environment.PARENT: str(os.getpid()),
            environment.NAME: child.name,
            # The job's trainers share this machine. The number stays the same when the run is scaled: other numbers of
            # threads may change the last bits of a sum.
            environment.THREADS: str(max(num_cores() // self._job.train.trainers, 1)),
        }
        with log_path(self._run, child.name).open("ab") as log:
            child.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment.with_role_variables(variables),
                # Ctrl-C is for the launcher: shards have to save before they end.
                process_group=0,
            )
        child.started = time.monotonic()
        child.is_leaving, child.down_since = False, None

    def wait(self, progress: Callable[[StatusResponse], None]) -> bool:
        """Watch until the run is finished or `stop_requested` is set; return whether it is finished.

        `progress` receives the coordinator's status every `train.print_every_s` seconds.
        """
        next_status = next_progress = 0.0
        while True:
            if self._restart_dead():
                return True
            if self.stop_requested:
                return self._save()
            if time.monotonic() >= next_status:
                next_status = time.monotonic() + _STATUS_INTERVAL_S
                try:
                    status = self._reconcile()
                except UnavailableError:
                    self._kill_hung_coordinator()
                else:
                    self._answered_at = time.monotonic()
                    if time.monotonic() >= next_progress:
                        next_progress = time.monotonic() + self._job.train.print_every_s
                        progress(status)
            time.sleep(_POLL_S)

    def _kill_hung_coordinator(self) -> None:
        """Kill a coordinator that has not answered for long: it holds the run's lock, so another one cannot start."""
        child, now = self.children[0], time.monotonic()
        since = max(self._answered_at, child.started + _START_S)
        if child.process is not None and child.is_running() and now - since > 2 * self._job.train.ps.lease_s:
            logger.warning("coordinator does not respond: replacing it")
            child.process.kill()

    def _reconcile(self) -> StatusResponse:
        """Get the coordinator's status, and start and stop processes accordingly."""
        # Check for ended processes before the status: at the end of a run, processes end after the status says so.
        ended = [child for child in self.children if not child.is_running()]
        status = self._client.status()
        if status["state"] == "running":
            wanted = status["wanted"]
            # The servers of the old map are needed until the partitions have moved.
            self._num_needed = {"ps": max(wanted["servers"], len(status["shards"])), "trainer": wanted["trainers"]}
            self._start_and_stop(ended)
            self._replace_hung(status)
        return status

    def _start_and_stop(self, ended: list[Child]) -> None:
        """Start the processes that are missing, and end those that are no longer needed."""
        have = {(child.role, child.index) for child in self.children}
        for role, number in self._num_needed.items():
            for index in range(number):
                if (role, index) not in have:
                    self.children.append(Child(role, index, []))
                    self._spawn(self.children[-1])
        for child in [child for child in self.children if child.role in self._num_needed]:
            if child.index < self._num_needed[child.role]:
                has_left = child.exit_code() == 0
                if child in ended and (child.is_leaving or has_left):
                    if not child.is_leaving:
                        self._count_end(child, 0)
                    self._spawn(child)
            elif not child.is_running():
                self.children.remove(child)
            elif child.role == "trainer" and child.process is not None and not child.is_leaving:
                # Shards learn from the coordinator that they are no longer needed.
                child.is_leaving = True
                child.process.terminate()

    def _save(self) -> bool:
        """Wait for a checkpoint of all shards, for at most a minute; return whether the run finished before it."""
        end = time.monotonic() + _SAVE_S
        ticket: int | None = None
        while True:
            try:
                if ticket is None:
                    ticket = self._client.checkpoint()["ticket"]
                status = self._client.status()
            except UnavailableError as error:
                coordinator = self.children[0]
                code = coordinator.exit_code()
                if code == 0:
                    return True
                # A coordinator that is alive may wait for its disk or for a core.
                if coordinator.process is None or code is not None or time.monotonic() >= end:
                    logger.warning("not saved before shutdown: %s", error)
                    return False
            else:
                if status["state"] == "finished" or self._restart_dead():
                    return True
                self.is_saved = status["checkpoint"]["ticket"] >= ticket
                if self.is_saved or time.monotonic() >= end:
                    return False
            time.sleep(_POLL_S)

    def _restart_dead(self) -> bool:
        """Restart the processes that died; return whether the coordinator has ended the run."""
        for child in self.children:
            code = child.exit_code()
            if code is None:
                continue
            if code == 0 and child.role == "coordinator":
                return True
            if code == 0 or child.is_leaving or not self._is_needed(child):
                # The coordinator or the launcher stopped this process.
                continue
            if code == 2:
                raise ElasticRecError(self._last_line(child))
            lived_s = self._count_end(child, code)
            how = f"signal {-code}" if code < 0 else f"code {code}"
            logger.warning("%s ended with %s after %.0f s: restarting it", child.name, how, lived_s)
            self._spawn(child)
        return False

    def _count_end(self, child: Child, code: int) -> float:
        """Return how long a process lived; raise after too many short-lived processes in a row."""
        lived_s = time.monotonic() - child.started
        # A failed start may take up to `_START_S`. A process that was killed counts only if it died at once.
        is_quick = lived_s < (_QUICK_S if code < 0 else _START_S)
        child.num_quick_deaths = child.num_quick_deaths + 1 if is_quick else 0
        if child.num_quick_deaths >= _MAX_QUICK_DEATHS:
            raise ElasticRecError(f"{child.name} died {child.num_quick_deaths} times: {self._last_line(child)}")
        return lived_s

    def _is_needed(self, child: Child) -> bool:
        """Whether the run still has this shard, as far as known; a surplus shard would refuse to start."""
        if child.role != "ps":
            return True
        with contextlib.suppress(UnavailableError):
            status = self._client.status()
            self._num_needed["ps"] = max(status["wanted"]["servers"], len(status["shards"]))
        return child.index < self._num_needed["ps"]

    def _replace_hung(self, status: StatusResponse) -> None:
        """Replace processes that are alive although the coordinator does not hear from them."""
        shards = {shard["index"]: shard for shard in status["shards"]}
        silent = {one["figures"].get("pid") for one in status["trainers"] if one["state"] == "silent"}
        for child in self.children:
            if child.process is None or not child.is_running() or child.is_leaving:
                continue
            if child.role == "ps" and child.index in shards:
                is_hung = self._is_hung(child, shards[child.index])
            else:
                is_hung = child.role == "trainer" and child.process.pid in silent
            if is_hung:
                logger.warning("%s does not respond: replacing it", child.name)
                child.hung.append(child.process)
                if child.role == "trainer":
                    # If it resumed, the run would have one trainer too many.
                    child.process.terminate()
                self._spawn(child)

    def _is_hung(self, child: Child, shard: ShardStatus) -> bool:
        """Whether a shard has been down for longer than a start or a restart takes."""
        now, lease_s = time.monotonic(), self._job.train.ps.lease_s
        if shard["state"] != "down":
            child.down_since = None
            return False
        child.down_since = child.down_since or now
        pid = None if child.process is None else child.process.pid
        if shard["incarnation"] is None or shard["figures"].get("pid") != pid:
            # The process has not registered yet, or was stopped before the partitions moved.
            return now - max(child.started, child.down_since) > max(2 * lease_s, _START_S)
        # A restarted coordinator may hear from the shard a little later.
        return now - child.started > 2 * lease_s and now - child.down_since > lease_s

    def _last_line(self, child: Child) -> str:
        lines = log_path(self._run, child.name).read_text(errors="replace").strip().splitlines()
        return without_stamp(lines[-1]).removeprefix("error: ") if lines else f"{child.name} ended without a message"

    def stop(self) -> None:
        """End all processes: with SIGTERM, after a while with SIGKILL."""
        processes = [
            process
            for child in reversed(self.children)
            for process in (child.process, *child.hung)
            if process is not None and process.poll() is None
        ]
        for process in processes:
            # A stopped process receives no other signal.
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
        self._reserved_port.close()


def reserve_port() -> tuple[socket.socket, int]:
    """Return a free port, and a socket that reserves it until the coordinator listens there.

    On Linux a bound socket that does not listen lets another socket with SO_REUSEADDR listen; elsewhere it would not.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    port: int = reserved.getsockname()[1]
    if sys.platform != "linux":
        reserved.close()
    return reserved, port
