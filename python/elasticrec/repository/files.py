"""Files of a repository over HTTP, for machines that share no disk: ranges to read, checksums on what is written.

GET    /files/NAME            the file; `Range` as usual, `Repr-Digest` is its SHA-256
GET    /files/NAME?list       what is below a name: {"files": {name: [bytes, modified]}}
PUT    /files/NAME            write it; `Repr-Digest` has to be right; `If-None-Match: *` only if it is not there
DELETE /files/NAME            remove it, or all that is below it
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
from elasticrec.repository.lock import STATE, WRITER, nobody_holding
from elasticrec.repository.storage import Stat
from elasticrec.repository.version import check_part

DIGEST = "Repr-Digest"
_SHA256 = re.compile(r"sha-256=:([A-Za-z0-9+/=]{44}):")
# Files whose digests are remembered: those of some versions.
_REMEMBERED = 4096
# Files up to this size are read at once.
_SMALL_BYTES = 1 << 20
_MAX_PARTS, _MAX_PART_BYTES = 16, 200


def digest_header(sha256: bytes) -> str:
    """A checksum as RFC 9530 writes it."""
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def parse_digest(header: str | None) -> bytes | None:
    """The checksum of a header, if it has one."""
    match = _SHA256.search(header or "")
    if match is None:
        return None
    try:
        found = base64.b64decode(match[1], validate=True)
    except binascii.Error:
        return None
    return found if len(found) == hashlib.sha256().digest_size else None


class FileServer:
    """The routes of one directory."""

    def __init__(self, root: Path, token: str | None) -> None:
        self._store, self._token = LocalStorage(root), token
        self._digests: OrderedDict[tuple[str, int, int], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def routes(self) -> list[Route]:
        """For an application."""
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
        path = self._store.path_of(name)
        if not name or not path.is_file():
            raise HTTPException(404, f"{name}: no such file")
        headers = {"Cache-Control": "no-cache"}
        try:
            if "range" not in request.headers and path.stat().st_size <= _SMALL_BYTES:
                # one that is replaced meanwhile, as CURRENT is, must not be sent with the checksum of another
                content = await run_in_threadpool(path.read_bytes)
                headers[DIGEST] = digest_header(hashlib.sha256(content).digest())
                return Response(content, headers=headers, media_type="application/octet-stream")
            headers[DIGEST] = digest_header(await run_in_threadpool(self._digest, path))
        except FileNotFoundError:
            raise HTTPException(404, f"{name}: no such file") from None
        return FileResponse(path, headers=headers, media_type="application/octet-stream")

    def _find(self, name: str) -> dict[str, Stat]:
        """What is below a name, or the file that has it."""
        path = self._store.path_of(name)
        if name and path.is_file():
            stat = path.stat()
            return {name: Stat(stat.st_size, stat.st_mtime)}
        return self._store.find(name)

    def _digest(self, path: Path) -> bytes:
        """The checksum of a file, worked out once for as long as it is the same."""
        stat = path.stat()
        key = (str(path), stat.st_size, stat.st_mtime_ns)
        with self._lock:
            found = self._digests.get(key)
        if found is None:
            with open(path, "rb") as file:
                found = hashlib.file_digest(file, "sha256").digest()
            with self._lock:
                self._digests[key] = found
                while len(self._digests) > _REMEMBERED:
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
        path = self._store.path_of(name)
        is_new = request.headers.get("if-none-match") == "*"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
            try:
                await _receive(request, draft, name, expected)
                await run_in_threadpool(_place, draft, path, is_new=is_new)
            finally:
                draft.unlink(missing_ok=True)
        except FileExistsError:
            raise HTTPException(412, f"{name}: is there already") from None
        except OSError as error:
            # 507: the client knows that another attempt will not do
            raise HTTPException(507, f"{name}: {(error.strerror or 'cannot be written').lower()}") from None
        return JSONResponse({"name": name}, 201)

    async def _delete(self, request: Request) -> Response:
        check_token(request, self._token)
        name = _name_of(request)
        if not name:
            raise HTTPException(400, "expected the name of a file, got none")
        try:
            await run_in_threadpool(_remove, self._store, name)
        except FileExistsError:
            raise HTTPException(412, f"{name}: somebody on this machine holds it") from None
        except NotADirectoryError:
            # there is nothing below a file
            pass
        except OSError as error:
            raise HTTPException(507, f"{name}: {(error.strerror or 'cannot be removed').lower()}") from None
        return Response(status_code=204)


def _name_of(request: Request) -> str:
    """A name below the directory, or none for the directory itself."""
    name: str = request.path_params["name"].strip("/")
    parts = name.split("/") if name else []
    # what a disk takes, with what a draft has more
    if len(parts) > _MAX_PARTS or any(len(os.fsencode(part)) > _MAX_PART_BYTES for part in parts):
        raise HTTPException(400, f"files: expected at most {_MAX_PARTS} parts of {_MAX_PART_BYTES} bytes in a name")
    for part in parts:
        try:
            check_part(part, "files")
        except ModelError as error:
            raise HTTPException(400, str(error)) from None
    return name


async def _receive(request: Request, draft: Path, name: str, expected: bytes) -> None:
    """The body into a file, synced, if it is what its checksum says."""
    digest = hashlib.sha256()
    with open(draft, "xb") as file:
        try:
            async for chunk in request.stream():
                digest.update(chunk)
                await run_in_threadpool(file.write, chunk)
        except ClientDisconnect:
            raise HTTPException(400, f"{name}: the body ended early") from None
        if digest.digest() != expected:
            raise HTTPException(400, f"{name}: sha-256 differs from the header, the body was damaged on its way")
        file.flush()
        await run_in_threadpool(os.fsync, file.fileno())


def _place(draft: Path, path: Path, *, is_new: bool) -> None:
    if is_new:
        os.link(draft, path)
    else:
        with nobody_holding(path) if path.name in (WRITER, STATE) else contextlib.nullcontext():
            os.replace(draft, path)
    with contextlib.suppress(FileNotFoundError):
        sync_directory(path.parent)


def _remove(store: LocalStorage, name: str) -> None:
    path = store.path_of(name)
    if path.name not in (WRITER, STATE):
        store.delete(name)
    elif path.is_file():
        with nobody_holding(path):
            path.unlink()
