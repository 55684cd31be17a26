"""The client for asyncio, with the calls of `Client`."""

import asyncio
import contextlib
import time
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from elasticrec.serving.calls import Calls, PauseStep, Route, SendStep, Steps
from elasticrec.serving.client_base import BaseClient, connection_error
from elasticrec.serving.protocol import Answer, BrokenConnectionError, Exchange, Response, Scores

T = TypeVar("T")

_PIECE_BYTES = 1 << 16


class AsyncClient(BaseClient["_Connections"]):
    """Client of one model on one server; may be used by many tasks of one event loop.

    It may be created before there is an event loop.
    """

    def _make_connections(self, limit: int) -> "_Connections":
        return _Connections(self._calls, limit)

    async def predict(
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
        return (await self.ask(instances, key=key, variant=variant, timeout_s=timeout_s)).scores

    async def predict_lines(
        self,
        text: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """Return scores `[lines, labels]` of lines in the training format, all in one request."""
        return (await self.ask_lines(text, key=key, variant=variant, timeout_s=timeout_s)).scores

    async def ask(
        self,
        instances: list[dict[str, Any]],
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Like `predict`, but also return the labels, the model, its version and its variant."""
        return await self._run(self._calls.ask(instances, Route(key, variant, timeout_s)))

    async def ask_lines(
        self,
        text: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Like `predict_lines`, but also return the labels, the model, its version and its variant."""
        return await self._run(self._calls.ask_lines(text, Route(key, variant, timeout_s)))

    async def explain_line(
        self,
        line: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Explain the scores of one line: `signs`, `rows`, `dense`, `scores` and `timing_ms`."""
        return await self._run(self._calls.explain_line(line, Route(key, variant, timeout_s)))

    async def models(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Return the models of the server: `name`, `version`, …"""
        return await self._run(self._calls.models(timeout_s))

    async def metadata(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the metadata of the model: `version`, `slots`, `dense`, `labels`, …"""
        return await self._run(self._calls.metadata(timeout_s))

    async def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Return whether the server is ready to answer; without retries."""
        return await self._run(self._calls.is_ready(timeout_s))

    async def aclose(self) -> None:
        """Close the connections; calls in flight are completed."""
        await self._connections.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, steps: Steps[T]) -> T:
        self._connections.check_open()
        try:
            step = next(steps)
            while True:
                try:
                    result = await self._execute(step)
                except (BrokenConnectionError, TimeoutError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(result)
        except StopIteration as end:
            return cast(T, end.value)

    async def _execute(self, step: SendStep | PauseStep) -> Response | None:
        if isinstance(step, SendStep):
            async with asyncio.timeout(step.deadline - time.monotonic()):
                return await self._connections.exchange(step)
        await asyncio.sleep(step.seconds)
        return None


class _Connections:
    """A limited number of connections; idle ones are reused."""

    def __init__(self, calls: Calls, size: int) -> None:
        self._calls = calls
        self._free = asyncio.Semaphore(size)
        self._idle: list[_Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def check_open(self) -> None:
        """Raise an error if the client is closed or belongs to another event loop."""
        if self._is_closed:
            raise RuntimeError(f"client of {self._calls.where}: closed")
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError(f"client of {self._calls.where}: expected the event loop of its first call, got another")

    async def exchange(self, step: SendStep) -> Response:
        """Send a request and return the response."""
        async with self._free:
            connection = self._take(step) or await _connect(self._calls)
            try:
                response = await connection.exchange(step)
            except BaseException:
                connection.abort()
                raise
            if connection.is_reusable and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.abort()
            return response

    def _take(self, step: SendStep) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            # If the server closed one idle connection, it closed them all.
            if not step.fresh and connection.is_reusable:
                return connection
            connection.abort()
        return None

    async def aclose(self) -> None:
        """Close idle connections now, and busy ones after their request."""
        self._is_closed = True
        dropped, self._idle = self._idle, []
        for one in dropped:
            await one.aclose()


async def _connect(calls: Calls) -> "_Connection":
    address = calls.address
    try:
        reader, writer = await asyncio.open_connection(address.host, address.port, ssl=calls.tls)
    except OSError as error:
        raise connection_error(error, Exchange(), address.host) from None
    return _Connection(reader, writer, address.host)


class _Connection:
    """A pair of streams and its HTTP state."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host
        self._exchange = Exchange()

    @property
    def is_reusable(self) -> bool:
        return self._exchange.is_reusable and not self._reader.at_eof()

    async def exchange(self, step: SendStep) -> Response:
        """Send a request and return the response."""
        try:
            # Do not wait for `drain`: a server that rejects a request early answers before it is sent completely.
            self._writer.write(self._exchange.send(step.request))
            response = None
            while response is None:
                response = self._exchange.receive(await self._reader.read(_PIECE_BYTES))
            return response
        except (OSError, BrokenConnectionError) as error:
            raise connection_error(error, self._exchange, self._host) from None

    def abort(self) -> None:
        self._writer.transport.abort()

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
