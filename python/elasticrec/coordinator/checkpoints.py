"""Takes checkpoints of a run with shards: every shard writes its part, and the manifest commits them together."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elasticrec.coordinator.checkpoint import (
    KIND,
    PREFIX,
    Checkpoint,
    check_cover,
    link_part,
    open_checkpoint,
    remove_checkpoint,
)
from elasticrec.errors import ModelError
from elasticrec.fail_points import fail_point
from elasticrec.journal import Entry
from elasticrec.manifest import MANIFEST, FileEntry, verify_files, write_manifest
from elasticrec.net.messages import CheckpointStatus, Snapshot, SnapshotCommand, WrittenFile
from elasticrec.net.placement import ShardOwner, is_outstanding

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSettings:
    """When checkpoints are taken, and how many are kept."""

    every_s: float = 600.0
    keep: int = 3
    timeout_s: float = 600.0
    """Time limit for one checkpoint."""
    retry_s: float = 5.0
    """Time from a failed checkpoint to the next attempt."""
    may_mix: bool = True
    """Whether a checkpoint may combine parts of different times; False if all shards are restored together."""


@dataclass
class _OpenCheckpoint:
    """A checkpoint that is being written."""

    number: int
    path: Path
    owners: dict[int, ShardOwner]
    since: float
    parts: dict[int, tuple[WrittenFile, WrittenFile]] = field(default_factory=dict)


@dataclass(frozen=True)
class Hooks:
    """Functions of the coordinator that its components call."""

    clock: Callable[[], float]
    """Returns the monotonic time."""
    write: Callable[[Entry], None]
    """Appends to the journal."""
    note: Callable[[str], None]
    """Logs a line, and shows it to the user who started the training."""


class Checkpoints:
    """Takes checkpoints, one at a time, and knows the newest valid one."""

    def __init__(
        self, directory: Path, settings: CheckpointSettings, num_partitions: int, term: int, hooks: Hooks
    ) -> None:
        self.directory = directory
        self.settings = settings
        self._num_partitions = num_partitions
        self._term = term
        self._hooks = hooks
        self._number = 0
        self._open: _OpenCheckpoint | None = None
        self._is_wanted = False
        self._due = hooks.clock() + settings.every_s
        # The earliest time of the next attempt after a failure.
        self._not_before = hooks.clock()
        self._committed_at: float | None = None
        self.last_ticket = 0
        """The last ticket of `request` whose checkpoint is committed."""
        self._damaged: set[str] = set()
        self.newest: Checkpoint | None = None
        self.num_committed = 0
        self.num_failed = 0
        self.failures_in_a_row = 0
        """Consecutive failures, without those that were caused by the death of a shard."""
        self.seconds = 0.0
        """Time of all committed checkpoints from start to commit."""
        self.last_s: float | None = None

    def start(self, last: str | None) -> None:
        """Find the newest valid checkpoint; `last` is the name of the last one in the journal."""
        self.directory.mkdir(parents=True, exist_ok=True)
        is_missing = last is not None and not (self.directory / last / MANIFEST).exists()
        problems = [f"{self.directory / last}: committed checkpoint is missing"] if last and is_missing else []
        self.newest = self._find_newest(problems)

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob(f"{PREFIX}*"))

    def _find_newest(self, problems: list[str]) -> Checkpoint | None:
        """Return the newest checkpoint whose files match its manifest; report damaged ones.

        `problems` already lists the problems of newer checkpoints.
        """
        found = self._newest_valid(problems)
        if found is None:
            instead = "there is no earlier valid checkpoint: the run starts from the beginning"
        else:
            instead = f"using {found.name} instead"
        for problem in problems:
            self._hooks.note(f"{problem}; {instead}")
        return found

    def _newest_valid(self, problems: list[str]) -> Checkpoint | None:
        for path in reversed(self._paths()):
            if path.name in self._damaged or not (path / MANIFEST).exists():
                continue
            try:
                found = open_checkpoint(path, self._num_partitions)
                verify_files(path, found.manifest)
                return found
            except (ModelError, OSError) as error:
                self._damaged.add(path.name)
                problems.append(str(error))
        return None

    def report_unloadable(self, name: str, why: str) -> None:
        """Verify a checkpoint that a shard could not load: drop it if it is damaged, else raise the shard's reason."""
        if self.newest is None or self.newest.name != name:
            return
        try:
            verify_files(self.newest.path, self.newest.manifest)
        except (ModelError, OSError) as error:
            self._damaged.add(name)
            self.newest = self._find_newest([str(error)])
            return
        raise ModelError(f"{self.newest.path}: could not be loaded, although its files are intact: {why}")

    def request(self) -> int:
        """Request a checkpoint that begins from now on; return the ticket for `is_committed`."""
        self._is_wanted = True
        return self._number + 1

    def is_committed(self, ticket: int) -> bool:
        """Whether a checkpoint is committed that began after `request` returned the ticket."""
        return self.last_ticket >= ticket

    @property
    def age_s(self) -> float | None:
        """Time since this coordinator's last checkpoint."""
        return None if self._committed_at is None else self._hooks.clock() - self._committed_at

    @property
    def writing(self) -> str | None:
        """The name of the checkpoint that is being written."""
        return None if self._open is None else self._open.path.name

    def describe(self) -> CheckpointStatus:
        """Return the checkpoints' part of the status."""
        return {
            "newest": None if self.newest is None else self.newest.name,
            "age_s": self.age_s,
            "writing": self.writing,
            "ticket": self.last_ticket,
            "committed": self.num_committed,
            "failed": self.num_failed,
            "seconds": self.seconds,
            "last_s": self.last_s,
        }

    def is_due(self) -> bool:
        """Whether a checkpoint should begin as soon as possible."""
        now = self._hooks.clock()
        return now >= self._not_before and (self._is_wanted or now >= self._due)

    def tick(
        self,
        owners: Mapping[int, ShardOwner] | None,
        body: Callable[[], dict[str, Any]] | None = None,
        *,
        may_begin: bool = True,
    ) -> None:
        """Give up a checkpoint that cannot be completed; begin one that is due.

        `owners` are the owners of all shards, None unless all shards serve.
        """
        now = self._hooks.clock()
        if self._open is not None:
            if owners is None or dict(owners) != self._open.owners:
                is_moved = owners is not None and owners.keys() != self._open.owners.keys()
                why = "the partitions moved" if is_moved else "a shard died"
                self._lose_shard(self._open, body, why)
            elif now - self._open.since >= self.settings.timeout_s:
                self._fail(f"not written within {self.settings.timeout_s:g} s")
        if self._open is None and owners is not None and may_begin and self.is_due():
            self._begin(dict(owners), now)

    def _begin(self, owners: dict[int, ShardOwner], now: float) -> None:
        path = self.directory / f"{PREFIX}{self._term:08d}-{self._number + 1:06d}"
        self._number += 1
        self._is_wanted = False
        self._open = _OpenCheckpoint(self._number, path, owners, now)
        try:
            path.mkdir()
        except OSError as error:
            self._fail(str(error))

    def command(self, index: int, incarnation: int) -> SnapshotCommand | None:
        """Return the command for a shard that has not reported its part yet."""
        found = self._open
        if found is None or not is_outstanding(found.owners, found.parts, index, incarnation):
            return None
        rows, dense = self._names(index)
        return {
            "command": "snapshot",
            "checkpoint": found.path.name,
            "rows": str((found.path / rows).absolute()),
            "dense": str((found.path / dense).absolute()),
        }

    @staticmethod
    def _names(index: int) -> tuple[str, str]:
        return f"shard-{index:05d}.rows", f"shard-{index:05d}.dense"

    def report(self, index: int, snapshot: Snapshot, body: Callable[[], dict[str, Any]]) -> None:
        """Handle a shard's report on its part; the last part completes the checkpoint, with `body` in its manifest.

        Reports on other checkpoints and from other incarnations are ignored.
        """
        found = self._open
        if found is None or snapshot.checkpoint != found.path.name:
            return
        if not is_outstanding(found.owners, found.parts, index, snapshot.incarnation):
            return
        if snapshot.state == "failed":
            self._fail(f"shard {index}: {snapshot.error or 'no reason given'}")
        elif snapshot.state == "written":
            if snapshot.rows is None or snapshot.dense is None:
                self._fail(f"shard {index}: expected the files of its part in the report, got none")
                return
            found.parts[index] = (snapshot.rows, snapshot.dense)
            if found.parts.keys() == found.owners.keys():
                self._commit(found, body)

    def _lose_shard(self, found: _OpenCheckpoint, body: Callable[[], dict[str, Any]] | None, why: str) -> None:
        """Complete the checkpoint with the previous parts of shards that died before they wrote a new part.

        Every partition has its own record, so a checkpoint may combine parts of different times.
        """
        before = self.newest
        old = {} if before is None else {tuple(part["partitions"]): part for part in before.manifest["parts"]}
        missing = [index for index in found.owners if index not in found.parts]
        bounds = {index: (owner.partitions.start, owner.partitions.stop) for index, owner in found.owners.items()}
        has_parts = found.parts and all(bounds[index] in old for index in missing)
        if before is None or body is None or not has_parts or not self.settings.may_mix:
            self._fail(why, retry_s=0.0)
            return
        try:
            for index in missing:
                found.parts[index] = link_part(before, old[bounds[index]], found.path, self._names(index))
        except OSError as error:
            self._fail(str(error))
            return
        names = ", ".join(str(index) for index in missing)
        logger.warning("checkpoint %s: shard %s died, using its part of %s", found.path.name, names, before.name)
        self._commit(found, body, is_whole=False)
        self._is_wanted = True

    def _commit(self, found: _OpenCheckpoint, body: Callable[[], dict[str, Any]], *, is_whole: bool = True) -> None:
        try:
            self._write_manifest(found, body())
        except (OSError, ModelError) as error:
            self._fail(str(error))
            return
        # The manifest commits the checkpoint, even if the journal cannot be written.
        self._open = None
        self._damaged.discard(found.path.name)
        self.newest = open_checkpoint(found.path, self._num_partitions)
        if is_whole:
            # A checkpoint with an older part does not satisfy a request for a new one.
            self.last_ticket = found.number
        self._committed_at = self._hooks.clock()
        self.last_s = self._committed_at - found.since
        self.seconds += self.last_s
        self.failures_in_a_row = 0
        self._due = self._committed_at + self.settings.every_s
        self.num_committed += 1
        # Free the disk before the journal grows.
        self._drop_old()
        self._hooks.write({"kind": "checkpoint", "name": found.path.name})

    def _write_manifest(self, found: _OpenCheckpoint, body: dict[str, Any]) -> None:
        files, parts = {}, []
        for index, owner in sorted(found.owners.items()):
            rows, dense = self._names(index)
            for name, file in zip((rows, dense), found.parts[index], strict=True):
                size = (found.path / name).stat().st_size
                if size != file.bytes:
                    raise ModelError(f"{found.path / name}: expected {file.bytes} bytes, got {size}")
                files[name] = FileEntry(file.bytes, file.sha256)
            bounds = [owner.partitions.start, owner.partitions.stop]
            parts.append(
                {"shard": index, "incarnation": owner.incarnation, "partitions": bounds, "rows": rows, "dense": dense}
            )
        check_cover(found.path, [owner.partitions for owner in found.owners.values()], self._num_partitions)
        document = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "term": self._term,
            "num_partitions": self._num_partitions,
            "parts": parts,
            **body,
        }
        fail_point("manifest")
        write_manifest(found.path, KIND, document, files)
        fail_point("manifest-written")

    def _fail(self, why: str, *, retry_s: float | None = None) -> None:
        """Give up the open checkpoint; earlier ones are unchanged."""
        assert self._open is not None
        path = self._open.path
        self._open = None
        self.num_failed += 1
        # A checkpoint that is retried at once failed because a shard died.
        self.failures_in_a_row += retry_s is None
        self._is_wanted = True
        self._not_before = self._hooks.clock() + (self.settings.retry_s if retry_s is None else retry_s)
        logger.warning("checkpoint %s failed: %s", path.name, why)
        remove_checkpoint(path)

    def _drop_old(self) -> None:
        """Remove all checkpoints before the last `keep` valid ones, and incomplete checkpoints."""
        paths = self._paths()
        valid = [path for path in paths if (path / MANIFEST).exists() and path.name not in self._damaged]
        oldest = valid[-self.settings.keep :][0]
        for path in paths:
            if path < oldest or not (path / MANIFEST).exists():
                remove_checkpoint(path)
