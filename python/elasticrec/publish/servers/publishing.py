"""Publishes of a running job: every shard writes its part of a version, a manifest written last makes them one.

The manifest decides: a publish is a version if and only if the repository has its manifest, which has the name of the
publish in it. Shards keep what they took under that name until they hear which publish was committed last, so that
what nobody got comes with the next one; one that does not know the committed publish writes all it has. So nothing has
to be written down beside the manifest: a new coordinator asks the repository.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.net.messages import PublishPart, ShardOwner
from elasticrec.publish.content import PublishedVersion

# A publish that is waited for is given up after so many failures.
_MAX_FAILURES = 3


@dataclass(frozen=True)
class PublishSettings:
    """When versions are published."""

    every_s: float | None = None
    """Seconds; None for the end of each pass."""
    base_every: int = 60
    """Deltas between two bases."""
    row_type: str = "f32"
    timeout_s: float = 600.0
    """A publish whose parts take longer is given up."""
    retry_s: float = 5.0
    """Before the next one, after one that failed."""


@dataclass(frozen=True)
class ShardDraft:
    """A version that is being written."""

    number: int
    path: Path
    """Where the parts go, for all shards that share the disk;"""
    name: str = ""
    """the others send them to the repository, under this name,"""
    store: str | None = None
    """which is at this URL; the coordinator serves one that is a directory."""

    def cube(self, index: int) -> Path:
        """The part of a shard."""
        return self.path / "cube" / f"part-{index:05d}"

    def dense(self, index: int) -> Path:
        """Its dense values, from which those of all shards are put together."""
        return self.path / f".dense-{index:05d}"


@dataclass(frozen=True)
class ShardParts:
    """What a version is made of."""

    publish: str
    parent: PublishedVersion | None
    """None for a base."""
    parts: Mapping[int, PublishPart]
    owned: Mapping[int, range]
    """The partitions of each part."""
    facts: Mapping[str, Any]
    """What the coordinator knew when it began: metrics, data time, what the shards had `learned`."""


class LostParentError(ModelError):
    """The version that a delta would be of is not in the repository any more."""


class Target(Protocol):
    """Where versions go. None of it is called from two threads at once."""

    def last(self) -> PublishedVersion | None:
        """Take the model for this run, and find the newest version that it has committed."""

    def begin(self, parent: PublishedVersion | None) -> ShardDraft:
        """A place for a base, or for a delta."""

    def commit(self, draft: ShardDraft, content: ShardParts) -> PublishedVersion:
        """Make it a version, and offer it. It is one if and only if this returns, or its manifest is found."""

    def abandon(self, draft: ShardDraft) -> None:
        """Remove what was written."""

    def close(self) -> None:
        """Let others publish the model."""


def on_a_thread(act: Callable[[], None]) -> None:
    """Let something that takes its time not hold up the coordinator."""
    threading.Thread(target=act, name="publish", daemon=True).start()


@dataclass(frozen=True)
class PublishHooks:
    """The world around it."""

    clock: Callable[[], float]
    """Monotonic."""
    say: Callable[[str], None]
    """To people, a line."""
    note: Callable[[str], None]
    """The same, also to whoever started the training."""
    check_term: Callable[[], None]
    """Raises if this coordinator may not decide anything any more."""
    run: Callable[[Callable[[], None]], None] = on_a_thread


class _Task:
    """Something that is done beside the coordinator; it is looked at until it is over."""

    def __init__(self, act: Callable[[], Any], run: Callable[[Callable[[], None]], None]) -> None:
        self.result: Any = None
        self.error: str | None = None
        self.is_lost = False
        """What a delta would be of is gone."""
        self.is_over = False
        self._act = act
        run(self._do)

    def _do(self) -> None:
        try:
            self.result = self._act()
        except (ElasticRecError, OSError) as error:
            self.error = str(error)
            self.is_lost = isinstance(error, LostParentError)
        except Exception as error:
            # our own bug must not end the training
            self.error = f"{type(error).__name__}: {error}"
        self.is_over = True


@dataclass
class _Open:
    """A publish that is under way."""

    number: int
    name: str
    owners: dict[int, ShardOwner]
    parent: PublishedVersion | None
    facts: dict[str, Any]
    since: float
    draft: ShardDraft | None = None
    """None until the repository has a place for it."""
    parts: dict[int, PublishPart] = field(default_factory=dict)

    @property
    def is_cut(self) -> bool:
        """Whether all shards have written their part."""
        return self.parts.keys() == self.owners.keys()

    @property
    def kind(self) -> str:
        """In words."""
        return "base" if self.parent is None else "delta"


@dataclass
class Figures:
    """What became of publishes, of this coordinator."""

    committed: int = 0
    failed: int = 0
    seconds: float = 0.0
    """From the beginning to the commit of all that were committed."""
    last_s: float | None = None
    kind: str | None = None
    """Of the last version, as are those that follow."""
    rows: int | None = None
    changed: int | None = None
    removed: int | None = None
    whole: int | None = None
    num_bytes: int | None = None
    error: str | None = None
    """Why the last one failed, unless one was committed since."""


class Publishing:
    """Publishes, one at a time. One that is due while another is under way comes behind it, and no more than one."""

    def __init__(self, settings: PublishSettings, target: Target, term: int, hooks: PublishHooks) -> None:
        self.settings = settings
        self.figures = Figures()
        self.last: PublishedVersion | None = None
        """The newest version of this run."""
        self._target, self._term, self._hooks = target, term, hooks
        self._number = 0
        self._open: _Open | None = None
        self._is_known = False
        # What is done beside the coordinator, and who takes what it came to.
        self._task: tuple[_Task, Callable[[_Task], None]] | None = None
        self._wanted = False
        self._due = hooks.clock() + (settings.every_s or 0.0)
        self._not_before = hooks.clock()
        self._cut = self._done = 0
        self._num_failures = 0
        self._committed_at: float | None = None
        self._last_told = ""
        self._last_facts: Mapping[str, Any] = {}

    def want(self) -> int:
        """Ask for a publish that begins from now on; the number tells which one answers it."""
        self._wanted = True
        self._num_failures = 0
        return self._number + 1

    def is_cut(self, ticket: int) -> bool:
        """Whether all shards have written their parts of such a publish, or it was given up."""
        return self._cut >= ticket

    def is_done(self, ticket: int) -> bool:
        """Whether such a publish is a version, or was given up."""
        return self._done >= ticket

    @property
    def is_writing(self) -> bool:
        """Whether shards have to write, or to say that they have."""
        return self._open is not None and not self._open.is_cut

    @property
    def age_s(self) -> float | None:
        """Seconds since the last commit of this coordinator."""
        return None if self._committed_at is None else self._hooks.clock() - self._committed_at

    @property
    def next_s(self) -> float | None:
        """Seconds until the next one is due; None if nobody knows."""
        if self._wanted or self.settings.every_s is not None:
            due = self._not_before if self._wanted else max(self._due, self._not_before)
            return max(due - self._hooks.clock(), 0.0)
        return None

    def is_due(self, learned: Any = None) -> bool:
        """Whether one is to be begun as soon as it can be; not if the last one has all that was `learned`."""
        is_news = self._wanted or learned is None or learned != self._last_facts.get("learned")
        return is_news and self._open is None and self.next_s == 0.0

    def describe(self) -> dict[str, Any]:
        """For the status."""
        last, found = self.last, self._open
        return {
            "version": None if last is None else last.number,
            "deltas": None if last is None else last.num_deltas,
            "offer": None if last is None else last.offer,
            "age_s": self.age_s,
            "next_s": self.next_s,
            "writing": None
            if found is None
            else {"publish": found.name, "kind": found.kind, "parts": len(found.parts)},
            **vars(self.figures),
        }

    def close(self) -> None:
        """Let others publish the model."""
        self._target.close()

    def tick(
        self, owners: Mapping[int, ShardOwner] | None, facts: Callable[[], dict[str, Any]], *, may_begin: bool
    ) -> None:
        """Go on with what is under way, begin what is due. `owners` are all shards, None unless all serve."""
        self._look_at_task()
        found = self._open
        if found is not None and not found.is_cut:
            if owners is None or dict(owners) != found.owners:
                is_moved = owners is not None and owners.keys() != found.owners.keys()
                self._fail("the partitions moved meanwhile" if is_moved else "a shard died meanwhile", at_once=True)
            elif self._hooks.clock() - found.since >= self.settings.timeout_s:
                self._fail(f"not written in {self.settings.timeout_s:g} s")
        if self._task is not None or self._open is not None:
            return
        if not self._is_known:
            if self._hooks.clock() >= self._not_before:
                self._do(self._target.last, self._know)
        elif owners is not None and may_begin and self.next_s == 0.0:
            found_facts = facts()
            if self.is_due(found_facts.get("learned")):
                self._begin(dict(owners), found_facts)

    def _do(self, act: Callable[[], Any], then: Callable[[_Task], None]) -> None:
        assert self._task is None, "one after the other"
        self._task = (_Task(act, self._hooks.run), then)
        self._look_at_task()

    def _look_at_task(self) -> None:
        if self._task is not None and self._task[0].is_over:
            task, then = self._task
            self._task = None
            then(task)

    def _know(self, task: _Task) -> None:
        """What earlier coordinators of this run have published."""
        if task.error is not None:
            self._tell(f"publish: the repository cannot be used: {task.error}")
            self.figures.error = task.error
            self._not_before = self._hooks.clock() + self.settings.retry_s
            self._number += 1
            self._count_failure(self._number)
            return
        self.last, self._is_known = task.result, True

    def _begin(self, owners: dict[int, ShardOwner], facts: dict[str, Any]) -> None:
        now, last = self._hooks.clock(), self.last
        self._number += 1
        self._wanted = False
        if self.settings.every_s is not None:
            self._due = now + self.settings.every_s
        is_base = last is None or last.num_deltas >= self.settings.base_every
        parent = None if is_base else last
        name = f"{self._term:08d}-{self._number:06d}"
        self._open = _Open(self._number, name, owners, parent, facts, now)
        self._do(lambda: self._target.begin(parent), self._take_draft)

    def _take_draft(self, task: _Task) -> None:
        found = self._open
        if found is None:
            # it was given up meanwhile
            if isinstance(task.result, ShardDraft):
                self._abandon(task.result)
        elif task.error is None:
            found.draft = task.result
        else:
            if task.is_lost:
                # the next one is a base
                self.last = None
            self._fail(task.error, at_once=task.is_lost)

    def command(self, index: int, incarnation: int) -> dict[str, Any] | None:
        """What a shard is to write now, until it says that it has."""
        found = self._open
        if found is None or found.draft is None or index in found.parts or index not in found.owners:
            return None
        if found.owners[index].incarnation != incarnation:
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
            "store": found.draft.store,
        }

    def report(self, index: int, part: PublishPart) -> None:
        """Hear of a shard's part; the last one completes the publish.

        Parts of other publishes, and so of other terms, and of other incarnations are none of this one.
        """
        found = self._open
        if found is None or part.publish != found.name or index in found.parts or index not in found.owners:
            return
        if part.incarnation != found.owners[index].incarnation:
            return
        if part.state == "failed":
            self._fail(f"shard {index}: {part.error or 'no reason given'}")
        elif part.state == "written":
            if part.cube is None or part.dense is None:
                self._fail(f"shard {index}: says that it has written, but not what")
                return
            found.parts[index] = part
            if found.is_cut:
                self._cut = found.number
                self._commit(found)

    def _commit(self, found: _Open) -> None:
        owned = {index: owner.partitions for index, owner in found.owners.items()}
        draft, content = found.draft, ShardParts(found.name, found.parent, dict(found.parts), owned, found.facts)
        assert draft is not None, "shards write into a draft"

        def commit() -> PublishedVersion:
            self._hooks.check_term()
            return self._target.commit(draft, content)

        self._do(commit, self._finish)

    def _finish(self, task: _Task) -> None:
        found = self._open
        assert found is not None, "a publish is not given up while it is committed"
        if task.error is not None:
            # it may be a version all the same: the repository is asked before the next one
            self._is_known = False
            self._fail(task.error)
            return
        self._open = None
        self._done = found.number
        self._num_failures = 0
        self._last_told, self._last_facts = "", found.facts
        was_refused = self.last is not None and self.last.is_refused
        self.last = task.result
        now = self._hooks.clock()
        self._committed_at = now
        self._count(found, now - found.since)
        self._hooks.say(self._describe_last(found))
        if self.last.is_refused and not was_refused:
            self._hooks.note(f"version {self.last.number} is {self.last.offer}; what is served stays until one may be")

    def _count(self, found: _Open, seconds: float) -> None:
        figures, parts = self.figures, found.parts.values()
        figures.committed += 1
        figures.seconds += seconds
        figures.last_s, figures.kind, figures.error = seconds, found.kind, None
        figures.rows = sum(part.rows for part in parts)
        figures.changed = sum(part.changed for part in parts)
        figures.removed = sum(part.removed for part in parts)
        figures.whole = sum(part.whole for part in parts)
        figures.num_bytes = sum(part.cube.bytes for part in parts if part.cube is not None)

    def _describe_last(self, found: _Open) -> str:
        figures, last = self.figures, self.last
        assert last is not None
        rows = f"{figures.rows:,} rows"
        if found.parent is not None:
            whole = f", {figures.whole} partitions whole" if figures.whole else ""
            rows = f"{figures.changed:,} rows changed, {figures.removed:,} removed{whole}, of {figures.rows:,}"
        offer = f"; {last.offer}" if last.offer else ""
        return f"published version {last.number}, a {found.kind}: {rows}, in {figures.last_s:.1f} s{offer}"

    def _tell(self, text: str) -> None:
        """Tell people, but not the same over and over."""
        if text != self._last_told:
            self._last_told = text
            self._hooks.note(text)

    def _fail(self, why: str, *, at_once: bool = False) -> None:
        """Give a publish up; the versions before are as they were, and the next one carries what this one had."""
        found = self._open
        assert found is not None
        self._open = None
        self.figures.failed += 1
        self.figures.error = why
        self._wanted = True
        now = self._hooks.clock()
        self._not_before = now if at_once else now + self.settings.retry_s
        self._tell(f"publish failed: {why}; the next one carries what it had")
        if not at_once:
            self._count_failure(found.number)
        if found.draft is not None:
            self._abandon(found.draft)

    def _count_failure(self, number: int) -> None:
        """Nobody waits for a disk that stays full, or for a store that does not answer: it comes with a later one."""
        self._num_failures += 1
        if self._num_failures < _MAX_FAILURES:
            return
        self._num_failures = 0
        self._wanted = False
        self._cut = self._done = number
        if self.settings.every_s is not None:
            self._due = self._hooks.clock() + max(self.settings.every_s, self.settings.retry_s)

    def _abandon(self, draft: ShardDraft) -> None:
        self._do(lambda: self._target.abandon(draft), self._ignore)

    def _ignore(self, task: _Task) -> None:
        if task.error is not None:
            self._hooks.say(f"publish: what was written of one could not be removed: {task.error}")
