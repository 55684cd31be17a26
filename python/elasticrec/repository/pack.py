"""A version as one file: the directory of its model with what it is made of, in a `.tar.gz`."""

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
from elasticrec.repository.fetch import Fetched
from elasticrec.repository.repository import CURRENT, Current
from elasticrec.repository.storage import open_storage

SUFFIXES = (".tar.gz", ".tgz")

# Rows hardly shrink; a higher level costs much and brings little.
_LEVEL = 1
_MAX_MEMBERS = 100_000
# An archive is padded with zeros to a block.
_MAX_REST = 1 << 20
_SPARE_BYTES = 16 << 20
# Models that were unpacked stay so long after they were opened last.
_UNUSED_S = 30 * 86400.0
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


def is_pack(text: str) -> bool:
    """Whether a model is given as such a file."""
    return text.endswith(SUFFIXES)


def pack(fetched: Fetched, out: Path) -> int:
    """Write a version and all it is made of; returns the size of the file. The same version gives the same bytes."""
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
            # a write that fails does not know of what file
            error.filename = error.filename or str(out)
        raise
    sync_directory(out.parent)
    return out.stat().st_size


def _member(name: str, num_bytes: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = num_bytes, 0o644
    return member


def unpack_url(url: str, cache: Path) -> Path:
    """The directory of the model in a pack at a URL, which is downloaded each time."""
    place, _, name = url.rpartition("/")
    with tempfile.NamedTemporaryFile() as file:
        file.write(open_storage(place).read(name))
        file.flush()
        try:
            return unpack(Path(file.name), cache)
        except ModelError as error:
            raise ModelError(str(error).replace(file.name, url)) from None


def unpack(path: Path, cache: Path) -> Path:
    """The directory of the model in a pack; unpacked once for each content, into the cache."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    target = cache / "packs" / digest
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        _forget_old(target.parent)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=".unpacking-"))
        try:
            _extract(path, draft)
            with contextlib.suppress(OSError):
                # another process may have been faster
                os.rename(draft, target)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    os.utime(target)
    (model,) = [entry for entry in target.iterdir() if entry.is_dir()]
    return model


def _forget_old(packs: Path) -> None:
    """Drop what nobody has opened for long, and what a crash left."""
    oldest_s = time.time() - _UNUSED_S
    for path in packs.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < oldest_s:
                shutil.rmtree(path, ignore_errors=True)


def _extract(path: Path, target: Path) -> None:
    try:
        with gzip.open(path, "rb") as zipped:
            _extract_members(path, zipped, target)
            # up to the checksum behind the archive
            if len(zipped.read(_MAX_REST)) == _MAX_REST:
                raise ModelError(f"{path}: expected an end behind its files, got more")
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        words = " ".join(str(error).split()) or "it ends too early"
        raise ModelError(f"{path}: not a `.tar.gz`, or damaged: {words}") from None


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
            raise ModelError(f"{path}: `{name}` is cut, the file is damaged")
    models = {name.partition("/")[0] for name in seen}
    if len(models) != 1 or f"{min(models)}/{CURRENT}" not in seen:
        raise ModelError(f"{path}: not a packed model, expected one directory with `{CURRENT}` in it")


def _members(path: Path, zipped: gzip.GzipFile) -> Iterator[tuple[str, int, IO[bytes]]]:
    """Name, size and content of each file; anything but plain files is refused."""
    with tarfile.open(fileobj=zipped, mode="r|") as archive:
        for number, member in enumerate(archive):
            if number >= _MAX_MEMBERS:
                raise ModelError(f"{path}: expected at most {_MAX_MEMBERS:,} files")
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                raise ModelError(f"{path}: {member.name[:100]!r} is a link or a device, expected plain files")
            content = archive.extractfile(member)
            assert content is not None
            yield member.name, member.size, content


def _check_name(path: Path, name: str, seen: set[str]) -> None:
    parts = name.split("/")
    plain = all(part not in ("", ".", "..") and "\\" not in part and part.isprintable() for part in parts)
    if not plain or len(parts) < 2 or not _MODEL.fullmatch(parts[0]) or len(name) > 1024:
        raise ModelError(f"{path}: expected names within the directory of a model, got {name[:100]!r}")
    if name in seen:
        raise ModelError(f"{path}: `{name}` is there twice")
    seen.add(name)
