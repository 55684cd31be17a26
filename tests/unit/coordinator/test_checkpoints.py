"""Checkpoints of shards: complete or absent, every partition once, and the previous one if one is damaged."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticrec.coordinator.checkpoints import Checkpoints, CheckpointSettings, Hooks
from elasticrec.errors import ModelError
from elasticrec.manifest import verify_files
from elasticrec.net.messages import Snapshot, WrittenFile
from elasticrec.net.placement import ShardOwner
from support.fake_roles import Clock

OWNERS = {0: ShardOwner(11, range(0, 3)), 1: ShardOwner(12, range(3, 5))}
SETTINGS = CheckpointSettings(every_s=10.0, keep=2, timeout_s=60.0, retry_s=2.0)


class Setup:
    """A directory of checkpoints of two shards."""

    def __init__(self, directory: Path, term: int = 1, last: str | None = None) -> None:
        self.clock, self.journal = Clock(), list[Any]()
        self.noted: list[str] = []
        hooks = Hooks(self.clock, self.journal.append, self.noted.append)
        self.checkpoints = Checkpoints(directory, SETTINGS, 5, term, hooks)
        self.checkpoints.start(last)
        self.directory = directory

    def begin(self) -> list[dict[str, Any]]:
        """Request a checkpoint, and return the commands for the shards."""
        self.checkpoints.request()
        self.clock.now += SETTINGS.retry_s
        self.checkpoints.tick(OWNERS)
        return [self.command(index) for index in OWNERS]

    def command(self, index: int) -> dict[str, Any]:
        command = self.checkpoints.command(index, OWNERS[index].incarnation)
        assert command is not None
        return command

    def write(self, index: int, command: dict[str, Any], **changes: Any) -> None:
        """Write the part of a shard and report it."""
        files = {}
        for kind in ("rows", "dense"):
            content = f"{kind} {index} {command['checkpoint']}".encode()
            Path(command[kind]).write_bytes(content)
            files[kind] = WrittenFile(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        report = {"checkpoint": command["checkpoint"], "incarnation": OWNERS[index].incarnation, "state": "written"}
        self.checkpoints.report(index, Snapshot.model_validate(report | files | changes), lambda: {"passes": [1]})

    def take(self) -> str:
        """Take a complete checkpoint and return its name."""
        for index, command in enumerate(self.begin()):
            self.write(index, command)
        newest = self.checkpoints.newest
        assert newest is not None
        return newest.name

    def names(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_the_manifest_lists_every_partition_once(setup: Setup) -> None:
    first, second = setup.begin()
    setup.write(0, first)
    assert setup.checkpoints.newest is None and not list(setup.directory.glob("*/manifest.json"))
    assert setup.checkpoints.command(0, 11) is None, "its part is written"
    setup.write(1, second)
    newest = setup.checkpoints.newest
    assert newest is not None and newest.name == "ps-00000001-000001"
    manifest = json.loads((newest.path / "manifest.json").read_text())
    assert [(part["shard"], part["incarnation"], part["partitions"]) for part in manifest["parts"]] == [
        (0, 11, [0, 3]),
        (1, 12, [3, 5]),
    ]
    assert manifest["passes"] == [1] and manifest["term"] == 1 and len(manifest["files"]) == 4
    assert setup.journal == [{"kind": "checkpoint", "name": newest.name}]
    assert [part["rows"] for part in newest.parts(range(2, 3))] == [first["rows"]]
    assert [part["rows"] for part in newest.parts(range(2, 4))] == [first["rows"], second["rows"]]


def test_checkpoints_are_taken_at_an_interval(setup: Setup) -> None:
    setup.clock.now += 9.9
    setup.checkpoints.tick(OWNERS)
    assert setup.checkpoints.writing is None
    setup.clock.now += 0.2
    setup.checkpoints.tick(None)
    assert setup.checkpoints.writing is None, "a shard is down"
    setup.checkpoints.tick(OWNERS)
    for index in OWNERS:
        setup.write(index, setup.command(index))
    setup.clock.now += 9.9
    setup.checkpoints.tick(OWNERS)
    assert setup.checkpoints.writing is None and setup.checkpoints.num_committed == 1
    assert setup.checkpoints.age_s == pytest.approx(9.9)
    setup.clock.now += 0.1
    setup.checkpoints.tick(OWNERS)
    assert setup.checkpoints.writing == "ps-00000001-000002"


def test_a_ticket_is_for_a_checkpoint_that_begins_later(setup: Setup) -> None:
    commands = setup.begin()
    ticket = setup.checkpoints.request()
    for index, command in enumerate(commands):
        setup.write(index, command)
    assert not setup.checkpoints.is_committed(ticket), "that checkpoint had begun before"
    setup.checkpoints.tick(OWNERS)
    for index in OWNERS:
        setup.write(index, setup.command(index))
    assert setup.checkpoints.is_committed(ticket)


@pytest.mark.parametrize(
    "changes",
    [{"incarnation": 99}, {"checkpoint": "ps-00000000-000001"}, {"state": "writing"}],
    ids=["incarnation", "term", "writing"],
)
def test_reports_of_other_checkpoints_are_ignored(setup: Setup, changes: dict[str, Any]) -> None:
    first, second = setup.begin()
    setup.write(0, first)
    setup.write(1, second, **changes)
    assert setup.checkpoints.newest is None and setup.checkpoints.writing is not None
    assert setup.checkpoints.command(1, 99) is None, "another incarnation gets no command"
    setup.write(1, second)
    assert setup.checkpoints.newest is not None


def _die(setup: Setup) -> None:
    setup.checkpoints.tick(None)


def _replace(setup: Setup) -> None:
    setup.checkpoints.tick(OWNERS | {0: ShardOwner(77, range(0, 3))})


def _fail(setup: Setup) -> None:
    setup.write(0, setup.command(0), state="failed", error="no space left on device")


def _hang(setup: Setup) -> None:
    setup.clock.now += 60.1
    setup.checkpoints.tick(OWNERS)


def _report_no_file(setup: Setup) -> None:
    setup.write(0, setup.command(0), rows=None)


@pytest.mark.parametrize("lose", [_die, _replace], ids=lambda f: f.__name__)
def test_a_lost_shard_without_an_older_part_fails_the_checkpoint(
    setup: Setup, lose: Callable[[Setup], None], caplog: pytest.LogCaptureFixture
) -> None:
    before = setup.take()
    setup.begin()
    lose(setup)
    assert before in setup.names() and "ps-00000001-000002" not in setup.names()
    assert setup.checkpoints.num_failed == 1
    assert caplog.messages[-1] == "checkpoint ps-00000001-000002 failed: a shard died"
    setup.checkpoints.tick(OWNERS)
    assert setup.checkpoints.writing is not None, "retried at once, because no disk has failed"


def test_a_move_of_partitions_fails_the_checkpoint(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.begin()
    setup.checkpoints.tick({0: ShardOwner(77, range(0, 6))})
    assert caplog.messages[-1].endswith(" failed: the partitions moved")


def test_with_groups_a_checkpoint_has_no_older_parts(setup: Setup) -> None:
    setup.checkpoints.settings = replace(setup.checkpoints.settings, may_mix=False)
    before = setup.take()
    first, _ = setup.begin()
    setup.write(0, first)
    setup.checkpoints.tick(None, dict)
    newest = setup.checkpoints.newest
    assert newest is not None and newest.name == before and setup.checkpoints.num_failed == 1


def test_parts_that_are_written_stay_when_another_shard_dies(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    """Each partition has its own record, so a checkpoint may consist of parts of different times."""
    before = setup.take()
    ticket = setup.checkpoints.request()
    first, _ = setup.begin()
    Path(first["rows"]).parent.joinpath("shard-00001.rows").write_text("written by the dead shard")
    setup.write(0, first)
    setup.checkpoints.tick(None, dict)
    newest = setup.checkpoints.newest
    assert newest is not None and newest.name == "ps-00000001-000002" and setup.checkpoints.num_failed == 0
    verify_files(newest.path, newest.manifest)
    for kind in ("rows", "dense"):
        old, new = (setup.checkpoints.directory / name / f"shard-00001.{kind}" for name in (before, newest.name))
        assert old.read_bytes() == new.read_bytes()
    assert caplog.messages[-1].endswith(f"shard 1 died, using its part of {before}")
    assert not setup.checkpoints.is_committed(ticket), "a request for a later checkpoint still waits"
    setup.checkpoints.tick(OWNERS)
    assert setup.checkpoints.writing == "ps-00000001-000003"


@pytest.mark.parametrize("fail", [_fail, _hang, _report_no_file], ids=lambda f: f.__name__)
def test_a_failure_leaves_earlier_checkpoints_unchanged(
    setup: Setup, fail: Callable[[Setup], None], caplog: pytest.LogCaptureFixture
) -> None:
    before = setup.take()
    setup.begin()
    fail(setup)
    assert setup.names() == [before] and setup.checkpoints.num_failed == 1
    assert caplog.messages[-1].startswith("checkpoint ps-00000001-000002 failed: ")
    setup.checkpoints.tick(OWNERS)
    assert setup.checkpoints.writing is None, "not retried at once"
    setup.clock.now += 2.0
    setup.checkpoints.tick(OWNERS)
    assert setup.checkpoints.writing == "ps-00000001-000003", "retried before the interval has passed"
    assert setup.take() == "ps-00000001-000003" or setup.checkpoints.writing


def test_a_file_of_another_size_is_refused(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    first, second = setup.begin()
    setup.write(0, first)
    Path(first["dense"]).write_text("abc")
    setup.write(1, second)
    assert setup.checkpoints.newest is None and "bytes, got 3" in caplog.messages[-1]


def test_a_manifest_that_cannot_be_written(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "manifest.json")

    monkeypatch.setattr("elasticrec.coordinator.checkpoints.write_manifest", full)
    for index, command in enumerate(setup.begin()):
        setup.write(index, command)
    assert setup.names() == [] and "No space left" in caplog.messages[-1]


def test_the_last_checkpoints_are_kept(setup: Setup) -> None:
    names = [setup.take() for _ in range(4)]
    (setup.directory / "ps-00000001-000000").mkdir()
    names.append(setup.take())
    (setup.directory / "step-000000000001").mkdir()
    assert setup.names() == [*names[-2:], "step-000000000001"], "other directories are left alone"


def test_a_new_coordinator_uses_the_newest_checkpoint(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.take()
    name = setup.take()
    setup.begin()
    again = Setup(setup.directory, term=2, last=name)
    assert again.checkpoints.newest is not None and again.checkpoints.newest.name == name
    assert caplog.messages == again.noted == []
    # The checkpoint that the previous coordinator had begun does not count, and no name is used twice.
    assert again.take() == "ps-00000002-000001"
    assert again.names() == [name, "ps-00000002-000001"]


def _flip(path: Path) -> None:
    file = path / "shard-00001.rows"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)


def _truncate(path: Path) -> None:
    file = path / "shard-00000.dense"
    file.write_bytes(file.read_bytes()[:-1])


def _lose(path: Path) -> None:
    (path / "shard-00000.rows").unlink()


def _spoil_manifest(path: Path) -> None:
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace('"shard": 1', '"shard": 2'))


@pytest.mark.parametrize("damage", [_flip, _truncate, _lose, _spoil_manifest], ids=lambda f: f.__name__)
def test_a_damaged_checkpoint_is_skipped(setup: Setup, damage: Callable[[Path], None]) -> None:
    first, second = setup.take(), setup.take()
    damage(setup.directory / second)
    again = Setup(setup.directory, term=2, last=second)
    assert again.checkpoints.newest is not None and again.checkpoints.newest.name == first
    (line,) = again.noted
    assert second in line and line.endswith(f"; using {first} instead")
    # The intact checkpoint is kept, and the damaged one does not count.
    third = again.take()
    assert first in again.names() and third in again.names()


def test_a_missing_checkpoint_is_reported(setup: Setup) -> None:
    first, second = setup.take(), setup.take()
    (setup.directory / second / "manifest.json").unlink()
    again = Setup(setup.directory, term=2, last=second)
    assert again.checkpoints.newest is not None and again.checkpoints.newest.name == first
    assert again.noted == [f"{setup.directory / second}: committed checkpoint is missing; using {first} instead"]


def test_all_checkpoints_are_damaged(setup: Setup) -> None:
    first, second = setup.take(), setup.take()
    for name in (first, second):
        _flip(setup.directory / name)
    setup.checkpoints.report_unloadable(second, "checksum")
    again = Setup(setup.directory, term=2)
    for one in (setup, again):
        assert one.checkpoints.newest is None and len(one.noted) == 2
        for name, line in zip((second, first), one.noted, strict=True):
            assert name in line
            assert line.endswith("; there is no earlier valid checkpoint: the run starts from the beginning")


def test_the_only_checkpoint_is_missing(setup: Setup) -> None:
    name = setup.take()
    (setup.directory / name / "manifest.json").unlink()
    (line,) = Setup(setup.directory, term=2, last=name).noted
    assert line.endswith(
        "committed checkpoint is missing; there is no earlier valid checkpoint: the run starts from the beginning"
    )


def test_a_checkpoint_of_another_table_is_refused(setup: Setup) -> None:
    setup.take()
    hooks = Hooks(setup.clock, setup.journal.append, setup.noted.append)
    other = Checkpoints(setup.directory, SETTINGS, 8, 2, hooks)
    other.start(None)
    assert other.newest is None and "expected 8 partitions, got 5" in setup.noted[-1]


def test_a_shard_cannot_load_a_checkpoint(setup: Setup) -> None:
    first, second = setup.take(), setup.take()
    with pytest.raises(ModelError, match="could not be loaded, although its files are intact: out of memory"):
        setup.checkpoints.report_unloadable(second, "out of memory")
    _flip(setup.directory / second)
    setup.checkpoints.report_unloadable(second, "checksum")
    assert setup.checkpoints.newest is not None and setup.checkpoints.newest.name == first
    # Another shard reports the same a moment later.
    setup.checkpoints.report_unloadable(second, "checksum")
    assert setup.checkpoints.newest.name == first and len(setup.noted) == 1
