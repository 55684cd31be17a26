"""The coordinator's HTTP API: JSON requests and responses, guarded by the token."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from elasticrec.coordinator import metrics
from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.errors import ElasticRecError, UnavailableError
from elasticrec.net import messages
from elasticrec.net.logs import RepeatFilter
from elasticrec.net.metrics import CONTENT_TYPE
from elasticrec.net.security import Security
from elasticrec.net.server import ListenOptions, WebServer, check_token, error_handlers, read_body, status_of
from elasticrec.repository.files import FileServer

# A shard's records list every batch of its open units: a large compressed file has many.
MAX_BODY_BYTES = 64 << 20
_TICK_S = 0.1

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerOptions:
    """The address that the coordinator listens on, and its security."""

    host: str = "127.0.0.1"
    port: int = 0
    security: Security = field(default_factory=Security)

    def check(self) -> None:
        """Refuse an unsafe address and unusable TLS files."""
        self.security.check_listen("coordinator", self.host)
        # Checked here because OpenSSL's messages are worse, and it would ask for the password of an encrypted key.
        self.security.wire_tls()


def make_app(coordinator: Coordinator, token: str | None = None, files: Path | None = None) -> Starlette:
    """Return the application; `files` is the repository's directory, for machines that do not share its disk."""
    api = _Api(coordinator, token)
    posts: dict[str, tuple[type[Any], Callable[[Any], Mapping[str, Any]]]] = {
        "/v1/register": (messages.RegisterRequest, coordinator.register),
        "/v1/heartbeat": (messages.Heartbeat, coordinator.heartbeat),
        "/v1/lease": (messages.LeaseRequest, coordinator.lease),
        "/v1/meet": (messages.MeetRequest, coordinator.meet),
        "/v1/done": (messages.UnitRequest, coordinator.done),
        "/v1/give_back": (messages.UnitRequest, coordinator.give_back),
        "/v1/missing": (messages.MissingRequest, coordinator.missing),
        "/v1/checkpoint": (messages.CheckpointRequest, coordinator.checkpoint),
        "/v1/scale": (messages.ScaleRequest, coordinator.scale),
    }
    routes = [Route(path, api.post(kind, act), methods=["POST"]) for path, (kind, act) in posts.items()]
    routes += [
        Route("/v1/status", api.status),
        Route("/metrics", api.metrics),
        Route("/health", api.health),
    ]
    if files is not None:
        routes += FileServer(files, token).routes()
    return Starlette(routes=routes, exception_handlers=error_handlers(api.error_body))


class _Api:
    """The handlers of the routes: they check the token and format errors."""

    def __init__(self, coordinator: Coordinator, token: str | None) -> None:
        self._coordinator = coordinator
        self._token = token

    def post(self, kind: type[BaseModel], act: Callable[[Any], Mapping[str, Any]]) -> Callable[[Request], Any]:
        """Return the route of a request with a body."""

        async def route(request: Request) -> Response:
            check_token(request, self._token)
            body = await read_body(request, MAX_BODY_BYTES)
            return await self._run(lambda: JSONResponse(act(messages.parse(kind, body))))

        return route

    async def status(self, request: Request) -> Response:
        check_token(request, self._token)
        return await self._run(lambda: JSONResponse(self._coordinator.status()))

    async def metrics(self, request: Request) -> Response:
        check_token(request, self._token)
        return await self._run(
            lambda: PlainTextResponse(metrics.render(self._coordinator.status()), media_type=CONTENT_TYPE)
        )

    async def health(self, request: Request) -> Response:
        """Report that the process is alive; needs no token."""
        return JSONResponse({"status": "ok", "term": self._coordinator.term})

    async def _run(self, act: Callable[[], Response]) -> Response:
        """Handle a request on a thread: it may wait for the disk."""
        try:
            return await run_in_threadpool(act)
        except (ElasticRecError, OSError) as error:
            status = 409 if isinstance(error, messages.FencedError) else status_of(error)
            return JSONResponse(self.error_body(error, str(error)), status)

    def error_body(self, error: Exception, text: str) -> messages.ErrorResponse:
        """Return the body of the response to an error; the flags are for roles, which do not parse the text."""
        answer: messages.ErrorResponse = {"term": self._coordinator.term, "error": text}
        if isinstance(error, messages.MovedError):
            answer["moved"] = True
        if isinstance(error, messages.SurplusError):
            answer["surplus"] = True
        return answer


class CoordinatorServer:
    """Serves a coordinator on a socket, and runs its periodic work between requests."""

    def __init__(self, coordinator: Coordinator, options: ServerOptions, files: Path | None = None) -> None:
        options.check()
        self._coordinator = coordinator
        security = options.security
        self._web = WebServer(
            make_app(coordinator, security.token, files),
            ListenOptions("coordinator", options.host, options.port, security.cert, security.key),
        )
        self.url = self._web.url
        self._stopping = threading.Event()
        self._ticks = threading.Thread(target=self._tick, name="tick", daemon=True)
        self._problems = RepeatFilter(logger.warning)

    def start(self) -> Self:
        """Start answering; earlier connections have waited in the socket's backlog."""
        self._web.start()
        self._ticks.start()
        return self

    def _tick(self) -> None:
        while not self._stopping.wait(_TICK_S):
            try:
                self._coordinator.tick()
            except (UnavailableError, OSError) as error:
                # A full disk may get space again; if another coordinator has taken over, all requests get the error.
                self._problems.write(str(error))

    def stop(self) -> None:
        """Stop after the requests in flight are answered."""
        self._stopping.set()
        self._web.stop()
        if self._ticks.ident is not None:
            self._ticks.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
