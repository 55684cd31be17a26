"""Make a version available on this machine: in place for a local repository, else as a copy in a cache.

<cache>/blobs/<sha256>                a verified file of any version; `.part` during its download
<cache>/<location>/<model>/<version>  versions laid out as in a repository, with links to the fetched blobs
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticrec.durable import sync_directory, write_atomically
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST, FileEntry
from elasticrec.repository.repository import Repository
from elasticrec.repository.storage import join
from elasticrec.repository.verify import read_chunks
from elasticrec.repository.version import Version, number_of

_BLOBS = "blobs"
_LOCK = ".lock"
# Space to leave free on the disk of the cache.
_SPARE_BYTES = 16 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FetchedVersion:
    """A version whose files are on this machine."""

    model: Path
    """Directory of the model, laid out as a repository."""
    chain: list[Version]
    """The base and the deltas up to the version."""
    partitions: range | None = None
    """Partitions whose rows were fetched; None for all rows and the network."""

    @property
    def version(self) -> Version:
        """The fetched version, the last one of the chain."""
        return self.chain[-1]

    @property
    def directory(self) -> Path:
        """Directory of the version."""
        return self.model / self.version.name

    def parts(self, version: Version) -> list[Path]:
        """Return the fetched part files of one version of the chain."""
        return [self.model / version.name / name for name in version.parts_of(self.partitions)]


def default_cache() -> Path:
    """Return the cache directory: `ELASTICREC_CACHE`, or the user's cache."""
    given = os.environ.get("ELASTICREC_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "elasticrec"


def fetch(
    repository: Repository,
    number: int,
    cache: Path,
    *,
    partitions: range | None = None,
    rows: bool = True,
) -> FetchedVersion:
    """Fetch and verify a version with its chain; interrupted downloads are resumed.

    With `partitions`, fetch only part files with rows of these; without `rows`, fetch only the network.
    """
    chain = repository.chain(number)
    local = repository.storage.path_of("")
    if local is not None:
        return FetchedVersion(local, chain, partitions)
    model = _model_directory(repository, cache)
    with _lock_cache(cache, fcntl.LOCK_SH):
        # The network consists of the version's own weights and the graph of its base.
        network_versions = {chain[0].name, chain[-1].name}
        missing = {
            version.name: _missing_files(version, model, partitions)
            if rows
            else _missing_network(version, model)
            if version.name in network_versions
            else {}
            for version in chain
        }
        _check_room(repository, number, [entry for files in missing.values() for entry in files.values()], cache)
        for version, files in missing.items():
            for name, entry in files.items():
                blob = _download(repository, f"{version}/{name}", entry, cache)
                _link(blob, model / version / name)
            if not (model / version / MANIFEST).is_file():
                content = repository.storage.read(f"{version}/{MANIFEST}")
                write_atomically(model / version / MANIFEST, content)
    return FetchedVersion(model, chain, partitions)


def _missing_files(version: Version, model: Path, partitions: range | None) -> dict[str, FileEntry]:
    """Return the required files of a version that are not in the cache."""
    needed = version.files if partitions is None else version.parts_of(partitions)
    return {name: version.files[name] for name in needed if not (model / version.name / name).is_file()}


def _missing_network(version: Version, model: Path) -> dict[str, FileEntry]:
    """Return the files of a version without rows that are not in the cache."""
    files = {name: entry for name, entry in version.files.items() if name not in version.parts}
    return {name: entry for name, entry in files.items() if not (model / version.name / name).is_file()}


def prune(repository: Repository, keep: set[int], cache: Path) -> None:
    """Remove all cached versions of a model except those to keep; do nothing during a fetch."""
    if repository.storage.path_of("") is not None or not cache.is_dir():
        return
    model = _model_directory(repository, cache)
    with contextlib.suppress(BlockingIOError), _lock_cache(cache, fcntl.LOCK_EX | fcntl.LOCK_NB):
        paths = {path.parent for path in model.rglob(MANIFEST)}
        wanted = _directories_to_keep(paths, model, keep)
        # Deltas are inside their bases, so remove the deepest first.
        for path in sorted(paths - wanted, key=lambda one: -len(one.parts)):
            (path / MANIFEST).unlink(missing_ok=True)
            if not any(other.is_relative_to(path) for other in wanted):
                shutil.rmtree(path)
        for blob in (cache / _BLOBS).iterdir():
            if blob.stat().st_nlink == 1:
                blob.unlink()


def _directories_to_keep(paths: set[Path], model: Path, keep: set[int]) -> set[Path]:
    """Return the directories of versions to keep, and of older versions of the same base, which they may depend on."""
    names = {path: path.relative_to(model).as_posix() for path in paths}
    newest: dict[str, int] = {}
    for name in names.values():
        number = number_of(name)
        if number in keep:
            base = name.partition("/")[0]
            newest[base] = max(newest.get(base, 0), number or 0)
    return {path for path, name in names.items() if (number_of(name) or 0) <= newest.get(name.partition("/")[0], -1)}


def _model_directory(repository: Repository, cache: Path) -> Path:
    location = hashlib.sha256(repository.location.encode()).hexdigest()[:16]
    return cache / location / repository.name


@contextlib.contextmanager
def _lock_cache(cache: Path, how: int) -> Iterator[None]:
    (cache / _BLOBS).mkdir(parents=True, exist_ok=True)
    with open(cache / _LOCK, "ab") as file:
        fcntl.flock(file, how)
        yield


def _check_room(repository: Repository, number: int, missing: list[FileEntry], cache: Path) -> None:
    needed = 0
    for sha256, num_bytes in {entry.sha256: entry.num_bytes for entry in missing}.items():
        part = _partial_path(cache, sha256)
        if not (cache / _BLOBS / sha256).is_file():
            needed += num_bytes - min(part.stat().st_size if part.is_file() else 0, num_bytes)
    free = shutil.disk_usage(cache).free
    if needed and needed + _SPARE_BYTES > free:
        raise ModelError(
            f"{cache}: {repository.location} version {number} does not fit: "
            f"expected {needed + _SPARE_BYTES:,} bytes free, got {free:,}"
        )


def _partial_path(cache: Path, sha256: str) -> Path:
    return cache / _BLOBS / f"{sha256}.part"


def _download(repository: Repository, name: str, entry: FileEntry, cache: Path) -> Path:
    blob, part = cache / _BLOBS / entry.sha256, _partial_path(cache, entry.sha256)
    while not blob.is_file():
        with open(part, "a+b") as file:
            # Another process may download the same file.
            fcntl.flock(file, fcntl.LOCK_EX)
            if blob.is_file():
                break
            resumed = os.fstat(file.fileno()).st_size
            if resumed > entry.num_bytes:
                resumed = 0
                file.truncate(0)
            logger.info(f"fetching {join(repository.location, name)}, {entry.num_bytes - resumed:,} bytes")
            digest = hashlib.sha256()
            file.seek(0)
            while chunk := file.read(1 << 20):
                digest.update(chunk)
            for chunk in read_chunks(repository.storage, name, resumed):
                file.write(chunk)
                digest.update(chunk)
            file.flush()
            os.fsync(file.fileno())
            if digest.hexdigest() == entry.sha256:
                os.replace(part, blob)
                sync_directory(blob.parent)
                break
            part.unlink(missing_ok=True)
            if not resumed:
                raise ModelError(
                    f"{join(repository.location, name)}: sha-256 differs from the manifest, the file is damaged"
                )
    return blob


def _link(blob: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.link(blob, path)
