"""Start, supervise and restart the processes that run a version's custom reader; the server talks to them directly."""

import logging
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

from elasticrec import _core
from elasticrec.errors import ModelError
from elasticrec.serving.reader import ANSWER, BATCH, LENGTH
from elasticrec.serving.reader_source import ReaderSource

# Time limit for importing custom code and creating the reader.
_START_S = 60.0
# A process that ran this long is restarted at once; earlier deaths are restarted with back-off.
_STABLE_S = 10.0
_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0
# Polling interval of a process, and time limit for the last requests of an old version.
_POLL_S = 0.1
_DRAIN_S = 60.0

logger = logging.getLogger(__name__)


class ReaderProcesses:
    """The processes of one custom reader."""

    def __init__(self, source: ReaderSource, num: int, timeout_ms: int, name: str) -> None:
        self.source = source
        self._core: _core.Readers | None = _core.Readers(timeout_ms=timeout_ms)
        self._name = name
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        self._ending, self._killing = threading.Event(), threading.Event()
        self._last_problem = ""
        self._supervisors = [_Supervisor(self) for _ in range(num)]
        try:
            with ThreadPoolExecutor(num) as executor:
                for _ in executor.map(_Supervisor.start, self._supervisors):
                    pass
        except BaseException:
            self.close()
            raise
        for supervisor in self._supervisors:
            supervisor.thread.start()

    @property
    def core(self) -> _core.Readers:
        """The object through which the server uses the processes."""
        assert self._core is not None, "retired processes are not used"
        return self._core

    def retire(self) -> None:
        """End the processes after the last request of their version: the server closes their sockets."""
        with self._lock:
            self._core = None
        self._ending.set()

    def close(self) -> None:
        """End the processes now."""
        self.retire()
        self._killing.set()
        for supervisor in self._supervisors:
            supervisor.end()

    def admit(self, link: socket.socket) -> int | None:
        """Hand a ready process to the server. Return its number, or None after `retire`."""
        with self._lock:
            return None if self._core is None else self._core.add(link)

    def is_lost(self, number: int) -> bool:
        """Return whether the server has given up a process."""
        with self._lock:
            if self._core is not None:
                self._lost.update(self._core.lost())
            found = number in self._lost
            self._lost.discard(number)
            return found

    def report(self, problem: str, *, repeat: bool = False) -> None:
        """Report a problem, unless it repeats the last one."""
        with self._lock:
            is_new, self._last_problem = repeat or problem != self._last_problem, problem
        if is_new:
            logger.warning("%s: %s", self._name, problem)

    @property
    def is_ending(self) -> bool:
        """Whether no further processes are started."""
        return self._ending.is_set()

    def pause(self, seconds: float) -> bool:
        """Wait; return true once the processes are ending."""
        return self._ending.wait(seconds)

    def is_overdue(self, since: float) -> bool:
        """Return whether the time limit of an ending process is over."""
        return self._killing.is_set() or time.monotonic() - since > _DRAIN_S


class _Supervisor:
    """Keeps one process running: a thread restarts it when it ends."""

    def __init__(self, owner: ReaderProcesses) -> None:
        self._owner = owner
        self._process: subprocess.Popen[bytes] | None = None
        self._number: int | None = None
        self._started = 0.0
        self.thread = threading.Thread(target=copy_context().run, args=(self._supervise,), daemon=True)

    def start(self) -> None:
        """Start a process, wait for its reader and hand it to the server; raise an error if that fails."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                # Output of custom code goes to the log.
                command = [sys.executable, "-m", "elasticrec.serving.reader"]
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=2)
            try:
                self._wait_until_ready(ours)
                ours.settimeout(None)
                self._number = self._owner.admit(ours)
            except BaseException:
                self.end()
                raise
        self._started = time.monotonic()

    def _wait_until_ready(self, link: socket.socket) -> None:
        """Send the source of the reader to the process, and wait until it has loaded it."""
        assert self._process is not None
        spec = self._owner.source.spec
        link.settimeout(_START_S)
        setup = pickle.dumps(self._owner.source)
        try:
            link.sendall(LENGTH.pack(len(setup)) + setup)
            status, length = ANSWER.unpack(_receive(link, ANSWER.size))
            message = _receive(link, length)
        except TimeoutError:
            raise ModelError(f"{spec}: the reader was not ready within {_START_S:.0f} s") from None
        except (EOFError, OSError):
            raise ModelError(
                f"{spec}: the reader process ended ({_exit_reason(self._process)}) before it was ready"
            ) from None
        if status != BATCH:
            raise ModelError(message.decode("utf-8", "replace"))

    def end(self) -> None:
        """Kill the process."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _supervise(self) -> None:
        failures = 0
        while self._wait_for_end():
            lived = time.monotonic() - self._started
            process = self._process
            assert process is not None
            reason = _exit_reason(process)
            failures = 0 if lived > _STABLE_S else failures + 1
            then = "restarting it" if failures <= 1 else "restarting it with back-off"
            self._owner.report(f"a reader process ended ({reason}), {then}", repeat=not failures)
            while not self._owner.pause(_pause_s(failures)):
                try:
                    self.start()
                    break
                except (ModelError, OSError) as error:
                    failures += 1
                    self._owner.report(f"a reader process cannot be started, retrying: {error}")
        self._wait_or_kill()

    def _wait_for_end(self) -> bool:
        """Wait until the process ends (return true) or all processes are ending (return false)."""
        process = self._process
        assert process is not None
        while not self._owner.is_ending:
            if self._number is not None and self._owner.is_lost(self._number):
                # The server closed its socket, but custom code may still run.
                process.kill()
            try:
                process.wait(_POLL_S)
                return not self._owner.is_ending
            except subprocess.TimeoutExpired:
                pass
        return False

    def _wait_or_kill(self) -> None:
        process, since = self._process, time.monotonic()
        assert process is not None
        while True:
            try:
                process.wait(_POLL_S)
                return
            except subprocess.TimeoutExpired:
                if self._owner.is_overdue(since):
                    process.kill()


def _receive(link: socket.socket, num_bytes: int) -> bytes:
    content = b""
    while len(content) < num_bytes:
        chunk = link.recv(num_bytes - len(content))
        if not chunk:
            raise EOFError
        content += chunk
    return content


def _pause_s(failures: int) -> float:
    return 0.0 if failures <= 1 else min(_RETRY_S * 2.0 ** (failures - 2), _LONGEST_RETRY_S)


def _exit_reason(process: "subprocess.Popen[bytes]") -> str:
    """Describe why a process ended."""
    code = process.wait()
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
