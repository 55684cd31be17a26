"""Set-up of the HTTP servers in Python: a server on a thread, the check of the token, bodies of limited size."""

import errno
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from elasticrec.errors import ConfigError, ElasticRecError
from elasticrec.net.security import has_token


@dataclass(frozen=True)
class ListenOptions:
    """The address that a role listens on, and its certificate."""

    role: str
    host: str
    port: int
    cert: Path | None = None
    key: Path | None = None


class WebServer:
    """Serves an application on a separate thread."""

    def __init__(self, app: Starlette, options: ListenOptions) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
            ssl_certfile=options.cert,
            ssl_keyfile=options.key,
        )
        # Raise for an unusable certificate here, not on the thread.
        try:
            config.load()
        except OSError as error:
            raise ConfigError(f"{options.role}: {options.cert}: cannot be used for TLS: {error}") from None
        self._socket = bind(options.role, options.host, options.port)
        address = join_host_port(options.host, self._socket.getsockname()[1])
        self.url = f"http{'s' if options.cert else ''}://{address}"
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)

    def start(self) -> None:
        """Start answering; earlier connections have waited in the socket's backlog."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the requests in flight are answered."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()


def error_body(error: Exception, text: str) -> Mapping[str, Any]:
    """Return the body of the response to an error."""
    return {"error": text}


def error_handlers(body: Callable[[Exception, str], Mapping[str, Any]] = error_body) -> dict[Any, Any]:
    """Return the handlers of an application for requests that are refused and for bugs."""

    async def refuse(request: Request, error: HTTPException) -> Response:
        """Answer a request that is refused before its action, such as an unknown path or a wrong token."""
        return JSONResponse(body(error, error.detail.lower()), error.status_code, dict(error.headers or {}))

    async def fail(request: Request, error: Exception) -> Response:
        """Answer after a bug; the log has the traceback."""
        return JSONResponse(body(error, f"internal error: {type(error).__name__}"), 500)

    return {HTTPException: refuse, Exception: fail}


def status_of(error: ElasticRecError | OSError) -> int:
    """Return the HTTP status of an error: `OSError` includes `UnavailableError`, and a later request may succeed."""
    return 503 if isinstance(error, OSError) else 400


def check_token(request: Request, token: str | None) -> None:
    """Refuse a request without the right token, if the server has one."""
    if token is None:
        return
    if not has_token(request.headers.get("authorization", ""), token):
        raise HTTPException(401, "missing or wrong token", {"WWW-Authenticate": "Bearer"})


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body of a request; refuse more than `limit` bytes."""
    chunks, size = [], 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise HTTPException(413, f"body: expected at most {limit} bytes")
            chunks.append(chunk)
    except ClientDisconnect:
        raise HTTPException(400, "body: ended early") from None
    return b"".join(chunks)


def join_host_port(host: str, port: int | str) -> str:
    """Return host and port as one address, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bind(role: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address."""
    address = f"{host}:{port}"
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio disables Nagle's algorithm only on sockets that name the protocol. Small answers would wait 40 ms.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"{role}: {address}: cannot listen: {_reason(error)}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{role}: {address}: cannot listen: {_reason(error)}") from None
    return listener


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use"
    return (error.strerror or type(error).__name__).lower()
