"""Loads the versions of a repository into the memory of one store process, and unloads old ones.

The loader follows the newest version, or the version that a rollback holds, and applies each delta to its parent. A
version that cannot be loaded is reported and retried with back-off; loaded versions answer meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.net.logs import RepeatFilter
from elasticrec.repository.fetch import FetchedVersion, fetch, prune
from elasticrec.repository.local import LocalStorage
from elasticrec.repository.repository import Current, Repository
from elasticrec.repository.verify import check_file
from elasticrec.repository.version import Version

# Versions newer than the current one that stay loaded: other replicas may be behind, and the rollout offers a
# version that enough of them have.
_MAX_NEWER = 16
# The same for bases, which are large.
_MAX_NEWER_BASES = 2
# A new version stays for at least this time, because the rollout may be about to offer it.
_JUST_LOADED_S = 30.0
# Pauses before a failed version is retried: the first one, and the longest.
_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0

logger = logging.getLogger(__name__)


class Server(Protocol):
    """The server that holds the versions: `_core.CubeServer`."""

    def install_base(self, version: int, paths: list[str]) -> None:
        """Load a base."""

    def install_delta(self, version: int, parent: int, paths: list[str]) -> None:
        """Apply a delta to a loaded version."""

    def retire(self, version: int) -> None:
        """Unload a version."""

    def versions(self) -> list[int]:
        """Return the loaded versions in ascending order."""


@dataclass(frozen=True)
class Failure:
    """The last failed attempt to load a version."""

    why: str
    attempts: int
    retry_at: float
    """Monotonic time of the next attempt."""


@dataclass
class Figures:
    """Figures for the status and the metrics."""

    loads: int = 0
    failures: int = 0
    load_s: float = 0.0
    """Load time of the last version."""
    bytes_per_s: float | None = None
    """Load speed of the last base."""


def target_of(current: Current | None, versions: list[int]) -> int | None:
    """Return the version to load: the newest, or the one that a rollback holds."""
    if current is not None and current.is_held:
        return current.version if current.wanted is None else current.wanted
    return max(versions, default=None)


@dataclass(frozen=True)
class LoadedVersion:
    """A version in memory."""

    number: int
    base: int
    """The number of the version's base: its own number for a base."""
    is_new: bool = False
    """Whether the version was loaded a moment ago."""


def versions_to_keep(loaded: Sequence[LoadedVersion], current: int | None, target: int | None, keep: int) -> set[int]:
    """Return the loaded versions that stay: the current one, `keep - 1` older ones, and some newer ones."""
    newest_served = current or 0
    wanted = {version for version in (current, target) if version is not None}
    older = [one.number for one in loaded if one.number < newest_served]
    newer = [one for one in loaded if one.number > newest_served]
    bases = sorted({one.base for one in newer if one.base > newest_served})[-_MAX_NEWER_BASES:]
    newer = [one for one in newer if one.base <= newest_served or one.base in bases]
    recent = {one.number for one in newer if one.is_new} | {one.number for one in newer[-_MAX_NEWER:]}
    # A slice from -0 would keep all older versions.
    return wanted | set(older[len(older) - min(keep - 1, len(older)) :]) | recent


class Loader:
    """Compares the repository with the loaded versions, and loads and unloads accordingly."""

    def __init__(
        self,
        repository: Repository,
        server: Server,
        cache: Path,
        keep: int,
        on_change: Callable[[], None] = lambda: None,
        partitions: range | None = None,
    ) -> None:
        """`on_change` is called when the status changes; `partitions` are those of the server, or None for all."""
        self._repository, self._server, self._cache, self._partitions = repository, server, cache, partitions
        self._keep, self._on_change = keep, on_change
        # For each loaded version the number of its base, and the time when it was loaded.
        self._loaded: dict[int, tuple[int, float]] = {}
        # Intermediate versions of a long chain, kept only until the next delta is applied.
        self._intermediate: set[int] = set()
        self._lock = threading.Lock()
        self.figures = Figures()
        self.current: Current | None = None
        self.loading: int | None = None
        self.failures: dict[int, Failure] = {}
        # Why the last poll of the repository failed.
        self._problems = RepeatFilter(logger.warning)

    def poll(self) -> None:
        """Load new versions and unload old ones; log problems and try again at the next poll."""
        with self._lock:
            try:
                self.current = self._repository.state()
                self._follow(target_of(self.current, self._repository.versions()))
                self._problems.clear()
            except (ElasticRecError, OSError) as error:
                self._problems.write(str(error))
            except Exception as error:
                # A bug here must not stop the server from answering.
                self._problems.write(f"{type(error).__name__}: {error}")

    def _follow(self, target: int | None) -> None:
        current = None if self.current is None else self.current.version
        # Load the current version first: requests use it.
        wanted = [version for version in dict.fromkeys((current, target)) if version is not None]
        self.failures = {version: failure for version, failure in self.failures.items() if version in wanted}
        for version in wanted:
            if version not in self._server.versions():
                self._try_load(version)
        # Loading takes time: another version may have become current.
        self.current = self._repository.state()
        self._unload_old(None if self.current is None else self.current.version, target)

    def _try_load(self, version: int) -> None:
        failure = self.failures.get(version)
        if failure is not None and time.monotonic() < failure.retry_at:
            return
        self.loading = version
        self._on_change()
        started = time.monotonic()
        try:
            self._load(version)
        except (ElasticRecError, OSError) as error:
            attempts = 1 if failure is None else failure.attempts + 1
            pause_s = min(_RETRY_S * 2 ** (attempts - 1), _LONGEST_RETRY_S)
            self.failures[version] = Failure(str(error), attempts, time.monotonic() + pause_s)
            self.figures.failures += 1
            if failure is None or failure.why != str(error):
                logger.warning("version %d cannot be loaded: %s", version, error)
            return
        finally:
            self.loading = None
        self.failures.pop(version, None)
        self.figures.load_s = time.monotonic() - started
        logger.info("loaded version %d in %.2f s", version, self.figures.load_s)

    def _load(self, number: int) -> None:
        """Install the missing versions of a chain, its base first."""
        fetched = fetch(self._repository, number, self._cache, partitions=self._partitions)
        loaded = set(self._server.versions())
        last = next((at for at in reversed(range(len(fetched.chain))) if fetched.chain[at].number in loaded), -1)
        links = fetched.chain[last + 1 :]
        # Report only the end of a long chain: the rollout must not offer versions that are unloaded at once.
        intermediate = {version.number for version in links[:-_MAX_NEWER]}
        for version in links:
            if version.number in intermediate:
                self._intermediate.add(version.number)
            self._install(fetched, version)
            self._loaded[version.number] = (fetched.chain[0].number, time.monotonic())
            self.figures.loads += 1
            if version.parent in self._intermediate:
                self._server.retire(version.parent)
            self._on_change()

    def _install(self, fetched: FetchedVersion, version: Version) -> None:
        started, storage = time.monotonic(), LocalStorage(fetched.model)
        for name in version.parts_of(self._partitions):
            if problem := check_file(storage, f"{version.name}/{name}", version.files[name]):
                raise ModelError(problem)
        paths = [str(path) for path in fetched.parts(version)]
        if version.parent is None:
            self._server.install_base(version.number, paths)
            self.figures.bytes_per_s = version.num_bytes / max(time.monotonic() - started, 1e-3)
        else:
            self._server.install_delta(version.number, version.parent, paths)

    def _unload_old(self, current: int | None, target: int | None) -> None:
        versions = self._server.versions()
        self._loaded = {version: self._loaded[version] for version in versions if version in self._loaded}
        self._intermediate &= set(versions)
        now = time.monotonic()
        known = {version: self._loaded.get(version, (version, now)) for version in versions}
        loaded = [
            LoadedVersion(version, base, is_new=now - loaded_at < _JUST_LOADED_S)
            for version, (base, loaded_at) in known.items()
        ]
        keep = versions_to_keep(loaded, current, target, self._keep)
        for version in versions:
            # Keep the last version that can answer until a newer one is loaded.
            if version not in keep and len(self._server.versions()) > 1:
                self._server.retire(version)
        if set(versions) - keep:
            prune(self._repository, keep, self._cache)

    def status(self) -> dict[str, Any]:
        """Return the status for the HTTP API and for the rollout."""
        newest = max(self.failures, default=None)
        return {
            "versions": [version for version in self._server.versions() if version not in self._intermediate],
            "current": None if self.current is None else self.current.version,
            "loading": self.loading,
            "failed": None if newest is None else {"version": newest, "why": self.failures[newest].why},
            "problem": self._problems.last,
            "load_s": round(self.figures.load_s, 3),
            "loads": self.figures.loads,
            "load_failures": self.figures.failures,
            "bytes_per_s": self.figures.bytes_per_s,
        }
