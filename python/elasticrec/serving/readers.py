"""Processes that run the reader of a version: started, watched, started again; the server talks to them by itself."""

import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from elasticrec import _core
from elasticrec.errors import ModelError
from elasticrec.serving.reader import ANSWER, BATCH, LENGTH
from elasticrec.serving.reader_source import ReaderSource

# The user's code is imported and the reader made in this time.
_START_S = 60.0
# One that lived so long may have bad luck; one that did not has a reason to end, and the next one comes later.
_STABLE_S = 10.0
_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0
# How often a process is looked at, and how long those of an old version may take for its last requests.
_LOOK_S = 0.1
_LEAVE_S = 60.0

Say = Callable[[str], None]


class ReaderPool:
    """The processes of one reader."""

    def __init__(self, source: ReaderSource, num: int, timeout_ms: int, name: str, say: Say) -> None:
        self.source = source
        self._core: _core.Readers | None = _core.Readers(timeout_ms=timeout_ms)
        self._name, self._say = name, say
        self._lock = threading.Lock()
        self._lost: set[int] = set()
        self._ending, self._killing = threading.Event(), threading.Event()
        self._told = ""
        self._seats = [_Seat(self) for _ in range(num)]
        try:
            with ThreadPoolExecutor(num) as executor:
                for _ in executor.map(_Seat.start, self._seats):
                    pass
        except BaseException:
            self.close()
            raise
        for seat in self._seats:
            seat.thread.start()

    @property
    def core(self) -> _core.Readers:
        """What the server asks."""
        assert self._core is not None, "a pool that was let go reads nothing"
        return self._core

    def retire(self) -> None:
        """Let the processes go with the last request of their version: the server closes their sockets."""
        with self._lock:
            self._core = None
        self._ending.set()

    def close(self) -> None:
        """End the processes now."""
        self.retire()
        self._killing.set()
        for seat in self._seats:
            seat.end()

    def admit(self, link: socket.socket) -> int | None:
        """Give a process that is ready to the server; None if nobody wants it any longer."""
        with self._lock:
            return None if self._core is None else self._core.add(link)

    def is_lost(self, number: int) -> bool:
        """Whether the server has given a process up."""
        with self._lock:
            if self._core is not None:
                self._lost.update(self._core.lost())
            found = number in self._lost
            self._lost.discard(number)
            return found

    def tell(self, what: str, *, anew: bool = False) -> None:
        """Say what goes wrong, once in a row unless it is something new."""
        with self._lock:
            is_new, self._told = anew or what != self._told, what
        if is_new:
            self._say(f"{self._name}: {what}")

    @property
    def is_ending(self) -> bool:
        """Whether no process is started any more."""
        return self._ending.is_set()

    def rest(self, seconds: float) -> bool:
        """Wait; true once the pool ends."""
        return self._ending.wait(seconds)

    def left(self, since: float) -> bool:
        """Whether a process has had its time to go."""
        return self._killing.is_set() or time.monotonic() - since > _LEAVE_S


class _Seat:
    """A place for a process, and the thread that keeps it taken."""

    def __init__(self, pool: ReaderPool) -> None:
        self._pool = pool
        self._process: subprocess.Popen[bytes] | None = None
        self._number: int | None = None
        self._started = 0.0
        self.thread = threading.Thread(target=self._keep, daemon=True)

    def start(self) -> None:
        """Start a process and give it to the server once its reader is made; what is wrong with that is raised."""
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                # what the user's code prints goes to the log
                command = [sys.executable, "-m", "elasticrec.serving.reader"]
                self._process = subprocess.Popen(command, stdin=theirs.fileno(), stdout=2)
            try:
                self._greet(ours)
                ours.settimeout(None)
                self._number = self._pool.admit(ours)
            except BaseException:
                self.end()
                raise
        self._started = time.monotonic()

    def _greet(self, link: socket.socket) -> None:
        assert self._process is not None
        spec = self._pool.source.spec
        link.settimeout(_START_S)
        setup = pickle.dumps(self._pool.source)
        try:
            link.sendall(LENGTH.pack(len(setup)) + setup)
            status, length = ANSWER.unpack(_receive(link, ANSWER.size))
            message = _receive(link, length)
        except TimeoutError:
            raise ModelError(f"{spec}: no reader in {_START_S:.0f} s") from None
        except (EOFError, OSError):
            raise ModelError(f"{spec}: its process ended ({_how(self._process)}) before there was a reader") from None
        if status != BATCH:
            raise ModelError(message.decode("utf-8", "replace"))

    def end(self) -> None:
        """End the process now."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _keep(self) -> None:
        failures = 0
        while self._stays():
            lived = time.monotonic() - self._started
            process = self._process
            assert process is not None
            how = _how(process)
            failures = 0 if lived > _STABLE_S else failures + 1
            then = "another is started" if failures <= 1 else "the next ones come later and later"
            self._pool.tell(f"a reader process ended ({how}), {then}", anew=not failures)
            while not self._pool.rest(_pause_s(failures)):
                try:
                    self.start()
                    break
                except (ModelError, OSError) as error:
                    failures += 1
                    self._pool.tell(f"a reader process cannot be started, it is tried again: {error}")
        self._leave()

    def _stays(self) -> bool:
        """Wait for the end of the process, or of the pool: false."""
        process = self._process
        assert process is not None
        while not self._pool.is_ending:
            if self._number is not None and self._pool.is_lost(self._number):
                # its socket is closed, but it may be anywhere in the user's code
                process.kill()
            try:
                process.wait(_LOOK_S)
                return not self._pool.is_ending
            except subprocess.TimeoutExpired:
                pass
        return False

    def _leave(self) -> None:
        process, since = self._process, time.monotonic()
        assert process is not None
        while True:
            try:
                process.wait(_LOOK_S)
                return
            except subprocess.TimeoutExpired:
                if self._pool.left(since):
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


def _how(process: "subprocess.Popen[bytes]") -> str:
    """How a process ended, in words."""
    code = process.wait()
    if code >= 0:
        return f"code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
