"""Verify versions: the chain, size and checksum of every file, finite values, and rows that this release can read."""

import hashlib
from collections.abc import Iterator

import numpy as np

from elasticrec import _core
from elasticrec.errors import ModelError
from elasticrec.manifest import FileEntry
from elasticrec.repository.repository import Repository
from elasticrec.repository.storage import Storage, join
from elasticrec.repository.version import DENSE_FILE, Version

_CHUNK_BYTES = 4 << 20


def verify(repository: Repository, number: int) -> list[str]:
    """Return all problems of a version, one line each."""
    try:
        chain = repository.chain(number)
    except (ModelError, FileNotFoundError) as error:
        return [str(error)]
    problems = []
    for version in chain:
        for name, entry in version.files.items():
            if problem := check_file(repository.storage, f"{version.name}/{name}", entry):
                problems.append(problem)
            elif name == DENSE_FILE:
                problems += tensor_problems(version, repository)
    return problems


def row_problems(repository: Repository, number: int) -> list[str]:
    """Return why this release cannot open the rows of an intact version; empty if it can, or if they are not local."""
    chain = repository.chain(number)
    paths = [[repository.storage.path_of(f"{version.name}/{name}") for name in version.parts] for version in chain]
    base, *deltas = [[str(path) for path in parts if path is not None] for parts in paths]
    if any(path is None for parts in paths for path in parts):
        return []
    try:
        num_rows = _core.CubeView(base, deltas).num_rows
    except ModelError as error:
        return [str(error)]
    version = chain[-1]
    if num_rows != version.rows:
        where = join(repository.location, version.name)
        return [f"{where}: expected {version.rows} rows as in its manifest, got {num_rows}"]
    return []


def check_file(storage: Storage, name: str, entry: FileEntry) -> str | None:
    """Return the problem of a file, or None."""
    where = join(storage.location, name)
    digest, num_bytes = hashlib.sha256(), 0
    try:
        for chunk in read_chunks(storage, name):
            digest.update(chunk)
            num_bytes += len(chunk)
            if num_bytes > entry.num_bytes:
                break
    except FileNotFoundError:
        return f"{where}: named in the manifest but missing"
    if num_bytes != entry.num_bytes:
        got = "more" if num_bytes > entry.num_bytes else str(num_bytes)
        return f"{where}: expected {entry.num_bytes} bytes, got {got}"
    if digest.hexdigest() != entry.sha256:
        return f"{where}: sha-256 differs from the manifest, the file is damaged"
    return None


def read_chunks(storage: Storage, name: str, start: int = 0) -> Iterator[bytes]:
    """Yield the content of a file from `start` on, in chunks."""
    path = storage.path_of(name)
    if path is not None:
        with open(path, "rb") as file:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
        return
    stats = storage.find(name)
    if name not in stats:
        raise FileNotFoundError(2, "No such file or directory", join(storage.location, name))
    while start < stats[name].num_bytes:
        chunk = storage.read_range(name, start, min(start + _CHUNK_BYTES, stats[name].num_bytes))
        if not chunk:
            return
        start += len(chunk)
        yield chunk


def tensor_problems(version: Version, repository: Repository) -> list[str]:
    """Return a line for each tensor of a version with values that are not finite."""
    content = repository.storage.read(f"{version.name}/{DENSE_FILE}")
    return [
        f"{join(repository.location, version.name, DENSE_FILE)}: `{name}` has values that are not finite"
        for name in non_finite_tensors(content, version.manifest["dense"]["tensors"])
    ]


def non_finite_tensors(content: bytes, tensors: list[dict[str, object]]) -> list[str]:
    """Return the names of tensors with values that are not finite; `?` for values outside of all tensors."""
    values = np.frombuffer(content[: len(content) // 4 * 4], "<f4")
    if np.isfinite(values).all():
        return []
    names = []
    for tensor in tensors:
        shape, offset = tensor["shape"], tensor["offset"]
        assert isinstance(shape, list)
        assert isinstance(offset, int)
        first = offset // 4
        if not np.isfinite(values[first : first + int(np.prod(shape, dtype=np.int64))]).all():
            names.append(str(tensor["name"]))
    return names or ["?"]
