"""Manifests, and the files that they list."""

import hashlib
import json
import os
from pathlib import Path

import pytest

from elasticrec import durable
from elasticrec.durable import write_atomically, write_synced
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST, FileEntry, read_manifest, verify_files, write_manifest


def write(directory: Path) -> dict[str, object]:
    (directory / "part").mkdir(parents=True)
    files = {
        name: FileEntry(*write_synced(directory / name, content))
        for name, content in (("part/b", b"bytes of b" * 100), ("a", b""))
    }
    write_manifest(directory, "box", {"name": "grün", "nothing": None}, files)
    return read_manifest(directory, "box")


def refusal(directory: Path, kind: str = "box") -> str:
    with pytest.raises(ModelError) as caught:
        verify_files(directory, read_manifest(directory, kind))
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{directory}/")


def test_a_written_manifest_is_read_back(tmp_path: Path) -> None:
    document = write(tmp_path / "1")
    assert document["name"] == "grün"
    assert (document["format"], document["kind"], document["nothing"]) == (1, "box", None)
    assert list(document["files"]) == ["a", "part/b"]  # type: ignore[call-overload]
    verify_files(tmp_path / "1", document)
    assert "grün" in (tmp_path / "1" / MANIFEST).read_text("utf-8")


def test_an_error_names_the_damaged_file(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "part/b"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert refusal(tmp_path) == "part/b: expected 1000 bytes, got 999"
    path.write_bytes(content + b"\n")
    assert refusal(tmp_path) == "part/b: expected 1000 bytes, got 1001"
    for at in (0, 500, 999):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            assert refusal(tmp_path) == "part/b: sha-256 differs from the manifest, the file is damaged"
    path.unlink()
    assert refusal(tmp_path) == "part/b: named in the manifest but missing"


def test_every_flipped_bit_of_a_manifest_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / MANIFEST
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        assert refusal(tmp_path).startswith("manifest.json: "), bit


def test_a_truncated_manifest_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / MANIFEST
    content = path.read_bytes()
    for length in range(len(content) - 2):
        path.write_bytes(content[:length])
        assert refusal(tmp_path).startswith("manifest.json: not JSON, the file is damaged: ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", "expected an object, got list"),
        (b"null", "expected an object, got NoneType"),
        (b"\xff\xfe", "not JSON, the file is damaged: "),
        (b"{}", "format: expected 1, got None"),
        (b'{"format": 2, "kind": "box"}', "format: expected 1, got 2"),
        (b'{"format": 1, "kind": "model"}', "kind: expected box, got model"),
    ],
)
def test_another_document_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    assert refusal(tmp_path).startswith(f"manifest.json: {message}")


def test_a_missing_manifest_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=MANIFEST):
        read_manifest(tmp_path, "box")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "CURRENT"
    write_atomically(path, b"1")
    assert path.stat().st_mode & 0o777 == 0o644

    def fail(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(durable.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"2" * 1000)
    assert [entry.name for entry in tmp_path.iterdir()] == ["CURRENT"]
    assert path.read_bytes() == b"1"


def test_a_file_of_a_manifest_is_never_overwritten(tmp_path: Path) -> None:
    write_synced(tmp_path / "a", b"1")
    with pytest.raises(FileExistsError):
        write_synced(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"


def test_the_manifest_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are synced before the manifest that relies on them, and the manifest's own name after it."""
    order: list[str] = []
    monkeypatch.setattr("elasticrec.manifest.sync_directory", lambda path: order.append(path.name))
    monkeypatch.setattr("elasticrec.manifest.write_atomically", lambda path, content: order.append(path.name))
    (tmp_path / "1").mkdir()
    write_manifest(tmp_path / "1", "box", {}, {"part/b": FileEntry(0, "")})
    assert order == ["part", MANIFEST, tmp_path.name]


def test_other_tools_can_read_the_manifest_as_json(tmp_path: Path) -> None:
    write(tmp_path)
    assert json.loads((tmp_path / MANIFEST).read_text("utf-8"))["files"]["part/b"] == {
        "bytes": 1000,
        "sha256": hashlib.sha256(b"bytes of b" * 100).hexdigest(),
    }
