"""The interface of the storage behind a repository: disk, S3, HDFS or HTTP.

Names are relative to the location of the storage, with `/` between their parts. A file exists completely or not at all.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticrec.errors import ConfigError

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)")


@dataclass(frozen=True)
class Stat:
    """Size and time of a file."""

    num_bytes: int
    modified_s: float
    """Seconds since 1970; 0 if unknown."""


class Storage(Protocol):
    """The files below one location."""

    @property
    def location(self) -> str:
        """Path or URL, for messages."""

    def read(self, name: str) -> bytes:
        """Return the content of a file; raise `FileNotFoundError` if it does not exist."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`."""

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a small file atomically."""

    def create(self, name: str, content: bytes) -> None:
        """Write a small file that does not exist yet; raise `FileExistsError` otherwise, also in a race."""

    def put(self, source: Path, name: str) -> None:
        """Upload a local file."""

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""

    def find(self, name: str = "") -> dict[str, Stat]:
        """Return all files below a name, sorted; empty if there is no such directory."""

    def delete(self, name: str) -> None:
        """Remove a file or a directory tree, if it exists."""

    def path_of(self, name: str) -> Path | None:
        """Return the local path of a file, or None for remote storage."""

    def subdirectory(self, name: str) -> "Storage":
        """Return the storage below a name."""


def is_url(location: str | Path) -> bool:
    """Return whether a location is a URL."""
    return isinstance(location, str) and _URL.fullmatch(location) is not None


def open_storage(location: str | Path, *, insecure: bool = False) -> Storage:
    """Open the storage at a path or URL, without any access yet. `insecure` allows tokens over plain HTTP."""
    from elasticrec.repository.local import LocalStorage

    text = str(location)
    match = _URL.fullmatch(text) if isinstance(location, str) else None
    if match is None:
        if "://" in text:
            raise ConfigError(f"{text}: expected a path or a URL such as `s3://bucket/models`")
        return LocalStorage(Path(text))
    if match[1] == "file":
        return LocalStorage(Path(match[2]))
    if match[1] in ("http", "https"):
        from elasticrec.repository.http import open_http

        return open_http(text.rstrip("/"), insecure=insecure)
    # Imported only when needed, because most repositories are on a disk.
    from elasticrec.repository.remote import open_remote

    return open_remote(text.rstrip("/"))


def join(*parts: str) -> str:
    """Join non-empty parts of a name."""
    return "/".join(part for part in parts if part)
