"""The coordinator's HTTP face: JSON in, JSON out, a token before anything else."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from elasticrec.coordinator import metrics
from elasticrec.coordinator.coordinator import Answer, Coordinator
from elasticrec.errors import ElasticRecError, UnavailableError
from elasticrec.net import messages
from elasticrec.net.metrics import CONTENT_TYPE
from elasticrec.net.security import Security
from elasticrec.net.server import Place, WebServer, check_token, read_body
from elasticrec.repository.files import FileServer

# A shard's records name every batch of the units that are open: those of a large compressed file are many.
MAX_BODY_BYTES = 64 << 20
_TICK_S = 0.1


@dataclass(frozen=True)
class Listen:
    """Where the coordinator listens, and for whom."""

    host: str = "127.0.0.1"
    port: int = 0
    security: Security = field(default_factory=Security)

    def check(self) -> None:
        """Beyond this machine nothing listens without a token and TLS, unless that is wanted."""
        self.security.check_listen("coordinator", self.host)
        # in better words than those of OpenSSL, which would ask for the password of a key that has one
        self.security.wire()


def make_app(coordinator: Coordinator, token: str | None = None, files: Path | None = None) -> Starlette:
    """The routes; `files` is the directory of the repository, for those who share no disk with it."""
    api = _Api(coordinator, token)
    posts: dict[str, tuple[type[Any], Callable[[Any], Answer]]] = {
        "/v1/register": (messages.Register, coordinator.register),
        "/v1/heartbeat": (messages.Heartbeat, coordinator.heartbeat),
        "/v1/lease": (messages.Lease, coordinator.lease),
        "/v1/meet": (messages.MeetRequest, coordinator.meet),
        "/v1/done": (messages.UnitRequest, coordinator.done),
        "/v1/give_back": (messages.UnitRequest, coordinator.give_back),
        "/v1/missing": (messages.Missing, coordinator.missing),
        "/v1/checkpoint": (messages.CheckpointRequest, coordinator.checkpoint),
        "/v1/scale": (messages.Scale, coordinator.scale),
    }
    routes = [Route(path, api.post(kind, act), methods=["POST"]) for path, (kind, act) in posts.items()]
    routes += [
        Route("/v1/status", api.status),
        Route("/metrics", api.metrics),
        Route("/health", api.health),
    ]
    if files is not None:
        routes += FileServer(files, token).routes()
    return Starlette(routes=routes, exception_handlers={HTTPException: api.refuse, Exception: api.fail})


class _Api:
    """What all routes share: who may ask, and what errors look like."""

    def __init__(self, coordinator: Coordinator, token: str | None) -> None:
        self._coordinator = coordinator
        self._token = token

    def post(self, kind: type[BaseModel], act: Callable[[Any], Answer]) -> Callable[[Request], Any]:
        """The route of a request with a body."""

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
        """For whoever asks whether the process lives: it tells nothing else."""
        return JSONResponse({"status": "ok", "term": self._coordinator.term})

    async def _run(self, act: Callable[[], Response]) -> Response:
        """Act on a thread: it may wait for the disk."""
        try:
            return await run_in_threadpool(act)
        except messages.FencedError as error:
            return self._error(409, str(error), moved=isinstance(error, messages.MovedError))
        except messages.SurplusError as error:
            return self._error(400, str(error), surplus=True)
        except (UnavailableError, OSError) as error:
            return self._error(503, str(error))
        except ElasticRecError as error:
            return self._error(400, str(error))

    def _error(self, status: int, text: str, headers: dict[str, str] | None = None, **marks: bool) -> Response:
        """An answer that says what is wrong; `marks` are for roles, which do not read the text."""
        more = {name: True for name, is_set in marks.items() if is_set}
        return JSONResponse({"term": self._coordinator.term, "error": text, **more}, status, headers)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Of requests that are none of ours."""
        assert isinstance(error, HTTPException)
        return self._error(error.status_code, error.detail.lower(), dict(error.headers or {}))

    async def fail(self, request: Request, error: Exception) -> Response:
        """Of our own bugs; the trace is in the log."""
        return self._error(500, f"internal error: {type(error).__name__}")


class CoordinatorServer:
    """A coordinator that answers on a socket, and does between requests what is due."""

    def __init__(self, coordinator: Coordinator, listen: Listen, files: Path | None = None) -> None:
        listen.check()
        self._coordinator = coordinator
        security = listen.security
        self._web = WebServer(
            make_app(coordinator, security.token, files),
            Place("coordinator", listen.host, listen.port, security.cert, security.key),
        )
        self.url = self._web.url
        self._stopping = threading.Event()
        self._ticking = threading.Thread(target=self._tick, name="tick", daemon=True)

    def start(self) -> Self:
        """Answer from now on; what came meanwhile has waited in the socket."""
        self._web.start()
        self._ticking.start()
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
        self._web.stop()
        if self._ticking.ident is not None:
            self._ticking.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
