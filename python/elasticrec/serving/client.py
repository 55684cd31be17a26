"""The client for threads: named values or lines in, scores out, over a few connections that are kept."""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from elasticrec.serving.calls import Calls, Pause, Route, Send, Steps
from elasticrec.serving.protocol import Answer, BrokenError, Exchange, Response, Scores
from elasticrec.serving.sockets import CONNECTIONS, RETRIES, TIMEOUT_S, broken, check_connections

T = TypeVar("T")

_PIECE_BYTES = 1 << 16


class Client:
    """Asks one model of one server, from as many threads as want to."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        ca: str | Path | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        """`model` may be left out where a server has one. Nothing is sent before the first call.

        `timeout_s` is for a whole call. A server that is away or busy is asked up to `retries` times again. `ca` is a
        PEM file with the authorities to trust instead of those of the system. Calls beyond `connections` wait.
        """
        self._calls = Calls(url, model, token=token, timeout_s=timeout_s, retries=retries, ca=ca)
        self._pool = _Pool(self._calls, check_connections(connections))

    def predict(
        self,
        instances: list[dict[str, Any]],
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """Scores `[instances, labels]` of samples given as values by slot and dense name.

        Where a model has variants, calls of the same `key` get the same one; `variant` names one.
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
        """Scores `[lines, labels]` of lines in the training format, all in one request."""
        return self.ask_lines(text, key=key, variant=variant, timeout_s=timeout_s).scores

    def ask(
        self,
        instances: list[dict[str, Any]],
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """As `predict`, with the names of the scores and with model, version and variant that gave them."""
        return self._run(self._calls.ask(instances, Route(key, variant, timeout_s)))

    def ask_lines(
        self,
        text: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """As `predict_lines`, with the names of the scores and with model, version and variant that gave them."""
        return self._run(self._calls.ask_lines(text, Route(key, variant, timeout_s)))

    def explain_line(
        self,
        line: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """What the model makes of one line: `signs`, `rows`, `dense`, `scores`, and where the time went."""
        return self._run(self._calls.explain_line(line, Route(key, variant, timeout_s)))

    @property
    def where(self) -> str:
        """Host and port of the server."""
        return self._calls.where

    def models(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """The models of the server: `name`, `version`, …"""
        return self._run(self._calls.models(timeout_s))

    def metadata(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the server says of the model: `version`, `slots`, `dense`, `labels`, …"""
        return self._run(self._calls.metadata(timeout_s))

    def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Whether the server is there and can answer now; asked once."""
        return self._run(self._calls.is_ready(timeout_s))

    def close(self) -> None:
        """Close the connections; calls that are under way end as if it were open."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, steps: Steps[T]) -> T:
        self._pool.check_open()
        try:
            step = next(steps)
            while True:
                try:
                    came = self._do(step)
                except (BrokenError, TimeoutError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(came)
        except StopIteration as end:
            return cast(T, end.value)

    def _do(self, step: Send | Pause) -> Response | None:
        if isinstance(step, Send):
            return self._pool.exchange(step)
        time.sleep(step.seconds)
        return None


class _Pool:
    """Connections: at most so many are open, and those that nobody uses wait for the next request."""

    def __init__(self, calls: Calls, size: int) -> None:
        self._calls = calls
        self._free = threading.BoundedSemaphore(size)
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._process = os.getpid()
        self._is_closed = False

    def check_open(self) -> None:
        """Refuse a call of a client that was closed."""
        if self._is_closed:
            raise RuntimeError(f"client of {self._calls.where}: closed")

    def exchange(self, step: Send) -> Response:
        """One request and its answer."""
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

    def _take(self, step: Send) -> "_Connection":
        dropped: list[_Connection] = []
        with self._lock:
            # after a fork the parent goes on with them, and those of a server that closed one are all closed
            if self._process != os.getpid() or step.fresh:
                self._process = os.getpid()
                dropped, self._idle = self._idle, []
            found = self._idle.pop() if self._idle else None
        for one in dropped:
            one.close()
        return found or _Connection(self._calls, step.deadline)

    def _give_back(self, connection: "_Connection") -> None:
        with self._lock:
            if connection.can_go_on and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        with self._lock:
            self._is_closed = True
            dropped, self._idle = self._idle, []
        for one in dropped:
            one.close()


class _Connection:
    """A socket and the HTTP on it."""

    def __init__(self, calls: Calls, deadline: float) -> None:
        self._calls = calls
        self._exchange = Exchange()
        place = calls.place
        try:
            self._socket = socket.create_connection((place.host, place.port), timeout=_left(deadline))
        except OSError as error:
            raise broken(error, self._exchange, place.host) from None
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if calls.tls is not None:
                self._socket.settimeout(_left(deadline))
                self._socket = calls.tls.wrap_socket(self._socket, server_hostname=place.host)
        except OSError as error:
            self._socket.close()
            raise broken(error, self._exchange, place.host) from None

    @property
    def can_go_on(self) -> bool:
        return self._exchange.can_go_on

    def exchange(self, step: Send) -> Response:
        """One request and its answer."""
        try:
            self._socket.settimeout(_left(step.deadline))
            # a server that does not want all of it has answered before it closed
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._socket.sendall(self._exchange.send(step.request))
            response = None
            while response is None:
                self._socket.settimeout(_left(step.deadline))
                response = self._exchange.receive(self._socket.recv(_PIECE_BYTES))
            return response
        except (OSError, BrokenError) as error:
            raise broken(error, self._exchange, self._calls.place.host) from None

    def close(self) -> None:
        self._socket.close()


def _left(deadline: float) -> float:
    """What a socket may wait; 0 would mean not to wait at all."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
