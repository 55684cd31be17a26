"""What all HTTP faces in Python share: a server on a thread, a token before anything else, bodies of a limited size."""

import errno
import hmac
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from elasticrec.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """Where a role listens, and with which certificate."""

    role: str
    host: str
    port: int
    cert: Path | None = None
    key: Path | None = None


class WebServer:
    """Routes that are answered on a thread of their own."""

    def __init__(self, app: Starlette, place: Place) -> None:
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
            ssl_certfile=place.cert,
            ssl_keyfile=place.key,
        )
        # a certificate that cannot be read is told now, not from a thread
        try:
            config.load()
        except OSError as error:
            raise ConfigError(f"{place.role}: {place.cert}: cannot be used for TLS: {error}") from None
        self._socket = bind(place.role, place.host, place.port)
        host = f"[{place.host}]" if ":" in place.host else place.host
        self.url = f"http{'s' if place.cert else ''}://{host}:{self._socket.getsockname()[1]}"
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)

    def start(self) -> None:
        """Answer from now on; what came meanwhile has waited in the socket."""
        self._thread.start()

    def stop(self) -> None:
        """End; requests that are being answered end first."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join()
        self._socket.close()


def check_token(request: Request, token: str | None) -> None:
    """Refuse a request without the token, if there is one."""
    if token is None:
        return
    given = request.headers.get("authorization", "")
    # takes as long for a token that is nearly right as for one that is not
    if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode()):
        raise HTTPException(401, "wrong token, or none", {"WWW-Authenticate": "Bearer"})


async def read_body(request: Request, limit: int) -> bytes:
    """The body, as long as it is not too long."""
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


def bind(role: str, host: str, port: int) -> socket.socket:
    """A socket that listens there."""
    where = f"{host}:{port}"
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sends small answers at once only where the protocol is named, else they wait 40 ms for the peer
        found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(f"{role}: {where}: cannot listen there: {_reason(error)}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(1024)
    except OSError as error:
        found.close()
        raise ConfigError(f"{role}: {where}: cannot listen there: {_reason(error)}") from None
    return found


def _reason(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return "the port is in use"
    return (error.strerror or type(error).__name__).lower()
