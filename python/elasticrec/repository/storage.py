"""Where the files of a repository lie: one small interface, whatever is behind it.

Names are relative to the place of the store, with `/` between their parts. A file is there whole or not at all.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticrec.errors import ConfigError

_URL = re.compile(r"([a-z][a-z0-9+.-]*)://(.+)")


@dataclass(frozen=True)
class Stat:
    """What a store knows of a file."""

    num_bytes: int
    modified_s: float
    """Seconds since 1970; 0 where the store does not tell."""


class Storage(Protocol):
    """The files below one place."""

    @property
    def location(self) -> str:
        """The path or URL, as messages show it."""

    def read(self, name: str) -> bytes:
        """All of a file; `FileNotFoundError` if it is not there."""

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`."""

    def write(self, name: str, content: bytes) -> None:
        """Put a small file in place of the one that may be there: a reader finds the old or the new one."""

    def create(self, name: str, content: bytes) -> None:
        """Write a small file that is not there yet; of two who try at once one gets `FileExistsError`."""

    def put(self, source: Path, name: str) -> None:
        """Copy a file of this machine."""

    def exists(self, name: str) -> bool:
        """Whether there is such a file."""

    def find(self, name: str = "") -> dict[str, Stat]:
        """Every file below a name, sorted; none if there is no such thing."""

    def delete(self, name: str) -> None:
        """Remove a file, or all that is below a name; what is not there is no error."""

    def path_of(self, name: str) -> Path | None:
        """Where a file lies on this machine, if the store is a disk of it."""

    def below(self, name: str) -> "Storage":
        """The store of what is below a name."""


def is_url(place: str | Path) -> bool:
    """Whether a place is a URL, not a path."""
    return isinstance(place, str) and _URL.fullmatch(place) is not None


def open_storage(place: str | Path, *, insecure: bool = False) -> Storage:
    """The store at a path or URL; nothing is read or made yet. `insecure`: a token may go over HTTP in clear."""
    from elasticrec.repository.local import LocalStorage

    text = str(place)
    match = _URL.fullmatch(text) if isinstance(place, str) else None
    if match is None:
        if "://" in text:
            raise ConfigError(f"{text}: expected a path or a URL such as `s3://bucket/models`")
        return LocalStorage(Path(text))
    if match[1] == "file":
        return LocalStorage(Path(match[2]))
    if match[1] in ("http", "https"):
        from elasticrec.repository.http import open_http

        return open_http(text.rstrip("/"), insecure=insecure)
    # the disk is what most have, and needs none of it
    from elasticrec.repository.remote import open_remote

    return open_remote(text.rstrip("/"))


def join(*parts: str) -> str:
    """The name of what lies below others."""
    return "/".join(part for part in parts if part)
