"""Publish a running job: every shard writes its part of a version, then the manifest is committed.

The manifest decides: a publish is a version if and only if the repository has its manifest, which holds the name of the
publish. Shards keep the changes that they took under that name until they hear which publish was committed last;
changes of a publish that failed go into the next one. A shard that does not know the committed publish writes all its
rows. Nothing else needs to be recorded: a new coordinator asks the repository.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticrec.errors import ElasticRecError
from elasticrec.net.logs import RepeatFilter
from elasticrec.net.messages import PublishCommand, PublishPart, PublishStatus
from elasticrec.net.placement import ShardOwner, is_outstanding
from elasticrec.publish.content import PublishedVersion
from elasticrec.publish.servers.target import LostParentError, ShardDraft, ShardParts, VersionTarget

# A requested publish is given up after this many failures in a row.
_MAX_FAILURES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishSettings:
    """When and how versions are published."""

    every_s: float | None = None
    """Seconds between publishes; None to publish at the end of each pass."""
    base_every: int = 60
    """Deltas between two bases."""
    row_type: str = "f32"
    timeout_s: float = 600.0
    """Time limit for the shards to write their parts."""
    retry_s: float = 5.0
    """Pause after a failed publish."""


def run_on_thread(action: Callable[[], None]) -> None:
    """Run an action on a thread, so that slow storage does not block the coordinator."""
    threading.Thread(target=action, name="publish", daemon=True).start()


@dataclass(frozen=True)
class PublishHooks:
    """Functions of the coordinator that a publish calls."""

    clock: Callable[[], float]
    """Returns the monotonic time."""
    note: Callable[[str], None]
    """Logs a line, and shows it to the user who started the training."""
    check_term: Callable[[], None]
    """Raises an error if this coordinator has been replaced."""
    run: Callable[[Callable[[], None]], None] = run_on_thread


class _Task:
    """An action that runs beside the coordinator, which polls it until it is done."""

    def __init__(self, action: Callable[[], Any], run: Callable[[Callable[[], None]], None]) -> None:
        self.result: Any = None
        self.error: str | None = None
        self.has_lost_parent = False
        """Whether the parent of a delta is gone."""
        self.is_done = False
        self._action = action
        run(self._run)

    def _run(self) -> None:
        try:
            self.result = self._action()
        except (ElasticRecError, OSError) as error:
            self.error = str(error)
            self.has_lost_parent = isinstance(error, LostParentError)
        except Exception as error:
            # A bug in publishing must not end the training.
            self.error = f"{type(error).__name__}: {error}"
        self.is_done = True


@dataclass
class _OpenPublish:
    """A publish in progress."""

    number: int
    name: str
    owners: dict[int, ShardOwner]
    parent: PublishedVersion | None
    facts: dict[str, Any]
    since: float
    draft: ShardDraft | None = None
    """None until the repository has allocated a version number."""
    parts: dict[int, PublishPart] = field(default_factory=dict)

    @property
    def is_written(self) -> bool:
        """Whether all shards have written their part."""
        return self.parts.keys() == self.owners.keys()

    @property
    def kind(self) -> str:
        """`base` or `delta`."""
        return "base" if self.parent is None else "delta"


@dataclass
class PublishFigures:
    """Counts of this coordinator's publishes, and figures of the last version."""

    committed: int = 0
    failed: int = 0
    seconds: float = 0.0
    """Total time of all committed publishes."""
    last_s: float | None = None
    kind: str | None = None
    rows: int | None = None
    changed: int | None = None
    removed: int | None = None
    whole: int | None = None
    num_bytes: int | None = None
    error: str | None = None
    """Why the last publish failed; None after a commit."""


class Publishing:
    """Runs one publish at a time. A publish that is due during another one starts after it; at most one is queued."""

    def __init__(self, settings: PublishSettings, target: VersionTarget, term: int, hooks: PublishHooks) -> None:
        self.settings = settings
        self.figures = PublishFigures()
        self.last: PublishedVersion | None = None
        """Newest version of this run."""
        self._target, self._term, self._hooks = target, term, hooks
        self._number = 0
        self._open: _OpenPublish | None = None
        self._is_claimed = False
        # The task in progress, and the function that handles its result.
        self._task: tuple[_Task, Callable[[_Task], None]] | None = None
        self._is_wanted = False
        self._due = hooks.clock() + (settings.every_s or 0.0)
        self._not_before = hooks.clock()
        self._written = self._done = 0
        self._num_failures = 0
        self._committed_at: float | None = None
        self._problems = RepeatFilter(hooks.note)
        self._last_facts: Mapping[str, Any] = {}

    def request(self) -> int:
        """Request a publish that begins after this call. Return its ticket for `is_written` and `is_done`."""
        self._is_wanted = True
        self._num_failures = 0
        return self._number + 1

    def is_written(self, ticket: int) -> bool:
        """Return whether all shards have written their parts of a requested publish, or it was given up."""
        return self._written >= ticket

    def is_done(self, ticket: int) -> bool:
        """Return whether a requested publish was committed or given up."""
        return self._done >= ticket

    @property
    def is_writing(self) -> bool:
        """Whether the parts of some shards are outstanding."""
        return self._open is not None and not self._open.is_written

    @property
    def age_s(self) -> float | None:
        """Seconds since the last commit of this coordinator."""
        return None if self._committed_at is None else self._hooks.clock() - self._committed_at

    @property
    def next_s(self) -> float | None:
        """Seconds until the next publish is due, or None if unknown."""
        if self._is_wanted or self.settings.every_s is not None:
            due = self._not_before if self._is_wanted else max(self._due, self._not_before)
            return max(due - self._hooks.clock(), 0.0)
        return None

    def is_due(self, learned: Any = None) -> bool:
        """Return whether a publish should begin now: it is due, and `learned` differs from the last one."""
        has_changes = self._is_wanted or learned is None or learned != self._last_facts.get("learned")
        return has_changes and self._open is None and self.next_s == 0.0

    def describe(self) -> PublishStatus:
        """Return the figures for the status."""
        last, found, figures = self.last, self._open, self.figures
        return {
            "version": None if last is None else last.number,
            "deltas": None if last is None else last.num_deltas,
            "offer": None if last is None else last.offer,
            "age_s": self.age_s,
            "next_s": self.next_s,
            "writing": None
            if found is None
            else {"publish": found.name, "kind": found.kind, "parts": len(found.parts)},
            "committed": figures.committed,
            "failed": figures.failed,
            "seconds": figures.seconds,
            "last_s": figures.last_s,
            "kind": figures.kind,
            "rows": figures.rows,
            "changed": figures.changed,
            "removed": figures.removed,
            "whole": figures.whole,
            "num_bytes": figures.num_bytes,
            "error": figures.error,
        }

    def close(self) -> None:
        """Release the model, so that others may publish it."""
        self._target.close()

    def tick(
        self, owners: Mapping[int, ShardOwner] | None, facts: Callable[[], dict[str, Any]], *, may_begin: bool
    ) -> None:
        """Advance the publish in progress, or begin one that is due. `owners` is None unless all shards are serving."""
        self._poll_task()
        found = self._open
        if found is not None and not found.is_written:
            if owners is None or dict(owners) != found.owners:
                is_moved = owners is not None and owners.keys() != found.owners.keys()
                why = "partitions moved during the publish" if is_moved else "a shard died during the publish"
                self._fail(why, retry_at_once=True)
            elif self._hooks.clock() - found.since >= self.settings.timeout_s:
                self._fail(f"shards did not write their parts within {self.settings.timeout_s:g} s")
        if self._task is not None or self._open is not None:
            return
        if not self._is_claimed:
            if self._hooks.clock() >= self._not_before:
                self._start_task(self._target.claim, self._take_claim)
        elif owners is not None and may_begin and self.next_s == 0.0:
            found_facts = facts()
            if self.is_due(found_facts.get("learned")):
                self._begin(dict(owners), found_facts)

    def _start_task(self, action: Callable[[], Any], then: Callable[[_Task], None]) -> None:
        assert self._task is None, "tasks run one at a time"
        self._task = (_Task(action, self._hooks.run), then)
        self._poll_task()

    def _poll_task(self) -> None:
        if self._task is not None and self._task[0].is_done:
            task, then = self._task
            self._task = None
            then(task)

    def _take_claim(self, task: _Task) -> None:
        """Take the version that earlier coordinators of this run committed last."""
        if task.error is not None:
            self._problems.write(f"publish: the repository cannot be used: {task.error}")
            self.figures.error = task.error
            self._not_before = self._hooks.clock() + self.settings.retry_s
            self._number += 1
            self._count_failure(self._number)
            return
        self.last, self._is_claimed = task.result, True

    def _begin(self, owners: dict[int, ShardOwner], facts: dict[str, Any]) -> None:
        now, last = self._hooks.clock(), self.last
        self._number += 1
        self._is_wanted = False
        if self.settings.every_s is not None:
            self._due = now + self.settings.every_s
        is_base = last is None or last.num_deltas >= self.settings.base_every
        parent = None if is_base else last
        name = f"{self._term:08d}-{self._number:06d}"
        self._open = _OpenPublish(self._number, name, owners, parent, facts, now)
        self._start_task(lambda: self._target.begin(parent), self._take_draft)

    def _take_draft(self, task: _Task) -> None:
        found = self._open
        if found is None:
            # The publish was given up while its draft was being created.
            if isinstance(task.result, ShardDraft):
                self._abandon(task.result)
        elif task.error is None:
            found.draft = task.result
        else:
            if task.has_lost_parent:
                # Without a parent the next version is a base.
                self.last = None
            self._fail(task.error, retry_at_once=task.has_lost_parent)

    def command(self, index: int, incarnation: int) -> PublishCommand | None:
        """Return the command for a shard to write its part, or None if it has nothing to write."""
        found = self._open
        if found is None or found.draft is None:
            return None
        if not is_outstanding(found.owners, found.parts, index, incarnation):
            return None
        return {
            "command": "publish",
            "publish": found.name,
            "committed": None if self.last is None else self.last.publish,
            "base": found.parent is None,
            "row_type": self.settings.row_type,
            "cube": str(found.draft.cube(index).absolute()),
            "dense": str(found.draft.dense(index).absolute()),
            "name": found.draft.name,
            "store": found.draft.repository_url,
        }

    def report(self, index: int, part: PublishPart) -> None:
        """Handle a shard's report on its part; the last part starts the commit.

        Reports on other publishes (also of other terms) and from other incarnations are ignored.
        """
        found = self._open
        if found is None or part.publish != found.name:
            return
        if not is_outstanding(found.owners, found.parts, index, part.incarnation):
            return
        if part.state == "failed":
            self._fail(f"shard {index}: {part.error or 'no reason given'}")
        elif part.state == "written":
            if part.cube is None or part.dense is None:
                self._fail(f"shard {index}: reported its part as written, without its files")
                return
            found.parts[index] = part
            if found.is_written:
                self._written = found.number
                self._commit(found)

    def _commit(self, found: _OpenPublish) -> None:
        owned = {index: owner.partitions for index, owner in found.owners.items()}
        draft, content = found.draft, ShardParts(found.name, found.parent, dict(found.parts), owned, found.facts)
        assert draft is not None, "shards write into a draft"

        def commit() -> PublishedVersion:
            self._hooks.check_term()
            return self._target.commit(draft, content)

        self._start_task(commit, self._finish)

    def _finish(self, task: _Task) -> None:
        found = self._open
        assert found is not None, "a publish is not given up during its commit"
        if task.error is not None:
            # The commit may have succeeded despite the error: ask the repository before the next publish.
            self._is_claimed = False
            self._fail(task.error)
            return
        self._open = None
        self._done = found.number
        self._num_failures = 0
        self._problems.clear()
        self._last_facts = found.facts
        was_refused = self.last is not None and self.last.is_refused
        self.last = task.result
        now = self._hooks.clock()
        self._committed_at = now
        self._update_figures(found, now - found.since)
        logger.info("%s", self._describe_last(found))
        if self.last.is_refused and not was_refused:
            self._hooks.note(
                f"version {self.last.number} is {self.last.offer}; the current version stays until a new one passes"
            )

    def _update_figures(self, found: _OpenPublish, seconds: float) -> None:
        figures, parts = self.figures, found.parts.values()
        figures.committed += 1
        figures.seconds += seconds
        figures.last_s, figures.kind, figures.error = seconds, found.kind, None
        figures.rows = sum(part.rows for part in parts)
        figures.changed = sum(part.changed for part in parts)
        figures.removed = sum(part.removed for part in parts)
        figures.whole = sum(part.whole for part in parts)
        figures.num_bytes = sum(part.cube.bytes for part in parts if part.cube is not None)

    def _describe_last(self, found: _OpenPublish) -> str:
        figures, last = self.figures, self.last
        assert last is not None
        rows = f"{figures.rows:,} rows"
        if found.parent is not None:
            whole = f", {figures.whole} partitions whole" if figures.whole else ""
            rows = f"{figures.changed:,} rows changed, {figures.removed:,} removed{whole}, of {figures.rows:,}"
        offer = f"; {last.offer}" if last.offer else ""
        return f"published version {last.number}, a {found.kind}: {rows}, in {figures.last_s:.1f} s{offer}"

    def _fail(self, reason: str, *, retry_at_once: bool = False) -> None:
        """Give up the publish in progress; earlier versions stay, and its changes go into the next one."""
        found = self._open
        assert found is not None
        self._open = None
        self.figures.failed += 1
        self.figures.error = reason
        self._is_wanted = True
        now = self._hooks.clock()
        self._not_before = now if retry_at_once else now + self.settings.retry_s
        self._problems.write(f"publish failed: {reason}; the next version will include its changes")
        if not retry_at_once:
            self._count_failure(found.number)
        if found.draft is not None:
            self._abandon(found.draft)

    def _count_failure(self, number: int) -> None:
        """Stop retrying a requested publish after several failures: its changes go into a later version."""
        self._num_failures += 1
        if self._num_failures < _MAX_FAILURES:
            return
        self._num_failures = 0
        self._is_wanted = False
        self._written = self._done = number
        if self.settings.every_s is not None:
            self._due = self._hooks.clock() + max(self.settings.every_s, self.settings.retry_s)

    def _abandon(self, draft: ShardDraft) -> None:
        self._start_task(lambda: self._target.abandon(draft), self._report_abandon)

    def _report_abandon(self, task: _Task) -> None:
        if task.error is not None:
            logger.warning("publish: cannot remove the files of a failed version: %s", task.error)
