"""The HTTP API of a store process: status, notifications of new versions, metrics, and Cube's `DictService.seek`.

Cube is the dictionary service that docs/guide/migrate-serving.md describes.
"""

import base64
import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from elasticrec.errors import ElasticRecError
from elasticrec.net.metrics import CONTENT_TYPE
from elasticrec.net.server import check_token, error_body, error_handlers, read_body, status_of

MAX_KEYS = 1 << 16
# A key takes up to 20 decimal digits, quotes, a comma and white space.
MAX_BODY_BYTES = 32 * MAX_KEYS
# The status of a missing key in Cube's `DictResponse`: -1 as a u32.
NO_KEY = 2**32 - 1
_MAX_KEY = 2**64 - 1


class LookupResult(NamedTuple):
    """Rows of one version as they are stored, concatenated."""

    version: int
    rows: bytes
    is_there: list[bool]


class Node(Protocol):
    """The store process behind the API."""

    def status(self) -> dict[str, Any]:
        """Return the status."""

    def is_ready(self) -> bool:
        """Whether the current version is loaded."""

    def poll_now(self) -> None:
        """Poll the repository for new versions now."""

    def seek(self, signs: list[int]) -> LookupResult:
        """Look up rows of the current version."""

    def metrics(self) -> str:
        """Return the metrics in the text format of Prometheus."""


def make_app(node: Node, token: str | None) -> Starlette:
    """Return the application."""

    def guarded(act: Callable[[Request, bytes], Response]) -> Callable[[Request], Any]:
        async def route(request: Request) -> Response:
            check_token(request, token)
            body = await read_body(request, MAX_BODY_BYTES)
            try:
                return await run_in_threadpool(act, request, body)
            except ElasticRecError as error:
                return JSONResponse(error_body(error, str(error)), status_of(error))

        return route

    def status(*_: object) -> Response:
        return JSONResponse(node.status())

    def load(*_: object) -> Response:
        node.poll_now()
        return JSONResponse({"looking": True}, 202)

    def metrics(*_: object) -> Response:
        return PlainTextResponse(node.metrics(), media_type=CONTENT_TYPE)

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        is_ready = await run_in_threadpool(node.is_ready)
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", guarded(metrics)),
            Route("/v1/status", guarded(status)),
            Route("/v1/load", guarded(load), methods=["POST"]),
            Route("/DictService/seek", guarded(lambda _, body: _seek(node, body)), methods=["POST"]),
        ],
        exception_handlers=error_handlers(),
    )


def _seek(node: Node, body: bytes) -> Response:
    """Answer a `DictRequest` of Cube with a `DictResponse`, both as JSON; values are base64 as in protobuf's JSON."""
    keys, wants_version = _request(body)
    found = node.seek(keys)
    width = len(found.rows) // max(len(keys), 1)
    values = [
        {"status": 0, "value": base64.b64encode(found.rows[at * width : (at + 1) * width]).decode()}
        if is_there
        else {"status": NO_KEY, "value": ""}
        for at, is_there in enumerate(found.is_there)
    ]
    version = {"version": str(found.version)} if wants_version else {}
    return JSONResponse({"values": values, **version})


def _request(body: bytes) -> tuple[list[int], bool]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"body: expected JSON: {error}") from None
    if not isinstance(document, dict):
        raise HTTPException(400, 'body: expected an object such as {"keys": [1, 2]}')
    if unknown := sorted(document.keys() - {"keys", "version_required"}):
        raise HTTPException(400, f"body: `{unknown[0]}`: expected `keys` and `version_required` only")
    keys, wants_version = document.get("keys", []), document.get("version_required", False)
    if not isinstance(keys, list) or not isinstance(wants_version, bool):
        raise HTTPException(400, "body: expected `keys`, a list, and `version_required`, true or false")
    if len(keys) > MAX_KEYS:
        raise HTTPException(400, f"body: keys: expected at most {MAX_KEYS:,} at a time, got {len(keys):,}")
    for at, key in enumerate(keys):
        # Some clients send numbers beyond 2^53 as strings.
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 20 else key
        if type(number) is not int or not 0 <= number <= _MAX_KEY:
            raise HTTPException(400, f"body: keys[{at}]: expected a u64, got {json.dumps(key)[:40]}")
        keys[at] = number
    return keys, wants_version
