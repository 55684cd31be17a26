"""The client for asyncio: the calls of `Client`, awaited."""

import asyncio
import contextlib
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from elasticrec.serving.calls import Calls, Pause, Route, Send, Steps
from elasticrec.serving.protocol import Answer, BrokenError, Exchange, Response, Scores
from elasticrec.serving.sockets import CONNECTIONS, RETRIES, TIMEOUT_S, broken, check_connections

T = TypeVar("T")

_PIECE_BYTES = 1 << 16


class AsyncClient:
    """Asks one model of one server, from as many tasks of one event loop as want to."""

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
        """As `Client`; it may be made before there is an event loop."""
        self._calls = Calls(url, model, token=token, timeout_s=timeout_s, retries=retries, ca=ca)
        self._pool = _Pool(self._calls, check_connections(connections))

    async def predict(
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
        return (await self.ask(instances, key=key, variant=variant, timeout_s=timeout_s)).scores

    async def predict_lines(
        self,
        text: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Scores:
        """Scores `[lines, labels]` of lines in the training format, all in one request."""
        return (await self.ask_lines(text, key=key, variant=variant, timeout_s=timeout_s)).scores

    async def ask(
        self,
        instances: list[dict[str, Any]],
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """As `predict`, with the names of the scores and with model, version and variant that gave them."""
        return await self._run(self._calls.ask(instances, Route(key, variant, timeout_s)))

    async def ask_lines(
        self,
        text: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """As `predict_lines`, with the names of the scores and with model, version and variant that gave them."""
        return await self._run(self._calls.ask_lines(text, Route(key, variant, timeout_s)))

    async def explain_line(
        self,
        line: bytes | str,
        *,
        key: str | int | None = None,
        variant: str | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """What the model makes of one line: `signs`, `rows`, `dense`, `scores`, and where the time went."""
        return await self._run(self._calls.explain_line(line, Route(key, variant, timeout_s)))

    async def models(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """The models of the server: `name`, `version`, …"""
        return await self._run(self._calls.models(timeout_s))

    async def metadata(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """What the server says of the model: `version`, `slots`, `dense`, `labels`, …"""
        return await self._run(self._calls.metadata(timeout_s))

    async def is_ready(self, *, timeout_s: float | None = None) -> bool:
        """Whether the server is there and can answer now; asked once."""
        return await self._run(self._calls.is_ready(timeout_s))

    async def aclose(self) -> None:
        """Close the connections; calls that are under way end as if it were open."""
        await self._pool.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, steps: Steps[T]) -> T:
        self._pool.check_open()
        try:
            step = next(steps)
            while True:
                try:
                    came = await self._do(step)
                except (BrokenError, TimeoutError) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(came)
        except StopIteration as end:
            return cast(T, end.value)

    async def _do(self, step: Send | Pause) -> Response | None:
        if isinstance(step, Send):
            async with asyncio.timeout(step.deadline - time.monotonic()):
                return await self._pool.exchange(step)
        await asyncio.sleep(step.seconds)
        return None


class _Pool:
    """Connections: at most so many are open, and those that nobody uses wait for the next request."""

    def __init__(self, calls: Calls, size: int) -> None:
        self._calls = calls
        self._free = asyncio.Semaphore(size)
        self._idle: list[_Connection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def check_open(self) -> None:
        """Refuse a call of a client that was closed, or whose connections belong to another event loop."""
        if self._is_closed:
            raise RuntimeError(f"client of {self._calls.where}: closed")
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise RuntimeError(f"client of {self._calls.where}: expected the event loop of its first call, got another")

    async def exchange(self, step: Send) -> Response:
        """One request and its answer."""
        async with self._free:
            connection = self._take(step) or await _connect(self._calls)
            try:
                response = await connection.exchange(step)
            except BaseException:
                connection.abort()
                raise
            if connection.can_go_on and not self._is_closed:
                self._idle.append(connection)
            else:
                connection.abort()
            return response

    def _take(self, step: Send) -> "_Connection | None":
        while self._idle:
            connection = self._idle.pop()
            # those of a server that closed one are all closed
            if not step.fresh and connection.can_go_on:
                return connection
            connection.abort()
        return None

    async def aclose(self) -> None:
        """Close what is idle now, and the rest when it is given back."""
        self._is_closed = True
        dropped, self._idle = self._idle, []
        for one in dropped:
            await one.aclose()


async def _connect(calls: Calls) -> "_Connection":
    place = calls.place
    try:
        reader, writer = await asyncio.open_connection(place.host, place.port, ssl=calls.tls)
    except OSError as error:
        raise broken(error, Exchange(), place.host) from None
    return _Connection(reader, writer, place.host)


class _Connection:
    """A pair of streams and the HTTP on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host
        self._exchange = Exchange()

    @property
    def can_go_on(self) -> bool:
        return self._exchange.can_go_on and not self._reader.at_eof()

    async def exchange(self, step: Send) -> Response:
        """One request and its answer."""
        try:
            # its end is not waited for: a server that does not want all of it answers before
            self._writer.write(self._exchange.send(step.request))
            response = None
            while response is None:
                response = self._exchange.receive(await self._reader.read(_PIECE_BYTES))
            return response
        except (OSError, BrokenError) as error:
            raise broken(error, self._exchange, self._host) from None

    def abort(self) -> None:
        self._writer.transport.abort()

    async def aclose(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
