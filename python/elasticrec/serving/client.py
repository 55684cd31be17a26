"""The client for threads: scores of named values or lines, over reused connections."""

import contextlib
import os
import socket
import threading
import time
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from elasticrec.serving.calls import Calls, PauseStep, Route, SendStep, Steps
from elasticrec.serving.client_base import BaseClient, connection_error
from elasticrec.serving.protocol import Answer, BrokenConnectionError, Exchange, Response, Scores

T = TypeVar("T")

_PIECE_BYTES = 1 << 16


class Client(BaseClient["_Connections"]):
    """Client of one model on one server; may be used by many threads."""

    def _make_connections(self, limit: int) -> "_Connections":
        return _Connections(self._calls, limit)

    def predict(
        self,
        instances: list[dict[str, Any]],
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return scores `[instances, labels]` of samples given as values by slot and dense name.

        If the model has variants, calls with the same `key` use the same variant; `variant` selects one by name.
        """
        return self.ask(instances, key=key, variant=variant, timeout_s=timeout_s).scores

    def predict_lines(
        self,
        text: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return scores `[lines, labels]` of lines in the training format, all in one request."""
        return self.ask_lines(text, key=key, variant=variant, timeout_s=timeout_s).scores

    def ask(
        self,
        instances: list[dict[str, Any]],
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Like `predict`, but also return the labels, the model, its version and its variant."""
        return self._run(self._calls.ask(instances, Route(key, variant, timeout_s)))

    def ask_lines(
        self,
        text: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Like `predict_lines`, but also return the labels, the model, its version and its variant."""
        return self._run(self._calls.ask_lines(text, Route(key, variant, timeout_s)))

    def explain_line(
        self,
        line: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Explain the scores of one line: `signs`, `rows`, `dense`, `scores` and `timing_ms`."""
        return self._run(self._calls.explain_line(line, Route(key, variant, timeout_s)))

    def models(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Return the models of the server: `name`, `version`, …"""
        return self._run(self._calls.models(timeout_s))

    def metadata(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the metadata of the model: `version`, `slots`, `dense`, `labels`, …"""
        return self._run(self._calls.metadata(timeout_s))

    def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server is ready to answer; without retries."""
        return self._run(self._calls.is_ready(timeout_s))

    def close(self) -> None:
        """Close the connections; calls in flight are completed."""
        self._connections.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        self._connections.check_open()
        try:
            step = next(steps)
            while True:
                try:
                    result = self._execute(step)
                except (BrokenConnectionError, TimeoutError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return cast(T, end.value)

    def _execute(self, step: SendStep | PauseStep) -> Response | None:
        if isinstance(step, SendStep):
            return self._connections.exchange(step)
        time.sleep(step.seconds)
        return None


class _Connections:
    """A limited number of connections; idle ones are reused."""

    def __init__(self, calls: Calls, size: int) -> None:
        self._calls = calls
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._process = os.getpid()
        self._is_closed = False

    def check_open(self) -> None:
        """Raise an error if the client is closed."""
        if self._is_closed:
            raise RuntimeError(f"client of {self._calls.where}: closed")

    def exchange(self, step: SendStep) -> Response:
        """Send a request and return the response."""
        if not self._free.acquire(timeout=max(step.deadline - time.monotonic(), 0)):
            raise TimeoutError
        try:
            connection = self._take(step)
            try:
                response = connection.exchange(step)
            except BaseException:
                connection.close()
                raise
            self._give_back(connection)
            return response
        finally:
            self._free.release()

    def _take(self, step: SendStep) -> "_Connection":
        dropped: list[_Connection] = []
        with self._lock:
            # After a fork the connections belong to the parent. If the server closed one, it closed them all.
            if self._process != os.getpid() or step.fresh:
                self._process = os.getpid()
                dropped, self._idle = self._idle, []
            found = self._idle.pop() if self._idle else None
        for one in dropped:
            one.close()
        return found or _Connection(self._calls, step.deadline)

    def _give_back(self, connection: "_Connection") -> None:
        with self._lock:
            if connection.is_reusable and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close idle connections now, and busy ones after their request."""
        with self._lock:
            self._is_closed = True
            dropped, self._idle = self._idle, []
        for one in dropped:
            one.close()


class _Connection:
    """A socket and its HTTP state."""

    def __init__(self, calls: Calls, deadline: float) -> None:
        self._calls = calls
        self._exchange = Exchange()
        address = calls.address
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout=_seconds_left(deadline))
        except OSError as error:
            raise connection_error(error, self._exchange, address.host) from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if calls.tls is not None:
                self._socket.settimeout(_seconds_left(deadline))
                self._socket = calls.tls.wrap_socket(self._socket, server_hostname=address.host)
        except OSError as error:
            self._socket.close()
            raise connection_error(error, self._exchange, address.host) from None

    @property
    def is_reusable(self) -> bool:
        return self._exchange.is_reusable

    def exchange(self, step: SendStep) -> Response:
        """Send a request and return the response."""
        try:
            self._socket.settimeout(_seconds_left(step.deadline))
            # A server that rejects a request early answers and closes before it is sent completely.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(self._exchange.send(step.request))
            response = None
            while response is None:
                self._socket.settimeout(_seconds_left(step.deadline))
                response = self._exchange.receive(self._socket.recv(_PIECE_BYTES))
            return response
        except (OSError, BrokenConnectionError) as error:
            raise connection_error(error, self._exchange, self._calls.address.host) from None

    def close(self) -> None:
        self._socket.close()


def _seconds_left(deadline: float) -> float:
    """Return the seconds until the deadline; raise `TimeoutError` at 0, which would make the socket non-blocking."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
