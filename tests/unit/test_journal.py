"""The journal: confirmed entries survive any crash, and damaged entries are refused."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrec.errors import ConfigError, ModelError, UnavailableError
from elasticrec.journal import Journal


def kinds(journal: Journal) -> list[str]:
    return [entry["kind"] for entry in journal.entries]


def write(directory: Path, *names: str) -> Path:
    with Journal.open(directory) as journal:
        for name in names:
            journal.append({"kind": name, "text": "é\u2028\n"})
        return journal.path


def test_entries_are_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "c", "a", "b")
    write(tmp_path / "c", "c")
    with Journal.open(tmp_path / "c") as journal:
        assert kinds(journal) == ["a", "b", "c"]
        assert [(entry["n"], entry["term"]) for entry in journal.entries] == [(0, 1), (1, 1), (2, 2)]
        assert journal.term == 3 and journal.entries[0]["text"] == "é\u2028\n"
    assert all(json.loads(line)["check"] for line in path.read_text().splitlines())


@pytest.mark.parametrize("num_lost", range(1, 60))
def test_a_torn_last_line_is_removed(tmp_path: Path, num_lost: int) -> None:
    path = write(tmp_path, "a", "b")
    whole = path.read_bytes()
    path.write_bytes(whole[:-num_lost])
    with Journal.open(tmp_path) as journal:
        assert kinds(journal) == ["a"]
        journal.append({"kind": "c"})
    with Journal.open(tmp_path) as journal:
        assert kinds(journal) == ["a", "c"]


def test_zeros_after_a_power_failure_are_a_torn_line(tmp_path: Path) -> None:
    path = write(tmp_path, "a")
    path.write_bytes(path.read_bytes() + b'{"check":"' + b"\0" * 4000 + b"}\n")
    with Journal.open(tmp_path) as journal:
        assert kinds(journal) == ["a"]


@pytest.mark.parametrize("line", range(3))
@pytest.mark.parametrize("at", [0, 12, 30, 40, -3])
def test_a_damaged_line_is_an_error(tmp_path: Path, line: int, at: int) -> None:
    path = write(tmp_path, "a", "b", "c")
    lines = [bytearray(one) for one in path.read_bytes().splitlines(keepends=True)]
    lines[line][at] ^= 1
    damaged = b"".join(lines)
    path.write_bytes(damaged)
    with pytest.raises(ModelError, match=rf"journal.jsonl:{line + 1}: damaged line"):
        Journal.open(tmp_path)
    assert path.read_bytes() == damaged
    assert [one.name for one in tmp_path.glob("term-*")] == ["term-00000001"], "a refused journal uses no term"


def test_a_missing_or_repeated_line_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, "a", "b", "c")
    a, b, c = path.read_bytes().splitlines(keepends=True)
    for lines in ([a, c], [a, b, b, c], [b, c], [a, c, b]):
        path.write_bytes(b"".join(lines))
        with pytest.raises(ModelError, match="not the next entry"):
            Journal.open(tmp_path)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from elasticrec.journal import Journal\n"
        f"journal = Journal.open(Path({str(tmp_path / 'coordinator')!r}))\n"
        "print(journal.term, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "1\n"
            with pytest.raises(ConfigError, match=rf"^{tmp_path}: another coordinator holds the lock of this run$"):
                Journal.open(tmp_path / "coordinator")
            assert sorted(path.name for path in (tmp_path / "coordinator").glob("term-*")) == ["term-00000001"]
        finally:
            process.kill()
    with Journal.open(tmp_path / "coordinator") as journal:
        assert journal.term == 2


def test_terms_only_increase(tmp_path: Path) -> None:
    write(tmp_path, "a")
    (tmp_path / "term-00000001").unlink()
    with Journal.open(tmp_path) as journal:
        assert journal.term == 2, "the journal contains the terms of its entries"
    (tmp_path / "term-00000041").touch()
    (tmp_path / "term-of-mine").touch()
    with Journal.open(tmp_path) as journal:
        assert journal.term == 42
    with Journal.open(tmp_path, 60) as journal:
        assert journal.term == 61
    with Journal.open(tmp_path, 7) as journal:
        assert journal.term == 62


@pytest.mark.parametrize("change", ["next", "gone"])
def test_a_coordinator_on_another_machine_is_noticed(tmp_path: Path, change: str) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append({"kind": "a"})
        if change == "next":
            (tmp_path / "term-00000002").touch()
        else:
            (tmp_path / "term-00000001").unlink()
        with pytest.raises(UnavailableError, match="another coordinator has taken over this run"):
            journal.append({"kind": "b"})
    with Journal.open(tmp_path) as journal:
        assert kinds(journal) == ["a"]


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(tmp_path) as journal:
        journal.append({"kind": "a"})
        real = os.write

        def full(descriptor: int, content: bytes) -> int:
            if len(content) > 20:
                return real(descriptor, content[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space left") as raised:
                journal.append({"kind": "b"})
        assert str(journal.path) in str(raised.value)
        journal.append({"kind": "c"})
    with Journal.open(tmp_path) as journal:
        assert kinds(journal) == ["a", "c"]


def test_after_a_failed_sync_no_entry_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(tmp_path) as journal:

        def fail(descriptor: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail)
            with pytest.raises(UnavailableError, match="Input/output error"):
                journal.append({"kind": "a"})
        with pytest.raises(UnavailableError, match="Input/output error"):
            journal.append({"kind": "b"})


def test_append_syncs_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Journal.open(tmp_path) as journal:
        real, sizes = os.fsync, []

        def sync(descriptor: int) -> None:
            sizes.append(os.fstat(descriptor).st_size)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", sync)
        journal.append({"kind": "a"}, {"kind": "b"})
        assert sizes == [journal.path.stat().st_size]
