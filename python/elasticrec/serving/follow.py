"""Follow the current version of a variant: poll the repository, fetch a new version, load it, switch to it."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elasticrec import _core
from elasticrec.errors import ElasticRecError, ModelError, UnavailableError
from elasticrec.net.logs import RepeatFilter
from elasticrec.repository.fetch import fetch, prune
from elasticrec.repository.find import missing_model_text
from elasticrec.repository.repository import Repository
from elasticrec.serving.plan import Variant
from elasticrec.serving.reader_source import reader_source
from elasticrec.serving.readers import ReaderProcesses

# Back-off after a failed load: the first pause and the longest one; it doubles in between.
_RETRY_S, _LONGEST_RETRY_S = 0.5, 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReaderSettings:
    """Settings for running a version's custom reader."""

    num: int = 0
    """Number of reader processes; 0 to run no custom code."""
    timeout_ms: int = 1000


class Server(Protocol):
    """The prediction server, `_core.Server`."""

    def load(
        self,
        model: str,
        variant: str,
        path: str,
        *,
        store: _core.CubeClient | None = None,
        lost_as_zero: bool = False,
        readers: _core.Readers | None = None,
    ) -> tuple[int, int]:
        """Load a version and switch to it."""

    def note(self, model: str, variant: str, offered: int, failures: int) -> None:
        """Record for metrics which version should be served and the number of failures."""


class Follower:
    """Keeps one variant at the current version of its repository."""

    def __init__(
        self,
        server: Server,
        variant: Variant,
        cache: Path,
        store: _core.CubeClient | None = None,
        *,
        lost_as_zero: bool = False,
        readers: ReaderSettings = ReaderSettings(),
    ) -> None:
        self.variant, self.version, self.rows = variant, 0, 0
        self._server, self._cache = server, cache
        self._store, self._lost_as_zero = store, lost_as_zero
        self._reader_settings = readers
        # Reader processes of the loaded version, if it has a custom reader.
        self._readers: ReaderProcesses | None = None
        self._failures, self._attempts, self._again_at = 0, 0, 0.0
        self._failed: int | None = None
        self._problems = RepeatFilter(logger.warning)

    @property
    def is_fixed(self) -> bool:
        """Whether the version is fixed, so that there is nothing to poll."""
        return self.variant.fixed is not None

    def begin(self) -> None:
        """Load the first version, or raise an error."""
        offered = self._target_version()
        if offered is None:
            assert self.variant.repository is not None
            raise self._no_version_error(self.variant.repository)
        self._load(offered)

    def poll(self) -> None:
        """Switch to the current version if it is new. Failures are reported and retried with back-off."""
        try:
            offered = self._target_version()
            self._problems.clear()
        except (ElasticRecError, OSError) as error:
            self._report_problem(str(error))
            return
        if offered is None or offered == self.version:
            return
        if offered == self._failed and time.monotonic() < self._again_at:
            return
        started = time.monotonic()
        try:
            self._load(offered)
        except (ElasticRecError, OSError) as error:
            self._record_failure(offered, str(error))
            return
        took = time.monotonic() - started
        logger.info(f"{self.variant}: switched to version {self.version} ({self.rows:,} rows), loaded in {took:.2f} s")

    def _no_version_error(self, repository: Repository) -> ElasticRecError:
        if repository.versions():
            return UnavailableError(f"{repository.location}: no version is offered yet")
        return ModelError(missing_model_text(repository.location))

    def report_unexpected(self, error: Exception) -> None:
        """Report an unexpected exception, unless it repeats the last problem."""
        self._report_problem(f"{type(error).__name__}: {error}")

    def _target_version(self) -> Path | int | None:
        repository = self.variant.repository
        if self.variant.fixed is not None:
            return self.variant.fixed
        assert repository is not None
        return repository.current()

    def _load(self, offered: Path | int) -> None:
        path = offered if isinstance(offered, Path) else self._fetch(offered)
        if not isinstance(offered, Path):
            self._server.note(self.variant.model, self.variant.name, offered, self._failures)
        version, self.rows = self._load_with_readers(path)
        if not isinstance(offered, Path) and version != offered:
            raise ModelError(f"{path}: expected version {offered}, got {version}")
        self.version, self._failed, self._attempts = version, None, 0
        self._server.note(self.variant.model, self.variant.name, version, self._failures)
        if self.variant.repository is not None and not self.is_fixed:
            prune(self.variant.repository, {version}, self._cache)

    def _load_with_readers(self, path: Path) -> tuple[int, int]:
        """Load a version with its reader processes; a version with the same reader reuses them."""
        before, readers = self._readers, self._start_readers(path)
        try:
            loaded = self._server.load(
                self.variant.model,
                self.variant.name,
                str(path),
                store=self._store,
                lost_as_zero=self._lost_as_zero,
                readers=None if readers is None else readers.core,
            )
        except BaseException:
            if readers is not None and readers is not before:
                readers.close()
            raise
        self._readers = readers
        if before is not None and before is not readers:
            before.retire()
        return loaded

    def _start_readers(self, path: Path) -> ReaderProcesses | None:
        settings = self._reader_settings
        source = reader_source(path) if settings.num else None
        if source is None:
            return None
        if self._readers is not None and self._readers.source == source:
            return self._readers
        return ReaderProcesses(source, settings.num, settings.timeout_ms, str(self.variant))

    def close(self) -> None:
        """End the reader processes."""
        if self._readers is not None:
            self._readers.close()

    def _fetch(self, number: int) -> Path:
        assert self.variant.repository is not None
        fetched = fetch(self.variant.repository, number, self._cache, rows=self._store is None)
        return fetched.directory

    def _record_failure(self, offered: Path | int, reason: str) -> None:
        self._attempts = self._attempts + 1 if offered == self._failed else 1
        self._failed = offered if isinstance(offered, int) else None
        self._failures += 1
        self._again_at = time.monotonic() + min(_RETRY_S * 2 ** (self._attempts - 1), _LONGEST_RETRY_S)
        if isinstance(offered, int):
            self._server.note(self.variant.model, self.variant.name, offered, self._failures)
        if self._attempts == 1:
            text = f"{self.variant}: version {offered} cannot be loaded, still serving {self.version}: {reason}"
            logger.warning(text)

    def _report_problem(self, problem: str) -> None:
        self._problems.write(f"{self.variant}: still serving version {self.version}: {problem}")
