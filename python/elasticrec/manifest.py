"""Manifests: written last, they complete a checkpoint or a version; they hold size and SHA-256 of every file."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.durable import sync_directory, write_atomically
from elasticrec.errors import ModelError

MANIFEST = "manifest.json"
FORMAT = 1

# A manifest holds the SHA-256 of its own bytes, computed with zeros in place of the checksum.
_SEAL = "self_sha256"
_NO_DIGITS = "0" * 64


@dataclass(frozen=True)
class FileEntry:
    """Size and checksum of a file in a manifest."""

    num_bytes: int
    sha256: str


def encode_manifest(kind: str, body: dict[str, Any], files: dict[str, FileEntry], *, format: int = FORMAT) -> bytes:
    """Return the bytes of a manifest, including its own checksum."""
    entries = {name: {"bytes": file.num_bytes, "sha256": file.sha256} for name, file in sorted(files.items())}
    document = {"format": format, "kind": kind, _SEAL: _NO_DIGITS, **body, "files": entries}
    content = json.dumps(document, indent=1, ensure_ascii=False).encode() + b"\n"
    return content.replace(_NO_DIGITS.encode(), _digest(content).encode(), 1)


def write_manifest(directory: Path, kind: str, body: dict[str, Any], files: dict[str, FileEntry]) -> None:
    """Write the manifest, which completes a directory; its files never change afterwards."""
    for parent in {(directory / name).parent for name in files}:
        sync_directory(parent)
    write_atomically(directory / MANIFEST, encode_manifest(kind, body, files))
    sync_directory(directory.parent)


def read_manifest(directory: Path, kind: str) -> dict[str, Any]:
    """Read the manifest of a directory and check its format and its own checksum, but not its files."""
    path = directory / MANIFEST
    return decode_manifest(path.read_bytes(), str(path), kind)


def decode_manifest(content: bytes, where: str, kind: str, formats: tuple[int, ...] = (FORMAT,)) -> dict[str, Any]:
    """Parse a manifest and check its format and its own checksum; `where` names it in errors."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: not JSON, the file is damaged: {error}") from None
    if not isinstance(document, dict):
        raise ModelError(f"{where}: expected an object, got {type(document).__name__}")
    if document.get("format") not in formats:
        known = " or ".join(map(str, formats))
        raise ModelError(f"{where}: format: expected {known}, got {document.get('format')}")
    if document.get("kind") != kind:
        raise ModelError(f"{where}: kind: expected {kind}, got {document.get('kind')}")
    if document.get(_SEAL) != _digest(content):
        raise ModelError(f"{where}: {_SEAL} differs from the content, the file is damaged")
    return document


def _digest(content: bytes) -> str:
    """Return the checksum of a manifest, ignoring the stored one."""
    blank = re.sub(rb'("%s": ")[0-9a-f]{64}"' % _SEAL.encode(), rb'\g<1>%s"' % _NO_DIGITS.encode(), content, count=1)
    return hashlib.sha256(blank).hexdigest()


def verify_files(directory: Path, document: dict[str, Any]) -> None:
    """Check size and checksum of every file of a manifest."""
    for name, entry in document["files"].items():
        path = directory / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise ModelError(f"{path}: named in the manifest but missing") from None
        if size != entry["bytes"]:
            raise ModelError(f"{path}: expected {entry['bytes']} bytes, got {size}")
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry["sha256"]:
                raise ModelError(f"{path}: sha-256 differs from the manifest, the file is damaged")
