"""Pack a version and its chain as a model directory in a `.tar.gz` file."""

import contextlib
import gzip
import hashlib
import io
import os
import re
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from elasticrec.durable import sync_directory
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST
from elasticrec.repository.fetch import FetchedVersion
from elasticrec.repository.repository import CURRENT, Current
from elasticrec.repository.storage import open_storage

SUFFIXES = (".tar.gz", ".tgz")

# Rows hardly compress, so a higher level costs time and saves little space.
_LEVEL = 1
_MAX_MEMBERS = 100_000
# Archives are padded with zeros to a full block.
_MAX_PADDING = 1 << 20
_SPARE_BYTES = 16 << 20
# Unpacked models are removed this long after their last use.
_UNUSED_S = 30 * 86400.0
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def is_pack(text: str) -> bool:
    """Return whether a model is given as a packed file."""
    return text.endswith(SUFFIXES)


def pack(fetched: FetchedVersion, out: Path) -> int:
    """Write a version and its chain; return the size of the file. The same version gives the same bytes."""
    descriptor, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.")
    name = str(fetched.version.manifest["model"])
    try:
        with (
            open(descriptor, "wb") as file,
            gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            current = Current(fetched.version.number, 1).encode()
            archive.addfile(_member(f"{name}/{CURRENT}", len(current)), io.BytesIO(current))
            for version in fetched.chain:
                for member in (MANIFEST, *sorted(version.files)):
                    path = fetched.model / version.name / member
                    with open(path, "rb") as content:
                        archive.addfile(_member(f"{name}/{version.name}/{member}", path.stat().st_size), content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, out)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            # Errors of writes lack the file name.
            error.filename = error.filename or str(out)
        raise
    sync_directory(out.parent)
    return out.stat().st_size


def _member(name: str, num_bytes: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = num_bytes, 0o644
    return member


def unpack_url(url: str, cache: Path) -> Path:
    """Download and unpack a packed model, and return the directory of the model."""
    location, _, name = url.rpartition("/")
    with tempfile.NamedTemporaryFile() as file:
        file.write(open_storage(location).read(name))
        file.flush()
        try:
            return unpack(Path(file.name), cache)
        except ModelError as error:
            raise ModelError(str(error).replace(file.name, url)) from None


def unpack(path: Path, cache: Path) -> Path:
    """Unpack a packed model into the cache, once per content, and return the directory of the model."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache / "packs" / digest
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_unused(target.parent)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=".unpacking-"))
        try:
            _extract(path, draft)
            with contextlib.suppress(OSError):
                # Another process may have been faster.
                os.rename(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    os.utime(target)
    (model,) = [entry for entry in target.iterdir() if entry.is_dir()]
    return model


def _remove_unused(packs: Path) -> None:
    """Remove models that were not used for a long time, and remains of crashes."""
    oldest_s = time.time() - _UNUSED_S
    for path in packs.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest_s:
                shutil.rmtree(path, ignore_errors=True)


def _extract(path: Path, target: Path) -> None:
    try:
        with gzip.open(path, "rb") as zipped:
            _extract_members(path, zipped, target)
            # Read to the end, so that gzip verifies its checksum.
            if len(zipped.read(_MAX_PADDING)) == _MAX_PADDING:
                raise ModelError(f"{path}: expected the end of the archive after its files, got more data")
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        reason = " ".join(str(error).split()) or "unexpected end of file"
        raise ModelError(f"{path}: not a `.tar.gz`, or damaged: {reason}") from None


def _extract_members(path: Path, zipped: gzip.GzipFile, target: Path) -> None:
    seen: set[str] = set()
    room = shutil.disk_usage(target).free - _SPARE_BYTES
    for name, size, content in _members(path, zipped):
        _check_name(path, name, seen)
        room -= size
        if room < 0:
            raise ModelError(f"{path}: does not fit into {target.parent}")
        out = target / name
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(out, "xb") as file:
            shutil.copyfileobj(content, file, 1 << 20)
        if out.stat().st_size != size:
            raise ModelError(f"{path}: `{name}` is truncated, the file is damaged")
    models = {name.partition("/")[0] for name in seen}
    if len(models) != 1 or f"{min(models)}/{CURRENT}" not in seen:
        raise ModelError(f"{path}: not a packed model, expected one directory with `{CURRENT}` in it")


def _members(path: Path, zipped: gzip.GzipFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Yield name, size and content of each file; reject anything but regular files."""
    with tarfile.open(fileobj=zipped, mode="r|") as archive:
        for number, member in enumerate(archive):
            if number >= _MAX_MEMBERS:
                raise ModelError(f"{path}: expected at most {_MAX_MEMBERS:,} files")
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise ModelError(f"{path}: {member.name[:100]!r} is a link or a device, expected regular files")
            content = archive.extractfile(member)
            assert content is not None
            yield member.name, member.size, content


def _check_name(path: Path, name: str, seen: set[str]) -> None:
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and "\\" not in part and part.isprintable() for part in parts)
    if not plain or len(parts) < 2 or not _MODEL.fullmatch(parts[0]) or len(name) > 1024:
        raise ModelError(f"{path}: expected names within the directory of a model, got {name[:100]!r}")
    if name in seen:
        raise ModelError(f"{path}: `{name}` occurs twice")
    seen.add(name)
