"""The versions of a training in one process: a base every so often, and deltas between.

A delta has what changed since the last version that was committed. The table keeps what a publish took, under its name,
until it hears which one was committed last: what nobody got comes with the next. The first version of a process is a
base: a table that was loaded knows nothing of what is online.
"""

from collections.abc import Callable
from dataclasses import replace

from elasticrec.errors import ModelError
from elasticrec.fail_points import fail_point
from elasticrec.manifest import FileEntry
from elasticrec.publish.content import PublishedVersion
from elasticrec.publish.local import CUBE_FILE, Cut, Published, Rows, commit_cut, offer_cut, write_all
from elasticrec.repository.repository import Draft, Repository


class LocalVersions:
    """Writes the versions of one table; the caller holds the repository."""

    def __init__(self, repository: Repository, base_every: int) -> None:
        self._repository, self._base_every = repository, base_every
        self._last: PublishedVersion | None = None
        self._num_publishes = 0

    def publish(self, cut: Cut, graph: bytes) -> tuple[Published, Rows | None]:
        """Write a version and offer it; returns with it the rows of a delta, None of a base."""
        self._num_publishes += 1
        name = str(self._num_publishes)
        draft, parent = self._begin()
        num_deltas = 0 if parent is None else parent.num_deltas + 1
        cut = replace(cut, publish={"run": cut.run.name, "name": name, "deltas": num_deltas})
        with draft:
            rows = self._write_changes(cut, draft, name) if self._base_every else write_all(cut, draft)
            fail_point("version")
            version = commit_cut(draft, cut, graph, rows)
        # from here on it is a version, whatever becomes of the offer
        self._last = PublishedVersion(version.number, name, num_deltas)
        fail_point("version-written")
        return offer_cut(self._repository, version, cut), None if parent is None else rows

    def lacks(self, cut: Cut, say: Callable[[str], None]) -> bool:
        """Whether the last version of a run that is over was not written; one that was not offered is, now, and told.

        Nothing comes over what others have published, or people by hand.
        """
        numbers = self._repository.versions()
        if not numbers:
            return True
        version = self._repository.version(numbers[-1])
        data = version.manifest["data"]
        if data.get("publish", {}).get("run") != cut.run.name:
            return False
        if (data["samples"], version.rows) != (cut.progress.samples, len(cut.state.embedding.table)):
            return True
        if (self._repository.current() or 0) < version.number:
            published = offer_cut(self._repository, version, cut)
            say(f"{published.place}: {published.outcome.words}")
        return False

    def _begin(self) -> tuple[Draft, PublishedVersion | None]:
        """A place for a delta and what it is of, or one for a base."""
        last = self._last
        if last is not None and last.num_deltas < self._base_every:
            try:
                return self._repository.begin_delta(last.number), last
            except ModelError:
                # it was removed or damaged, or something that it is made of
                self._last = None
        return self._repository.begin(), None

    def _write_changes(self, cut: Cut, draft: Draft, name: str) -> Rows:
        """All rows or what changed, of which the table keeps a list from then on."""
        figures = cut.state.embedding.table.publish(
            name,
            committed=None if self._last is None else self._last.publish,
            is_base=draft.base is None,
            row_type=cut.job.publish.row_type,
            path=str(draft.directory / CUBE_FILE),
        )
        file = FileEntry(figures["bytes"], figures["sha256"])
        return Rows(file, figures["changed"], figures["removed"], figures["whole"])
