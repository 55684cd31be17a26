"""A store at the other end of HTTP: the files that a coordinator serves (`files.py`)."""

import contextlib
import hashlib
import http.client
import json
import os
import ssl
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elasticrec.config.fields import is_loopback
from elasticrec.errors import ConfigError, ModelError, UnavailableError
from elasticrec.repository.files import DIGEST, digest_header, parse_digest
from elasticrec.repository.storage import Stat, Storage, join

# Names of what a role is told by its environment, as everywhere.
TOKEN, CA, INSECURE = "ELASTICREC_TOKEN", "ELASTICREC_TLS_CA", "ELASTICREC_INSECURE"

_TIMEOUT_S = 60.0
_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class HttpStorage:
    """The files below a URL such as `http://host:7160/files`."""

    url: str
    token: str = field(default="", repr=False)
    ca: str | None = None
    insecure: bool = False
    """Whether the token may go to another machine in clear."""

    @property
    def location(self) -> str:
        """The URL."""
        return self.url

    def read(self, name: str) -> bytes:
        """All of a file, as its checksum says."""
        with self._ask("GET", name) as answer:
            content: bytes = answer.read()
            expected = parse_digest(answer.getheader(DIGEST))
        if expected is not None and hashlib.sha256(content).digest() != expected:
            raise UnavailableError(f"{join(self.url, name)}: sha-256 differs, the file was damaged on its way")
        return content

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`."""
        if start >= end:
            return b""
        with self._ask("GET", name, headers={"Range": f"bytes={start}-{end - 1}"}) as answer:
            content: bytes = answer.read()
            return content if answer.status == http.client.PARTIAL_CONTENT else content[start:end]

    def write(self, name: str, content: bytes) -> None:
        """Replace a file."""
        self._put(name, content, hashlib.sha256(content).digest(), {})

    def create(self, name: str, content: bytes) -> None:
        """Write a file that is not there yet."""
        self._put(name, content, hashlib.sha256(content).digest(), {"If-None-Match": "*"})

    def put(self, source: Path, name: str) -> None:
        """Upload a file."""
        with open(source, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            file.seek(0)
            self._put(name, file, digest, {"Content-Length": str(os.fstat(file.fileno()).st_size)})

    def _put(self, name: str, body: Any, digest: bytes, headers: dict[str, str]) -> None:
        with self._ask("PUT", name, body, {DIGEST: digest_header(digest), **headers}) as answer:
            answer.read()

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""
        try:
            with self._ask("HEAD", name) as answer:
                answer.read()
        except FileNotFoundError:
            return False
        return True

    def find(self, name: str = "") -> dict[str, Stat]:
        """Every file below a name, sorted."""
        with self._ask("GET", name, query="?list") as answer:
            content = answer.read()
        prefix = self._prefix
        try:
            found = json.loads(content)["files"]
            return {one.removeprefix(prefix): Stat(size, modified) for one, (size, modified) in sorted(found.items())}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UnavailableError(f"{join(self.url, name)}: expected a list of files, got something else") from None

    @property
    def _prefix(self) -> str:
        """What names have in front at the other end."""
        inner = urllib.parse.urlsplit(self.url).path.partition("/files")[2].strip("/")
        return f"{urllib.parse.unquote(inner)}/" if inner else ""

    def delete(self, name: str) -> None:
        """Remove a file or a tree."""
        with self._ask("DELETE", name) as answer:
            answer.read()

    def path_of(self, name: str) -> None:
        """Nowhere on this machine."""

    def below(self, name: str) -> Storage:
        """The store of a directory in it."""
        return replace(self, url=join(self.url, name))

    @contextlib.contextmanager
    def _ask(
        self, method: str, name: str, body: Any = None, headers: dict[str, str] | None = None, query: str = ""
    ) -> Iterator[http.client.HTTPResponse]:
        """An answer that is a good one; what is wrong is said with the name of the file."""
        where = join(self.url, name)
        more = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connection = self._connection()
        path = urllib.parse.urlsplit(self.url).path.rstrip("/")
        target = f"{path}/{urllib.parse.quote(name)}"
        try:
            with contextlib.closing(connection):
                connection.request(method, target + query, body, {**(headers or {}), **more})
                answer = connection.getresponse()
                if answer.status >= http.client.BAD_REQUEST:
                    raise _error(where, answer)
                yield answer
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, FileNotFoundError | FileExistsError):
                raise
            raise UnavailableError(f"{where}: {error or type(error).__name__}") from None

    def _connection(self) -> http.client.HTTPConnection:
        parts = urllib.parse.urlsplit(self.url)
        if parts.hostname is None:
            raise ConfigError(f"{self.url}: expected a URL such as http://127.0.0.1:7160/files")
        if parts.scheme == "http":
            if self.token and not (self.insecure or is_loopback(parts.hostname)):
                raise ConfigError(
                    f"{self.url}: the token would go to another machine in clear: expected https://, "
                    f"`--insecure`, or `{INSECURE}=1`"
                )
            return http.client.HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        context = ssl.create_default_context(cafile=self.ca)
        return http.client.HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_S, context=context)


def _error(where: str, answer: http.client.HTTPResponse) -> Exception:
    content = answer.read(4096)
    try:
        said = str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        said = f"{answer.status} {answer.reason}".lower()
    if answer.status == http.client.NOT_FOUND:
        return FileNotFoundError(2, "No such file or directory", where)
    if answer.status == http.client.PRECONDITION_FAILED:
        return FileExistsError(17, "File exists", where)
    if answer.status in (http.client.UNAUTHORIZED, http.client.FORBIDDEN):
        return ConfigError(f"{where}: {said}; `{TOKEN}` has it")
    if answer.status >= http.client.INTERNAL_SERVER_ERROR:
        return UnavailableError(f"{where}: {said}")
    return ModelError(f"{where}: {said}")


def open_http(url: str, *, insecure: bool = False) -> HttpStorage:
    """The store of a URL, with the token and the authorities of the environment."""
    is_allowed = insecure or os.environ.get(INSECURE, "").lower() in ("1", "true", "yes", "on", "t", "y")
    return HttpStorage(url, os.environ.get(TOKEN, ""), os.environ.get(CA) or None, is_allowed)
