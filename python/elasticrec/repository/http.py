"""The repository behind HTTP: the files that a coordinator serves (`files.py`)."""

import hashlib
import json
import os
import urllib.parse
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

from elasticrec.config.fields import is_loopback
from elasticrec.errors import ConfigError, ModelError, UnavailableError
from elasticrec.net import environment
from elasticrec.net.http_client import HttpClient, HttpResponse
from elasticrec.net.security import Security
from elasticrec.repository.files import DIGEST, digest_header, parse_digest
from elasticrec.repository.storage import Stat, Storage, join

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class HttpStorage:
    """The files below a URL such as `http://host:7160/files`."""

    url: str
    token: str = field(default="", repr=False)
    ca: str | None = None
    insecure: bool = False
    """Whether the token may go to another machine in clear text."""

    @property
    def location(self) -> str:
        """The URL."""
        return self.url

    def read(self, name: str) -> bytes:
        """Return the content of a file, verified by its checksum."""
        response = self._send("GET", name)
        expected = parse_digest(response.headers.get(DIGEST))
        if expected is not None and hashlib.sha256(response.content).digest() != expected:
            raise UnavailableError(f"{join(self.url, name)}: sha-256 differs, the file was damaged in transit")
        return response.content

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`."""
        if start >= end:
            return b""
        response = self._send("GET", name, headers={"Range": f"bytes={start}-{end - 1}"})
        return response.content if response.status == HTTPStatus.PARTIAL_CONTENT else response.content[start:end]

    def write(self, name: str, content: bytes) -> None:
        """Replace a file."""
        self._put(name, content, hashlib.sha256(content).digest(), {})

    def create(self, name: str, content: bytes) -> None:
        """Write a new file; raise `FileExistsError` if there is one."""
        self._put(name, content, hashlib.sha256(content).digest(), {"If-None-Match": "*"})

    def put(self, source: Path, name: str) -> None:
        """Upload a file."""
        with open(source, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            file.seek(0)
            self._put(name, file, digest, {"Content-Length": str(os.fstat(file.fileno()).st_size)})

    def _put(self, name: str, body: Any, digest: bytes, headers: dict[str, str]) -> None:
        self._send("PUT", name, body, {DIGEST: digest_header(digest), **headers})

    def exists(self, name: str) -> bool:
        """Return whether the file exists."""
        try:
            self._send("HEAD", name)
        except FileNotFoundError:
            return False
        return True

    def find(self, name: str = "") -> dict[str, Stat]:
        """Return every file below a directory, sorted by name."""
        response = self._send("GET", name, query="?list")
        prefix = self._prefix
        try:
            found = json.loads(response.content)["files"]
            return {one.removeprefix(prefix): Stat(size, modified) for one, (size, modified) in sorted(found.items())}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UnavailableError(f"{join(self.url, name)}: expected a list of files, got something else") from None

    @property
    def _prefix(self) -> str:
        """The directory of this storage in the names that the server lists."""
        inner = urllib.parse.urlsplit(self.url).path.partition("/files")[2].strip("/")
        return f"{urllib.parse.unquote(inner)}/" if inner else ""

    def delete(self, name: str) -> None:
        """Remove a file or a directory tree."""
        self._send("DELETE", name)

    def path_of(self, name: str) -> None:
        """Return None: the files are not on this machine."""

    def subdirectory(self, name: str) -> Storage:
        """Return the storage of a subdirectory."""
        return replace(self, url=join(self.url, name))

    def _send(
        self, method: str, name: str, body: Any = None, headers: dict[str, str] | None = None, query: str = ""
    ) -> HttpResponse:
        """Send a request on a connection of its own; errors name the file.

        The server may close a kept connection at any moment, and a `PUT` that creates a file cannot be repeated.
        """
        location = join(self.url, name)
        target = f"{urllib.parse.urlsplit(self.url).path.rstrip('/')}/{urllib.parse.quote(name)}{query}"
        security = self._security()
        with HttpClient(self.url, name=location, security=security, timeout_s=_TIMEOUT_S) as client:
            response = client.request(method, target, body, headers)
        if response.status >= HTTPStatus.BAD_REQUEST:
            raise _error(location, response)
        return response

    def _security(self) -> Security:
        parts = urllib.parse.urlsplit(self.url)
        if parts.hostname is None:
            raise ConfigError(f"{self.url}: expected a URL such as http://127.0.0.1:7160/files")
        is_https = parts.scheme == "https"
        if self.token and not (is_https or self.insecure or is_loopback(parts.hostname)):
            raise ConfigError(
                f"{self.url}: the token would go to another machine in clear text: expected https://, "
                f"`--insecure`, or `{environment.INSECURE}=1`"
            )
        ca = Path(self.ca) if self.ca is not None and is_https else None
        return Security(self.token or None, ca=ca, insecure=self.insecure)


def _error(location: str, response: HttpResponse) -> Exception:
    try:
        reason = str(json.loads(response.content)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = f"{response.status} {response.reason}".lower()
    if response.status == HTTPStatus.NOT_FOUND:
        return FileNotFoundError(2, "No such file or directory", location)
    if response.status == HTTPStatus.PRECONDITION_FAILED:
        return FileExistsError(17, "File exists", location)
    if response.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ConfigError(f"{location}: {reason}; set `{environment.TOKEN}`")
    if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return UnavailableError(f"{location}: {reason}")
    return ModelError(f"{location}: {reason}")


def open_http(url: str, *, insecure: bool = False) -> HttpStorage:
    """Open the storage behind a URL, with the token and the authorities of the environment."""
    is_allowed = insecure or os.environ.get(environment.INSECURE, "").lower() in ("1", "true", "yes", "on", "t", "y")
    token, ca = os.environ.get(environment.TOKEN, ""), os.environ.get(environment.TLS_CA) or None
    return HttpStorage(url, token, ca, is_allowed)
