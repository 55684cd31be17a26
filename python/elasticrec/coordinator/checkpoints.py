"""Checkpoints of a run with shards: every shard writes its part by itself, a manifest written last makes them one.

runs/<name>/checkpoints/ps-00000003-000012/    term and number: no name is ever used twice
    shard-00000.rows  shard-00000.dense        written by shard 0
    manifest.json                              lists every partition exactly once
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from elasticrec.errors import ModelError
from elasticrec.fail_points import fail_point
from elasticrec.journal import Entry
from elasticrec.manifest import MANIFEST, FileEntry, read_manifest, verify_files, write_manifest
from elasticrec.net.messages import ShardOwner, Snapshot, WrittenFile

_KIND = "ps checkpoint"
_PREFIX = "ps-"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSettings:
    """When checkpoints are taken and how many stay."""

    every_s: float = 600.0
    keep: int = 3
    timeout_s: float = 600.0
    """A checkpoint that takes longer is given up."""
    retry_s: float = 5.0
    """Before the next one, after one that failed."""
    mixed: bool = True
    """Whether parts of different times make a checkpoint: not where all shards go back together."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a sound manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def name(self) -> str:
        """Its directory."""
        return self.path.name

    def parts(self, owned: range) -> list[dict[str, str]]:
        """The files that have some of these partitions."""
        return [
            {"rows": str(self.path / part["rows"]), "dense": str(self.path / part["dense"])}
            for part in self.manifest["parts"]
            if part["partitions"][0] < owned.stop and owned.start < part["partitions"][1]
        ]


@dataclass
class _Open:
    """A checkpoint that is being written."""

    number: int
    path: Path
    owners: dict[int, ShardOwner]
    since: float
    parts: dict[int, tuple[WrittenFile, WrittenFile]] = field(default_factory=dict)


def open_checkpoint(path: Path, num_partitions: int) -> Checkpoint:
    """A checkpoint whose manifest is sound and complete; its files are not read."""
    manifest = read_manifest(path, _KIND)
    if manifest["num_partitions"] != num_partitions:
        got = manifest["num_partitions"]
        raise ModelError(f"{path}: of another table: expected {num_partitions} partitions, got {got}")
    _check_cover(path, [range(*part["partitions"]) for part in manifest["parts"]], num_partitions)
    return Checkpoint(path, manifest)


def last_term(directory: Path) -> int:
    """The highest term in the names of checkpoints: one of a lower term would count as older than they are."""
    terms = (path.name.removeprefix(_PREFIX).partition("-")[0] for path in directory.glob(f"{_PREFIX}*"))
    return max((int(term) for term in terms if term.isdecimal()), default=0)


def _check_cover(path: Path, ranges: list[range], num_partitions: int) -> None:
    listed = sorted(partition for one in ranges for partition in one)
    if listed != list(range(num_partitions)):
        raise ModelError(f"{path}: expected each of {num_partitions} partitions once, got {len(listed)} entries")


@dataclass(frozen=True)
class Hooks:
    """The world around the coordinator's parts."""

    clock: Callable[[], float]
    """Monotonic."""
    write: Callable[[Entry], None]
    """To the journal."""
    note: Callable[[str], None]
    """The same, also to whoever started the training."""


class Checkpoints:
    """Takes checkpoints, one at a time, and knows the newest one that is whole."""

    def __init__(
        self, directory: Path, settings: CheckpointSettings, num_partitions: int, term: int, hooks: Hooks
    ) -> None:
        self.directory = directory
        self.settings = settings
        self._num_partitions = num_partitions
        self._term = term
        self._hooks = hooks
        self._number = 0
        self._open: _Open | None = None
        self._wanted = False
        self._due = hooks.clock() + settings.every_s
        # After a failure, until when the next one waits.
        self._not_before = hooks.clock()
        self._committed_at: float | None = None
        self.last_ticket = 0
        """Of `want`: all up to this one are answered."""
        self._damaged: set[str] = set()
        self.newest: Checkpoint | None = None
        self.num_committed = 0
        self.num_failed = 0
        self.failures_in_a_row = 0
        """Not counting those in which a shard died."""
        self.seconds = 0.0
        """From the beginning to the commit of all that were committed."""
        self.last_s: float | None = None

    def start(self, last: str | None) -> None:
        """Find the newest whole checkpoint; `last` is the one that was committed last."""
        self.directory.mkdir(parents=True, exist_ok=True)
        is_missing = last is not None and not (self.directory / last / MANIFEST).exists()
        problems = [f"{self.directory / last}: was committed but is missing"] if last and is_missing else []
        self.newest = self._find_newest(problems)

    def _paths(self) -> list[Path]:
        return sorted(self.directory.glob(f"{_PREFIX}*"))

    def _find_newest(self, problems: list[str]) -> Checkpoint | None:
        """The newest one whose files are all as the manifest says; the others are passed over, and named.

        `problems` are those of newer ones.
        """
        found = self._newest_whole(problems)
        if found is None:
            instead = "there is no whole checkpoint before it, the run starts from its beginning"
        else:
            instead = "the checkpoint before it is used"
        for problem in problems:
            self._hooks.note(f"{problem}; {instead}")
        return found

    def _newest_whole(self, problems: list[str]) -> Checkpoint | None:
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

    def pass_over(self, name: str, why: str) -> None:
        """A shard could not load a checkpoint: it is used no more if it is damaged, else the shard has to say more."""
        if self.newest is None or self.newest.name != name:
            return
        try:
            verify_files(self.newest.path, self.newest.manifest)
        except (ModelError, OSError) as error:
            self._damaged.add(name)
            self.newest = self._find_newest([str(error)])
            return
        raise ModelError(f"{self.newest.path}: could not be loaded, although its files are whole: {why}")

    def want(self) -> int:
        """Ask for a checkpoint that begins from now on; `is_committed` tells of it by the number that this returns."""
        self._wanted = True
        return self._number + 1

    def is_committed(self, ticket: int) -> bool:
        """Whether a checkpoint is there that began after `want` gave the ticket."""
        return self.last_ticket >= ticket

    @property
    def age_s(self) -> float | None:
        """Seconds since the last commit of this coordinator."""
        return None if self._committed_at is None else self._hooks.clock() - self._committed_at

    @property
    def writing(self) -> str | None:
        """The checkpoint that is being written."""
        return None if self._open is None else self._open.path.name

    def is_due(self) -> bool:
        """Whether one is to be begun as soon as it can be."""
        now = self._hooks.clock()
        return now >= self._not_before and (self._wanted or now >= self._due)

    def tick(
        self,
        owners: Mapping[int, ShardOwner] | None,
        body: Callable[[], dict[str, Any]] | None = None,
        *,
        may_begin: bool = True,
    ) -> None:
        """Give up what cannot be completed, begin what is due. `owners` are all shards, None unless all serve."""
        now = self._hooks.clock()
        if self._open is not None:
            if owners is None or dict(owners) != self._open.owners:
                is_moved = owners is not None and owners.keys() != self._open.owners.keys()
                why = "the partitions moved meanwhile" if is_moved else "a shard died meanwhile"
                self._lose_shard(self._open, body, why)
            elif now - self._open.since >= self.settings.timeout_s:
                self._fail(f"not written in {self.settings.timeout_s:g} s")
        if self._open is None and owners is not None and may_begin and self.is_due():
            self._begin(dict(owners), now)

    def _begin(self, owners: dict[int, ShardOwner], now: float) -> None:
        path = self.directory / f"{_PREFIX}{self._term:08d}-{self._number + 1:06d}"
        self._number += 1
        self._wanted = False
        self._open = _Open(self._number, path, owners, now)
        try:
            path.mkdir()
        except OSError as error:
            self._fail(str(error))

    def command(self, index: int, incarnation: int) -> dict[str, Any] | None:
        """What a shard is to write now, until it says that it has."""
        found = self._open
        if found is None or index in found.parts or found.owners[index].incarnation != incarnation:
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
        """Hear of a shard's part; the last one completes the checkpoint, with `body` in its manifest.

        Parts of other checkpoints, and so of other terms, and of other incarnations are none of this one.
        """
        found = self._open
        if found is None or snapshot.checkpoint != found.path.name or index in found.parts:
            return
        if index not in found.owners or snapshot.incarnation != found.owners[index].incarnation:
            return
        if snapshot.state == "failed":
            self._fail(f"shard {index}: {snapshot.error or 'no reason given'}")
        elif snapshot.state == "written":
            if snapshot.rows is None or snapshot.dense is None:
                self._fail(f"shard {index}: says that it has written, but not what")
                return
            found.parts[index] = (snapshot.rows, snapshot.dense)
            if found.parts.keys() == found.owners.keys():
                self._commit(found, body)

    def _lose_shard(self, found: _Open, body: Callable[[], dict[str, Any]] | None, why: str) -> None:
        """A shard died before its part was there: the parts of the others are kept, beside its part of before.

        Every partition has a record of its own, so that parts of different times make a checkpoint as well.
        """
        before = self.newest
        old = {} if before is None else {tuple(part["partitions"]): part for part in before.manifest["parts"]}
        missing = [index for index in found.owners if index not in found.parts]
        bounds = {index: (owner.partitions.start, owner.partitions.stop) for index, owner in found.owners.items()}
        has_parts = found.parts and all(bounds[index] in old for index in missing)
        if before is None or body is None or not has_parts or not self.settings.mixed:
            self._fail(why, retry_s=0.0)
            return
        try:
            for index in missing:
                found.parts[index] = _link(before, old[bounds[index]], found.path, self._names(index))
        except OSError as error:
            self._fail(str(error))
            return
        names = ", ".join(str(index) for index in missing)
        logger.warning(f"checkpoint {found.path.name}: shard {names} died meanwhile, its part is that of {before.name}")
        self._commit(found, body, is_whole=False)
        self._wanted = True

    def _commit(self, found: _Open, body: Callable[[], dict[str, Any]], *, is_whole: bool = True) -> None:
        try:
            self._write_manifest(found, body())
        except (OSError, ModelError) as error:
            self._fail(str(error))
            return
        # from here on it is a checkpoint, whatever happens to the journal
        self._open = None
        self._damaged.discard(found.path.name)
        self.newest = open_checkpoint(found.path, self._num_partitions)
        if is_whole:
            # one with a part of before does not answer who asked for one from now on
            self.last_ticket = found.number
        self._committed_at = self._hooks.clock()
        self.last_s = self._committed_at - found.since
        self.seconds += self.last_s
        self.failures_in_a_row = 0
        self._due = self._committed_at + self.settings.every_s
        self.num_committed += 1
        # a disk that is nearly full needs the room first
        self._drop_old()
        self._hooks.write({"kind": "checkpoint", "name": found.path.name})

    def _write_manifest(self, found: _Open, body: dict[str, Any]) -> None:
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
        _check_cover(found.path, [owner.partitions for owner in found.owners.values()], self._num_partitions)
        document = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "term": self._term,
            "num_partitions": self._num_partitions,
            "parts": parts,
            **body,
        }
        fail_point("manifest")
        write_manifest(found.path, _KIND, document, files)
        fail_point("manifest-written")

    def _fail(self, why: str, *, retry_s: float | None = None) -> None:
        """Give a checkpoint up; those before are as they were."""
        assert self._open is not None
        path = self._open.path
        self._open = None
        self.num_failed += 1
        # one that is tried again at once failed with a shard
        self.failures_in_a_row += retry_s is None
        self._wanted = True
        self._not_before = self._hooks.clock() + (self.settings.retry_s if retry_s is None else retry_s)
        logger.warning(f"checkpoint {path.name} failed: {why}")
        _remove(path)

    def _drop_old(self) -> None:
        """Remove all before the last k whole ones, and what was never completed."""
        paths = self._paths()
        whole = [path for path in paths if (path / MANIFEST).exists() and path.name not in self._damaged]
        oldest = whole[-self.settings.keep :][0]
        for path in paths:
            if path < oldest or not (path / MANIFEST).exists():
                _remove(path)


def _link(
    checkpoint: Checkpoint, part: dict[str, Any], path: Path, names: tuple[str, str]
) -> tuple[WrittenFile, WrittenFile]:
    """Give the files of a part of another checkpoint names in this one; what a dead shard left there is replaced."""
    written = []
    for kind, name in zip(("rows", "dense"), names, strict=True):
        (path / name).unlink(missing_ok=True)
        os.link(checkpoint.path / part[kind], path / name)
        entry = checkpoint.manifest["files"][part[kind]]
        written.append(WrittenFile(bytes=entry["bytes"], sha256=entry["sha256"]))
    return written[0], written[1]


def _remove(path: Path) -> None:
    """Without its manifest the rest of a directory is nothing; a shard may still be writing into it."""
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
