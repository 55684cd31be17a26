"""Versions of a repository into the memory of one store process, and old ones out of it.

It goes after the newest version, or after the one that a rollback holds, link by link: each delta onto its parent.
What cannot be loaded is told and tried again later; what is loaded is answered for meanwhile.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.repository.fetch import Fetched, fetch, prune
from elasticrec.repository.local import LocalStorage
from elasticrec.repository.repository import Current, Repository
from elasticrec.repository.verify import check_file
from elasticrec.repository.version import Version

# Versions beyond the offered one that are kept: the one that all replicas have may be some behind the newest;
_AHEAD = 16
# of bases, which are large, fewer.
_BASES_AHEAD = 2
# The roll-out may be about to offer what it has just seen here.
_JUST_LOADED_S = 30.0
# A version that could not be loaded is tried again after this, and then twice as long, up to the second.
_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0


class Server(Protocol):
    """Where versions go: `_core.CubeServer`."""

    def install_base(self, version: int, paths: list[str]) -> None:
        """Open a base."""

    def install_delta(self, version: int, parent: int, paths: list[str]) -> None:
        """Apply a delta to a version that is there."""

    def retire(self, version: int) -> None:
        """Let a version go."""

    def versions(self) -> list[int]:
        """Those that are there, ascending."""


@dataclass(frozen=True)
class Failure:
    """Why a version could not be loaded."""

    why: str
    attempts: int
    again_at: float
    """On the monotonic clock."""


@dataclass
class Figures:
    """What it did so far."""

    loads: int = 0
    failures: int = 0
    load_s: float = 0.0
    """Of the last version."""
    looks: int = 0
    bytes_per_s: float | None = None
    """Of the last base."""


def target_of(current: Current | None, versions: list[int]) -> int | None:
    """The version to have: the newest, or what a rollback holds."""
    if current is not None and current.is_held:
        return current.version if current.wanted is None else current.wanted
    return max(versions, default=None)


@dataclass(frozen=True)
class Held:
    """A version in memory."""

    number: int
    base: int
    """The number of its base, itself if it is one."""
    is_new: bool = False
    """Whether it was loaded just now."""


def to_keep(held: Sequence[Held], current: int | None, target: int | None, keep: int) -> set[int]:
    """Of the versions that are held those that stay: the offered one, `keep - 1` before it, some behind it."""
    offered = current or 0
    wanted = {version for version in (current, target) if version is not None}
    before = [one.number for one in held if one.number < offered]
    bases = sorted({one.base for one in held if one.number > offered and one.base > offered})[-_BASES_AHEAD:]
    behind = [one for one in held if one.number > offered and (one.base <= offered or one.base in bases)]
    recent = {one.number for one in behind if one.is_new} | {one.number for one in behind[-_AHEAD:]}
    # not [-0:], which is all of them
    return wanted | set(before[len(before) - min(keep - 1, len(before)) :]) | recent


class Loader:
    """One look after the other."""

    def __init__(
        self,
        repository: Repository,
        server: Server,
        cache: Path,
        keep: int,
        say: Callable[[str], None],
        tell: Callable[[], None] = lambda: None,
        partitions: range | None = None,
    ) -> None:
        """Whoever asks how it is hears of it by `tell`, whenever that has changed. `partitions` are the server's."""
        self._repository, self._server, self._cache, self._partitions = repository, server, cache, partitions
        self._keep, self._say, self._tell = keep, say, tell
        # What is known of the versions that are held: their base, and when they were loaded.
        self._loaded: dict[int, tuple[int, float]] = {}
        # Links of a chain that are held until the next one is there.
        self._passed: set[int] = set()
        self._lock = threading.Lock()
        self.figures = Figures()
        self.current: Current | None = None
        self.loading: int | None = None
        self.failures: dict[int, Failure] = {}
        self.problem: str | None = None
        """Why the repository could not be looked at."""

    def look(self) -> None:
        """Load what is new and drop what is old; whatever goes wrong is said and tried again."""
        with self._lock:
            try:
                self.figures.looks += 1
                self.current = self._repository.state()
                self._follow(target_of(self.current, self._repository.versions()))
                self._note(None)
            except (ElasticRecError, OSError) as error:
                self._note(str(error))
            except Exception as error:
                # our own bug must not end what is answered
                self._note(f"{type(error).__name__}: {error}")

    def _note(self, problem: str | None) -> None:
        if problem is not None and problem != self.problem:
            self._say(problem)
        self.problem = problem

    def _follow(self, target: int | None) -> None:
        current = None if self.current is None else self.current.version
        # the offered one first: requests ask for it
        wanted = [version for version in dict.fromkeys((current, target)) if version is not None]
        self.failures = {version: failure for version, failure in self.failures.items() if version in wanted}
        for version in wanted:
            if version not in self._server.versions():
                self._try(version)
        # a load takes its time: another version may be offered by now
        self.current = self._repository.state()
        self._tidy(None if self.current is None else self.current.version, target)

    def _try(self, version: int) -> None:
        failure = self.failures.get(version)
        if failure is not None and time.monotonic() < failure.again_at:
            return
        self.loading = version
        self._tell()
        started = time.monotonic()
        try:
            self._load(version)
        except (ElasticRecError, OSError) as error:
            attempts = 1 if failure is None else failure.attempts + 1
            pause_s = min(_RETRY_S * 2 ** (attempts - 1), _LONGEST_RETRY_S)
            self.failures[version] = Failure(str(error), attempts, time.monotonic() + pause_s)
            self.figures.failures += 1
            if failure is None or failure.why != str(error):
                self._say(f"version {version} cannot be loaded: {error}")
            return
        finally:
            self.loading = None
        self.failures.pop(version, None)
        self.figures.load_s = time.monotonic() - started
        self._say(f"loaded version {version} in {self.figures.load_s:.2f} s")

    def _load(self, number: int) -> None:
        """Install what is missing of a chain, its base first."""
        fetched = fetch(self._repository, number, self._cache, self._say, partitions=self._partitions)
        held = set(self._server.versions())
        behind = next((at for at in reversed(range(len(fetched.chain))) if fetched.chain[at].number in held), -1)
        links = fetched.chain[behind + 1 :]
        # of a long chain only the end is told of: the roll-out must not offer what is on its way out again
        passed = {version.number for version in links[:-_AHEAD]}
        for version in links:
            if version.number in passed:
                self._passed.add(version.number)
            self._install(fetched, version)
            self._loaded[version.number] = (fetched.chain[0].number, time.monotonic())
            self.figures.loads += 1
            if version.parent in self._passed:
                self._server.retire(version.parent)
            self._tell()

    def _install(self, fetched: Fetched, version: Version) -> None:
        started, store = time.monotonic(), LocalStorage(fetched.model)
        for name in version.parts_of(self._partitions):
            if problem := check_file(store, f"{version.name}/{name}", version.files[name]):
                raise ModelError(problem)
        paths = [str(path) for path in fetched.parts(version)]
        if version.parent is None:
            self._server.install_base(version.number, paths)
            self.figures.bytes_per_s = version.num_bytes / max(time.monotonic() - started, 1e-3)
        else:
            self._server.install_delta(version.number, version.parent, paths)

    def _tidy(self, current: int | None, target: int | None) -> None:
        held = self._server.versions()
        self._loaded = {version: self._loaded[version] for version in held if version in self._loaded}
        self._passed &= set(held)
        now = time.monotonic()
        known = {version: self._loaded.get(version, (version, now)) for version in held}
        keep = to_keep(
            [Held(version, base, now - loaded_at < _JUST_LOADED_S) for version, (base, loaded_at) in known.items()],
            current,
            target,
            self._keep,
        )
        for version in held:
            # what is asked for is not dropped for what is not there yet
            if version not in keep and len(self._server.versions()) > 1:
                self._server.retire(version)
        if set(held) - keep:
            prune(self._repository, keep, self._cache)

    def status(self) -> dict[str, Any]:
        """For people and for the roll-out."""
        newest = max(self.failures, default=None)
        return {
            "versions": [version for version in self._server.versions() if version not in self._passed],
            "current": None if self.current is None else self.current.version,
            "loading": self.loading,
            "failed": None if newest is None else {"version": newest, "why": self.failures[newest].why},
            "problem": self.problem,
            "load_s": round(self.figures.load_s, 3),
            "loads": self.figures.loads,
            "load_failures": self.figures.failures,
            "bytes_per_s": self.figures.bytes_per_s,
        }
