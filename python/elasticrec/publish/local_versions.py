"""Versions of a training in one process: periodic bases with deltas in between.

A delta holds the changes since the last committed version. The table keeps the changes that a publish took, under the
name of that publish, until the next publish names the committed one; changes of a failed publish go into the next one.
The first version of a process is a base, because a table loaded from a checkpoint does not know which rows have changed
since the last publish.
"""

import logging
from dataclasses import replace

from elasticrec.errors import ModelError
from elasticrec.fail_points import fail_point
from elasticrec.manifest import FileEntry
from elasticrec.publish.content import PublishedVersion
from elasticrec.publish.local import (
    CUBE_FILE,
    VersionSource,
    WrittenRows,
    commit_version,
    offer_committed,
    write_base_rows,
)
from elasticrec.publish.offer import PublishResult
from elasticrec.repository.repository import Draft, Repository

logger = logging.getLogger(__name__)


class LocalVersions:
    """Writes the versions of one table. The caller holds the repository's lock."""

    def __init__(self, repository: Repository, base_every: int) -> None:
        self._repository, self._base_every = repository, base_every
        self._last: PublishedVersion | None = None
        self._num_publishes = 0

    def publish(self, source: VersionSource, graph: bytes) -> tuple[PublishResult, WrittenRows | None]:
        """Write a version and offer it. Return the result and the rows of a delta, or None for a base."""
        self._num_publishes += 1
        name = str(self._num_publishes)
        draft, parent = self._begin()
        num_deltas = 0 if parent is None else parent.num_deltas + 1
        source = replace(source, publish={"run": source.run.name, "name": name, "deltas": num_deltas})
        with draft:
            rows = self._write_rows(source, draft, name) if self._base_every else write_base_rows(source, draft)
            fail_point("version")
            version = commit_version(draft, source, graph, rows)
        # The version is committed, even if its offer fails.
        self._last = PublishedVersion(version.number, name, num_deltas)
        fail_point("version-written")
        return offer_committed(self._repository, version, source), None if parent is None else rows

    def is_last_missing(self, source: VersionSource) -> bool:
        """Return whether a finished run still has to write its last version.

        A last version that was committed but not offered is offered now. False if another run has published since.
        """
        numbers = self._repository.versions()
        if not numbers:
            return True
        version = self._repository.version(numbers[-1])
        data = version.manifest["data"]
        if data.get("publish", {}).get("run") != source.run.name:
            return False
        if (data["samples"], version.rows) != (source.progress.samples, len(source.state.embedding.table)):
            return True
        if (self._repository.current() or 0) < version.number:
            published = offer_committed(self._repository, version, source)
            logger.info("%s: %s", published.location, published.offer.summary)
        return False

    def _begin(self) -> tuple[Draft, PublishedVersion | None]:
        """Begin a delta and return its parent too, or begin a base."""
        last = self._last
        if last is not None and last.num_deltas < self._base_every:
            try:
                return self._repository.begin_delta(last.number), last
            except ModelError:
                # The parent, or a version below it, was removed or damaged: write a base.
                self._last = None
        return self._repository.begin(), None

    def _write_rows(self, source: VersionSource, draft: Draft, name: str) -> WrittenRows:
        """Write all rows or the changed ones; the table tracks changes from then on."""
        figures = source.state.embedding.table.publish(
            name,
            committed=None if self._last is None else self._last.publish,
            is_base=draft.base is None,
            row_type=source.job.publish.row_type,
            path=str(draft.directory / CUBE_FILE),
        )
        file = FileEntry(figures["bytes"], figures["sha256"])
        return WrittenRows(file, figures["changed"], figures["removed"], figures["whole"])
