"""Storage behind a URL that fsspec supports, such as S3 or HDFS."""

import contextlib
import errno
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import fsspec

from elasticrec.errors import ConfigError, ElasticRecError, UnavailableError
from elasticrec.repository.storage import Stat, Storage, join

# Protocols with atomic writes; for others a file is renamed once it is written.
_OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "memory"}
_EXTRAS = {"s3": "s3", "s3a": "s3", "hdfs": "hdfs"}


def open_remote(url: str) -> Storage:
    """Open the storage at a URL."""
    protocol = url.partition("://")[0]
    try:
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        how = f"pip install 'elasticrec[{extra}]'" if extra else str(error)
        raise ConfigError(f"{url}: `{protocol}://` requires a package that is not installed: {how}") from None
    except ValueError as error:
        raise ConfigError(f"{url}: expected a URL that fsspec supports: {error}") from None
    return RemoteStorage(system, root.rstrip("/"), url, protocol in _OBJECT_STORES)


@dataclass(frozen=True)
class RemoteStorage:
    """The files below a URL. Errors other than `OSError` name the file."""

    system: Any
    root: str
    location: str
    is_object_store: bool

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._convert_errors(name):
            content: bytes = self.system.cat_file(self._path(name))
            return content

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Return the bytes from `start` up to `end`."""
        with self._convert_errors(name):
            content: bytes = self.system.cat_file(self._path(name), start=start, end=end)
            return content

    def write(self, name: str, content: bytes) -> None:
        """Replace a file."""
        with self._convert_errors(name):
            if self.is_object_store:
                self.system.pipe_file(self._path(name), content)
                return
            with self._draft(name) as draft:
                self.system.pipe_file(draft, content)

    def create(self, name: str, content: bytes) -> None:
        """Write a file that does not exist yet, exclusively if the storage supports it."""
        with self._convert_errors(name):
            self._make_parent(name)
            try:
                self.system.pipe_file(self._path(name), content, mode="create")
            except (TypeError, ValueError, NotImplementedError):
                self._create_by_opening(name, content)

    def _create_by_opening(self, name: str, content: bytes) -> None:
        """Create a file on systems without exclusive writes but with `overwrite=False`, such as HDFS."""
        try:
            if self.exists(name):
                raise FileExistsError(errno.EEXIST, "File exists", join(self.location, name))
            with self.system.open(self._path(name), "wb", overwrite=False) as file:
                file.write(content)
        except FileExistsError:
            raise
        except Exception:
            if self.exists(name):
                raise FileExistsError(errno.EEXIST, "File exists", join(self.location, name)) from None
            raise

    def put(self, source: Path, name: str) -> None:
        """Upload a local file."""
        with self._convert_errors(name):
            if self.is_object_store:
                self.system.put_file(str(source), self._path(name))
                return
            with self._draft(name) as draft:
                self.system.put_file(str(source), draft)

    def exists(self, name: str) -> bool:
        """Return whether a file exists."""
        with self._convert_errors(name):
            return bool(self.system.isfile(self._path(name)))

    def find(self, name: str = "") -> dict[str, Stat]:
        """Return all files below a name, sorted."""
        with self._convert_errors(name):
            try:
                found = self.system.find(self._path(name), detail=True)
            except FileNotFoundError:
                return {}
            start = len(self.root) + 1
            stats = {path[start:]: Stat(int(info["size"] or 0), _modified(info)) for path, info in found.items()}
            return dict(sorted((path, stat) for path, stat in stats.items() if path))

    def delete(self, name: str) -> None:
        """Remove a file or a directory tree."""
        with self._convert_errors(name), contextlib.suppress(FileNotFoundError):
            self.system.rm(self._path(name), recursive=True)

    def path_of(self, name: str) -> None:
        """Return None: the files are not local."""
        return None

    def subdirectory(self, name: str) -> Storage:
        """Return the storage below a name."""
        return RemoteStorage(self.system, self._path(name), join(self.location, name), self.is_object_store)

    def _path(self, name: str) -> str:
        return join(self.root, name) if self.root != "/" else f"/{name}"

    def _make_parent(self, name: str) -> None:
        if not self.is_object_store:
            self.system.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    @contextlib.contextmanager
    def _draft(self, name: str) -> Iterator[str]:
        """Yield a temporary name to write to, and rename it afterwards."""
        self._make_parent(name)
        path = self._path(name)
        directory, _, last = path.rpartition("/")
        draft = f"{directory}/.{last}.{uuid.uuid4().hex[:8]}"
        try:
            yield draft
            try:
                self.system.mv(draft, path, overwrite=True)
            except TypeError:
                # Without an atomic replace, the file is missing for a moment.
                with contextlib.suppress(FileNotFoundError):
                    self.system.rm(path)
                self.system.mv(draft, path)
        except BaseException:
            with contextlib.suppress(Exception):
                self.system.rm(draft)
            raise

    @contextlib.contextmanager
    def _convert_errors(self, name: str) -> Iterator[None]:
        """Convert errors of the libraries behind fsspec to `UnavailableError` in one line."""
        try:
            yield
        except (OSError, ElasticRecError, TypeError, KeyError, AttributeError):
            raise
        except Exception as error:
            words = " ".join(str(error).split()) or type(error).__name__
            raise UnavailableError(f"{join(self.location, name)}: {words}") from error


def _modified(info: dict[str, Any]) -> float:
    for key in ("LastModified", "mtime", "modified", "last_modified", "modification_time", "created"):
        value = info.get(key)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, int | float):
            # HDFS reports milliseconds.
            return value / 1000 if value > 1e11 else float(value)
    return 0.0
