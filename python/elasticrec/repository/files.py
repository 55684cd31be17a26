"""Serve the files of a repository over HTTP, for machines without a shared disk: range reads, checksums on writes.

GET    /files/NAME            return the file; supports `Range`; `Repr-Digest` is its SHA-256
GET    /files/NAME?list       list the files below a name: {"files": {name: [bytes, modified]}}
PUT    /files/NAME            write the file; requires `Repr-Digest`; with `If-None-Match: *` only if it does not exist
DELETE /files/NAME            remove the file, or all files below the name
"""

import base64
import binascii
import contextlib
import hashlib
import os
import re
import threading
import uuid
from collections import OrderedDict
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from elasticrec.durable import sync_directory
from elasticrec.errors import ModelError
from elasticrec.net.server import check_token
from elasticrec.repository.local import LocalStorage
from elasticrec.repository.lock import STATE, WRITER, exclude_local_holders
from elasticrec.repository.storage import Stat
from elasticrec.repository.version import check_part

DIGEST = "Repr-Digest"
_SHA256 = re.compile(r"sha-256=:([A-Za-z0-9+/=]{44}):")
# Number of cached digests.
_MAX_CACHED_DIGESTS = 4096
# Files up to this size are sent from memory.
_SMALL_BYTES = 1 << 20
_MAX_PARTS, _MAX_PART_BYTES = 16, 200


def digest_header(sha256: bytes) -> str:
    """Format a checksum as in RFC 9530."""
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def parse_digest(header: str | None) -> bytes | None:
    """Return the checksum in a header, or None."""
    match = _SHA256.search(header or "")
    if match is None:
        return None
    try:
        found = base64.b64decode(match[1], validate=True)
    except binascii.Error:
        return None
    return found if len(found) == hashlib.sha256().digest_size else None


class FileServer:
    """Serves one directory."""

    def __init__(self, root: Path, token: str | None) -> None:
        self._storage, self._token = LocalStorage(root), token
        self._digests: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def routes(self) -> list[Route]:
        """Return the routes for an application."""
        return [
            Route("/files/{name:path}", self._get, methods=["GET", "HEAD"]),
            Route("/files/{name:path}", self._put, methods=["PUT"]),
            Route("/files/{name:path}", self._delete, methods=["DELETE"]),
        ]

    async def _get(self, request: Request) -> Response:
        check_token(request, self._token)
        name = _name_of(request)
        if "list" in request.query_params:
            found = await run_in_threadpool(self._find, name)
            return JSONResponse({"files": {one: [stat.num_bytes, stat.modified_s] for one, stat in found.items()}})
        path = self._storage.path_of(name)
        if not name or not path.is_file():
            raise HTTPException(404, f"{name}: no such file")
        headers = {"Cache-Control": "no-cache"}
        try:
            if "range" not in request.headers and path.stat().st_size <= _SMALL_BYTES:
                # Files such as CURRENT may be replaced: content and checksum must match.
                content = await run_in_threadpool(path.read_bytes)
                headers[DIGEST] = digest_header(hashlib.sha256(content).digest())
                return Response(content, headers=headers, media_type="application/octet-stream")
            headers[DIGEST] = digest_header(await run_in_threadpool(self._digest, path))
        except FileNotFoundError:
            raise HTTPException(404, f"{name}: no such file") from None
        return FileResponse(path, headers=headers, media_type="application/octet-stream")

    def _find(self, name: str) -> dict[str, Stat]:
        """Return the files below a name, or the file with that name."""
        path = self._storage.path_of(name)
        if name and path.is_file():
            stat = path.stat()
            return {name: Stat(stat.st_size, stat.st_mtime)}
        return self._storage.find(name)

    def _digest(self, path: Path) -> bytes:
        """Return the checksum of a file, cached until the file changes."""
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        with self._lock:
            found = self._digests.get(key)
        if found is None:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").digest()
            with self._lock:
                self._digests[key] = found
                while len(self._digests) > _MAX_CACHED_DIGESTS:
                    self._digests.popitem(last=False)
        return found

    async def _put(self, request: Request) -> Response:
        check_token(request, self._token)
        name = _name_of(request)
        if not name:
            raise HTTPException(400, "expected the name of a file, got none")
        expected = parse_digest(request.headers.get(DIGEST))
        if expected is None:
            raise HTTPException(400, f"{name}: expected the header `{DIGEST}: sha-256=:…:`")
        path = self._storage.path_of(name)
        is_new = request.headers.get("if-none-match") == "*"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
            try:
                await _receive(request, draft, name, expected)
                await run_in_threadpool(_rename, draft, path, is_new=is_new)
            finally:
                draft.unlink(missing_ok=True)
        except FileExistsError:
            raise HTTPException(412, f"{name}: already exists") from None
        except OSError as error:
            # With 507 the client does not retry.
            raise HTTPException(507, f"{name}: {(error.strerror or 'cannot be written').lower()}") from None
        return JSONResponse({"name": name}, 201)

    async def _delete(self, request: Request) -> Response:
        check_token(request, self._token)
        name = _name_of(request)
        if not name:
            raise HTTPException(400, "expected the name of a file, got none")
        try:
            await run_in_threadpool(_remove, self._storage, name)
        except FileExistsError:
            raise HTTPException(412, f"{name}: locked by a process on the server") from None
        except NotADirectoryError:
            # There is nothing below a file.
            pass
        except OSError as error:
            raise HTTPException(507, f"{name}: {(error.strerror or 'cannot be removed').lower()}") from None
        return Response(status_code=204)


def _name_of(request: Request) -> str:
    """Return the name in a request; empty for the directory itself."""
    name: str = request.path_params["name"].strip("/")
    parts = name.split("/") if name else []
    # Limits of file systems, minus the suffix of a temporary file.
    if len(parts) > _MAX_PARTS or any(len(os.fsencode(part)) > _MAX_PART_BYTES for part in parts):
        raise HTTPException(400, f"files: expected at most {_MAX_PARTS} parts of {_MAX_PART_BYTES} bytes in a name")
    for part in parts:
        try:
            check_part(part, "files")
        except ModelError as error:
            raise HTTPException(400, str(error)) from None
    return name


async def _receive(request: Request, draft: Path, name: str, expected: bytes) -> None:
    """Write the body to a synced file and verify its checksum."""
    digest = hashlib.sha256()
    with open(draft, "xb") as file:
        try:
            async for chunk in request.stream():
                digest.update(chunk)
                await run_in_threadpool(file.write, chunk)
        except ClientDisconnect:
            raise HTTPException(400, f"{name}: the body ended early") from None
        if digest.digest() != expected:
            raise HTTPException(400, f"{name}: sha-256 differs from the header, the body was damaged in transit")
        file.flush()
        await run_in_threadpool(os.fsync, file.fileno())


def _rename(draft: Path, path: Path, *, is_new: bool) -> None:
    if is_new:
        os.link(draft, path)
    else:
        with exclude_local_holders(path) if path.name in (WRITER, STATE) else contextlib.nullcontext():
            os.replace(draft, path)
    with contextlib.suppress(FileNotFoundError):
        sync_directory(path.parent)


def _remove(storage: LocalStorage, name: str) -> None:
    path = storage.path_of(name)
    if path.name not in (WRITER, STATE):
        storage.delete(name)
    elif path.is_file():
        with exclude_local_holders(path):
            path.unlink()
