"""The coordinator's HTTP face: JSON in, JSON out, a token before anything else."""

import errno
import hmac
import ipaddress
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from elasticrec.coordinator import messages, metrics
from elasticrec.coordinator.coordinator import Answer, Coordinator
from elasticrec.errors import ConfigError, ElasticRecError, UnavailableError

# A shard's records name every batch of the units that are open: those of a large compressed file are many.
MAX_BODY_BYTES = 64 << 20
_TICK_S = 0.1


@dataclass(frozen=True)
class Listen:
    """Where the coordinator listens, and for whom."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    certificate: Path | None = None
    """PEM files of TLS."""
    key: Path | None = None
    insecure: bool = False

    def check(self) -> None:
        """Beyond this machine nothing listens without a token and TLS, unless that is wanted."""
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("coordinator: expected a certificate and its key, got one of them")
        for path in (self.certificate, self.key):
            if path is not None and not path.is_file():
                raise ConfigError(f"coordinator: {path}: no such file")
        is_safe = self.token and self.certificate
        if not (_is_loopback(self.host) or is_safe or self.insecure):
            raise ConfigError(
                f"coordinator: host: {self.host} is open to others: "
                "expected a token and TLS, `insecure: true`, or 127.0.0.1"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(coordinator: Coordinator, token: str | None = None) -> Starlette:
    """The routes."""
    api = _Api(coordinator, token)
    posts: dict[str, tuple[type[Any], Callable[[Any], Answer]]] = {
        "/v1/register": (messages.Register, coordinator.register),
        "/v1/heartbeat": (messages.Heartbeat, coordinator.heartbeat),
        "/v1/lease": (messages.Lease, coordinator.lease),
        "/v1/done": (messages.UnitRequest, coordinator.done),
        "/v1/give_back": (messages.UnitRequest, coordinator.give_back),
        "/v1/checkpoint": (messages.CheckpointRequest, coordinator.checkpoint),
    }
    routes = [Route(path, api.post(kind, act), methods=["POST"]) for path, (kind, act) in posts.items()]
    routes += [
        Route("/v1/status", api.status),
        Route("/metrics", api.metrics),
        Route("/health", api.health),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: api.refuse, Exception: api.fail})


class _Api:
    """What all routes share: who may ask, and what errors look like."""

    def __init__(self, coordinator: Coordinator, token: str | None) -> None:
        self._coordinator = coordinator
        self._token = token

    def post(self, kind: type[BaseModel], act: Callable[[Any], Answer]) -> Callable[[Request], Any]:
        """The route of a request with a body."""

        async def route(request: Request) -> Response:
            self._check_token(request)
            body = await _read(request)
            return await self._run(lambda: JSONResponse(act(messages.parse(kind, body))))

        return route

    async def status(self, request: Request) -> Response:
        self._check_token(request)
        return await self._run(lambda: JSONResponse(self._coordinator.status()))

    async def metrics(self, request: Request) -> Response:
        self._check_token(request)
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return await self._run(
            lambda: PlainTextResponse(metrics.render(self._coordinator.status()), media_type=content_type)
        )

    async def health(self, request: Request) -> Response:
        """For whoever asks whether the process lives: it tells nothing else."""
        return JSONResponse({"status": "ok", "term": self._coordinator.term})

    async def _run(self, act: Callable[[], Response]) -> Response:
        """Act on a thread: it may wait for the disk."""
        try:
            return await run_in_threadpool(act)
        except messages.FencedError as error:
            return self._error(409, str(error))
        except (UnavailableError, OSError) as error:
            return self._error(503, str(error))
        except ElasticRecError as error:
            return self._error(400, str(error))

    def _check_token(self, request: Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("authorization", "")
        expected = f"Bearer {self._token}"
        # takes as long for a token that is nearly right as for one that is not
        if not hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode()):
            raise HTTPException(401, "wrong token, or none", {"WWW-Authenticate": "Bearer"})

    def _error(self, status: int, text: str, headers: dict[str, str] | None = None) -> Response:
        return JSONResponse({"term": self._coordinator.term, "error": text}, status, headers)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Of requests that are none of ours."""
        assert isinstance(error, HTTPException)
        return self._error(error.status_code, error.detail.lower(), dict(error.headers or {}))

    async def fail(self, request: Request, error: Exception) -> Response:
        """Of our own bugs; the trace is in the log."""
        return self._error(500, f"internal error: {type(error).__name__}")


async def _read(request: Request) -> bytes:
    """The body, as long as it is not too long."""
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_BODY_BYTES:
                raise HTTPException(413, f"body: expected at most {MAX_BODY_BYTES} bytes")
            chunks.append(chunk)
    except ClientDisconnect:
        raise HTTPException(400, "body: ended early") from None
    return b"".join(chunks)


class CoordinatorServer:
    """A coordinator that answers on a socket, and does between requests what is due."""

    def __init__(self, coordinator: Coordinator, listen: Listen) -> None:
        listen.check()
        self._coordinator = coordinator
        config = uvicorn.Config(
            make_app(coordinator, listen.token),
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
            ssl_certfile=listen.certificate,
            ssl_keyfile=listen.key,
        )
        # a certificate that cannot be read is told now, not from a thread
        _load(config)
        self._socket = _bind(listen)
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        self.url = f"http{'s' if listen.certificate else ''}://{host}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        self._stopping = threading.Event()
        serve = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._threads = [serve, threading.Thread(target=self._tick, name="tick", daemon=True)]

    def start(self) -> Self:
        """Answer from now on; what came meanwhile has waited in the socket."""
        for thread in self._threads:
            thread.start()
        return self

    def _tick(self) -> None:
        while not self._stopping.wait(_TICK_S):
            try:
                self._coordinator.tick()
            except (UnavailableError, OSError) as error:
                # a disk may have room again; a run that is lost is told to all who ask
                self._coordinator.tell(str(error))

    def stop(self) -> None:
        """End; requests that are being answered end first."""
        self._stopping.set()
        self._server.should_exit = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _load(config: uvicorn.Config) -> None:
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"coordinator: {config.ssl_certfile}: cannot be used for TLS: {error}") from None


def _bind(listen: Listen) -> socket.socket:
    where = f"{listen.host}:{listen.port}"
    try:
        family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"coordinator: {where}: cannot listen there: {error.strerror}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((listen.host, listen.port))
        found.listen(1024)
    except OSError as error:
        found.close()
        reason = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror
        raise ConfigError(f"coordinator: {where}: cannot listen there: {reason}") from None
    return found
