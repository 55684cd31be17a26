"""Storage on a local disk, with durable writes."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticrec.durable import sync_directory, write_atomically
from elasticrec.repository.storage import Stat, Storage

_COPY_BYTES = 1 << 20


@dataclass(frozen=True)
class LocalStorage:
    """The files below a directory, which need not exist yet."""

    root: Path

    @property
    def location(self) -> str:
        """The directory."""
        return str(self.root)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return (self.root / name).read_bytes()

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`."""
        with open(self.root / name, "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file."""
        write_atomically(self._parent_of(name), content)

    def create(self, name: str, content: bytes) -> None:
        """Write a file that does not exist yet."""
        path = self._parent_of(name)
        # Write a draft first and link it: linking fails if the name exists.
        draft = _draft(path)
        try:
            write_atomically(draft, content)
            os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(path.parent)

    def put(self, source: Path, name: str) -> None:
        """Copy a file; a file that is already in place is only synced."""
        path = self._parent_of(name)
        if path.exists() and os.path.samefile(source, path):
            sync_directory(path.parent)
            return
        draft = _draft(path)
        try:
            with open(source, "rb") as reading, open(draft, "wb") as writing:
                shutil.copyfileobj(reading, writing, _COPY_BYTES)
                writing.flush()
                os.fsync(writing.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)
        sync_directory(path.parent)

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        return (self.root / name).is_file()

    def find(self, name: str = "") -> dict[str, Stat]:
        """Return all files below a name, sorted."""
        return dict(sorted(_files_in(str(self.root / name), f"{name}/" if name else "")))

    def delete(self, name: str) -> None:
        """Remove a file or a directory tree."""
        path = self.root / name
        if path.is_dir() and not path.is_symlink():
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def path_of(self, name: str) -> Path:
        """Return the path of a file."""
        return self.root / name

    def subdirectory(self, name: str) -> Storage:
        """Return the storage below a name."""
        return LocalStorage(self.root / name)

    def _parent_of(self, name: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


def _files_in(directory: str, prefix: str) -> Iterator[tuple[str, Stat]]:
    """Yield the files below a directory by name; with strings instead of paths, because it is called often."""
    # Files may disappear during the scan; other errors must not look like an empty directory.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_in(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_file():
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    yield prefix + entry.name, Stat(stat.st_size, stat.st_mtime)


def _draft(path: Path) -> Path:
    """Return a temporary name beside a file; no version has files with such names."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
