"""Whether a version is what its manifest says: its chain, every file's size and checksum, values that are numbers.

And whether this release can read its rows.
"""

import hashlib
from collections.abc import Callable, Iterator

import numpy as np

from elasticrec import _core
from elasticrec.errors import ModelError
from elasticrec.manifest import FileEntry
from elasticrec.repository.repository import Repository
from elasticrec.repository.storage import Storage, join
from elasticrec.repository.version import DENSE_FILE, Version

_CHUNK_BYTES = 4 << 20


def verify(repository: Repository, number: int, say: Callable[[str], None] = lambda _: None) -> list[str]:
    """Everything that is wrong with a version, a line each; empty if nothing is. `say` is told each file."""
    try:
        chain = repository.chain(number)
    except (ModelError, FileNotFoundError) as error:
        return [str(error)]
    problems = []
    for version in chain:
        for name, entry in version.files.items():
            say(join(repository.location, version.name, name))
            if problem := check_file(repository.storage, f"{version.name}/{name}", entry):
                problems.append(problem)
            elif name == DENSE_FILE:
                problems += not_finite(version, repository)
    return problems


def unreadable(repository: Repository, number: int) -> list[str]:
    """What keeps this release from opening the rows of a version whose files are as they were written.

    Of a repository on another machine nothing is read.
    """
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
        return [f"{where}: expected {version.rows} rows, as its manifest says, got {num_rows} in its files"]
    return []


def check_file(store: Storage, name: str, entry: FileEntry) -> str | None:
    """What is wrong with a file of a store, if anything."""
    where = join(store.location, name)
    digest, num_bytes = hashlib.sha256(), 0
    try:
        for chunk in chunks(store, name):
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


def chunks(store: Storage, name: str, start: int = 0) -> Iterator[bytes]:
    """A file from `start` on, some at a time."""
    path = store.path_of(name)
    if path is not None:
        with open(path, "rb") as file:
            file.seek(start)
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
        return
    stats = store.find(name)
    if name not in stats:
        raise FileNotFoundError(2, "No such file or directory", join(store.location, name))
    while start < stats[name].num_bytes:
        chunk = store.read_range(name, start, min(start + _CHUNK_BYTES, stats[name].num_bytes))
        if not chunk:
            return
        start += len(chunk)
        yield chunk


def not_finite(version: Version, repository: Repository) -> list[str]:
    """The tensors of a version whose values are not all numbers."""
    content = repository.storage.read(f"{version.name}/{DENSE_FILE}")
    return [
        f"{join(repository.location, version.name, DENSE_FILE)}: `{name}` has values that are not finite"
        for name in tensors_not_finite(content, version.manifest["dense"]["tensors"])
    ]


def tensors_not_finite(content: bytes, tensors: list[dict[str, object]]) -> list[str]:
    """Names of the tensors of a flat vector with a value that is not a number; `?` for what no tensor names."""
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
