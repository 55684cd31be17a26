"""The versions of one model: <root>/<model>/<version>/, their deltas, and CURRENT, which names the served version.

A publisher writes the files, then the manifest, which commits the version, and finally CURRENT, which offers it.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from elasticrec.durable import sync_directory, write_synced
from elasticrec.errors import ConfigError, ModelError
from elasticrec.manifest import MANIFEST, FileEntry, encode_manifest
from elasticrec.repository.lock import LEASE_S, STATE, WRITER, Check, hold_lock
from elasticrec.repository.storage import Stat, Storage, join, open_storage
from elasticrec.repository.version import (
    CUBE,
    DENSE_FILE,
    GRAPH_FILE,
    KIND,
    READER_FILE,
    Content,
    MissingVersionError,
    Version,
    check_file_name,
    decode_version,
    directory_of,
    number_of,
)

CURRENT = "CURRENT"
PINS = "PINS"
NEXT = "NEXT"
STORE = "STORE"
# Changes of CURRENT and PINS are short. A holder that crashed is detected after a lease, so wait a little longer.
_STATE_WAIT_S = LEASE_S + 10.0
# Exceptions of reading damaged JSON.
JSON_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Current:
    """The content of CURRENT."""

    version: int
    generation: int
    """Increases with every change."""
    is_held: bool = False
    """Whether a rollback holds the version: nothing newer is offered until `resume`."""
    wanted: int | None = None
    """Target of a rollback that the online store has not loaded yet."""

    def encode(self) -> bytes:
        """Return the bytes of the file; `held` and `wanted` only if set, because the previous release ignores them."""
        content: dict[str, object] = {"version": self.version, "generation": self.generation}
        content |= {"held": True} if self.is_held else {}
        return json.dumps(content | ({} if self.wanted is None else {"wanted": self.wanted})).encode()


class Repository:
    """The versions of one model, in any storage."""

    def __init__(self, storage: Storage) -> None:
        """Open the model at a storage, without any access yet."""
        self.storage = storage
        self._check: Check | None = None
        # Cache of manifests by directory, because a chain has many deltas that never change.
        self._cache: dict[str, tuple[Stat, Version]] = {}

    @classmethod
    def open(cls, location: str | Path, model: str = "", *, insecure: bool = False) -> "Repository":
        """Open a model by the path or URL of its directory, or of its repository together with its name."""
        storage = open_storage(location, insecure=insecure)
        return cls(storage.subdirectory(model) if model else storage)

    @property
    def location(self) -> str:
        """Path or URL of the model."""
        return self.storage.location

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.location.rstrip("/").rpartition("/")[2] or self.location

    def directories(self) -> dict[int, str]:
        """Return the directory of every complete version by its number, oldest first."""
        found = {}
        for directory in self._manifests():
            number = number_of(directory)
            assert number is not None
            found[number] = directory
        return dict(sorted(found.items()))

    def _manifests(self) -> dict[str, Stat]:
        """Return size and time of the manifest of every complete version, by its directory."""
        files = {file.rpartition("/"): stat for file, stat in self.storage.find().items()}
        found = {parts[0]: stat for parts, stat in files.items() if parts[2] == MANIFEST}
        manifests = {directory: stat for directory, stat in found.items() if number_of(directory) is not None}
        # Drop removed versions, so that the cache does not grow for months.
        self._cache = {directory: known for directory, known in self._cache.items() if directory in manifests}
        return manifests

    def versions(self) -> list[int]:
        """Return the numbers of the complete versions, oldest first."""
        return list(self.directories())

    def version(self, number: int) -> Version:
        """Read a version by its number and check its manifest."""
        directory = self.directories().get(number)
        if directory is None:
            raise self._missing_error(number)
        return self.read(directory)

    def _missing_error(self, number: int) -> MissingVersionError:
        available = _format_numbers(self.versions())
        return MissingVersionError(f"{self.location}: no version {number}; available: {available}")

    def read(self, directory: str) -> Version:
        """Read the version in a directory and check its manifest."""
        return decode_version(self.storage.read(f"{directory}/{MANIFEST}"), directory, self.location)

    def _read_cached(self, directory: str, manifests: dict[str, Stat]) -> Version:
        """Read the version in a directory; an unchanged manifest comes from the cache."""
        stat = manifests[directory]
        known = self._cache.get(directory)
        if known is None or known[0] != stat:
            known = self._cache[directory] = (stat, self.read(directory))
        return known[1]

    def chain(self, number: int) -> list[Version]:
        """Return the base of a version and the deltas up to it; raise an error that names a missing version."""
        manifests = self._manifests()
        directories = {number_of(directory): directory for directory in manifests}
        if number not in directories:
            raise self._missing_error(number)
        version = self._read_cached(directories[number], manifests)
        chain = [version]
        while version.parent is not None:
            where = join(self.location, version.name)
            for key, wanted in (("base", version.base), ("parent", version.parent)):
                if wanted not in directories:
                    raise MissingVersionError(f"{where}: its {key}, version {wanted}, is missing")
            parent = self._read_cached(directories[version.parent], manifests)
            if parent.base != version.base:
                raise ModelError(
                    f"{where}: its parent, version {parent.number}, belongs to base {parent.base}, not {version.base}"
                )
            version = parent
            chain.insert(0, version)
        return chain

    def current(self) -> int | None:
        """Return the version that CURRENT names, or None."""
        state = self.state()
        return None if state is None else state.version

    def state(self) -> Current | None:
        """Return the content of CURRENT; None before the first offer."""
        try:
            content = self.storage.read(CURRENT)
        except FileNotFoundError:
            return None
        try:
            found = json.loads(content)
            wanted = found.get("wanted")
            version, generation = int(found["version"]), int(found["generation"])
            if version < 0 or generation < 0:
                raise ValueError(version, generation)
            return Current(version, generation, bool(found.get("held", False)), None if wanted is None else int(wanted))
        except JSON_ERRORS:
            raise ModelError(
                f"{join(self.location, CURRENT)}: expected "
                '{"version": N, "generation": N}, the file is damaged; remove it and publish'
            ) from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the model for one publisher; raise an error that names the holder if it is locked."""
        with hold_lock(self.storage, WRITER, "publishing") as check:
            self._check = check
            try:
                yield
            finally:
                self._check = None

    def begin(self) -> "Draft":
        """Begin a base."""
        return self._begin(None, None)

    def begin_delta(self, parent: int) -> "Draft":
        """Begin a delta of an existing version."""
        return self._begin(self.chain(parent)[0].number, parent)

    def _begin(self, base: int | None, parent: int | None) -> "Draft":
        # Read CURRENT first: a damaged file must be repaired before a version is written.
        state = self.state()
        number = max([*self._used_numbers(), state.version if state else 0, self._next_number() - 1]) + 1
        # Reserve the number first: a late file of an abandoned version must not get into another version.
        self.storage.write(NEXT, json.dumps({"version": number + 1}).encode())
        path = self.storage.path_of(directory_of(number, base))
        staging = None
        if path is None:
            path = staging = Path(tempfile.mkdtemp(prefix="elasticrec-publish-"))
        (path / CUBE).mkdir(parents=True)
        return Draft(self, number, base, parent, path, staging)

    def _used_numbers(self) -> Iterator[int]:
        """Yield the numbers of all versions, complete or not, because the previous release did not write `NEXT`."""
        names = {"/".join(file.split("/")[:length]) for file in self.storage.find() for length in (1, 3)}
        root = self.storage.path_of("")
        if root is not None:
            # `find` does not list empty directories.
            found = [*root.glob("*"), *root.glob("*/deltas/*")]
            names |= {path.relative_to(root).as_posix() for path in found if path.is_dir()}
        yield from (number for name in names if (number := number_of(name)) is not None)

    def _next_number(self) -> int:
        """Return the next number that was never used."""
        try:
            content = self.storage.read(NEXT)
        except FileNotFoundError:
            return 1
        with contextlib.suppress(*JSON_ERRORS):
            return int(json.loads(content)["version"])
        raise ModelError(f'{join(self.location, NEXT)}: expected {{"version": N}}, the file is damaged; remove it')

    def commit(self, draft: "Draft", content: Content, files: dict[str, FileEntry]) -> Version:
        """Commit a draft: upload its files if necessary, then write the manifest."""
        format, body = content.body(self.name, draft.number, draft.base, draft.parent)
        for name in files:
            check_file_name(name, join(self.location, draft.name))
        if draft.base is None and GRAPH_FILE not in files:
            raise ModelError(f"{join(self.location, draft.name)}: expected `{GRAPH_FILE}` among its files")
        self._upload_files(draft, files)
        if draft.parent is not None:
            self.chain(draft.parent)
        if self._check is not None:
            self._check()
        manifest = encode_manifest(KIND, body, files, format=format)
        self.storage.write(f"{draft.name}/{MANIFEST}", manifest)
        if draft.staging is None:
            for directory in (draft.directory.parent, draft.directory.parent.parent):
                sync_directory(directory)
        draft.is_open = False
        draft.clear_staging()
        return decode_version(manifest, draft.name, self.location)

    def _upload_files(self, draft: "Draft", files: dict[str, FileEntry]) -> None:
        """Upload staged files, check that every file exists with its size, and sync directories."""
        for name in files if draft.staging is not None else ():
            # Files that are not staged were uploaded by a shard.
            if (draft.directory / name).is_file():
                self.storage.put(draft.directory / name, f"{draft.name}/{name}")
        self._check_files(draft.name, files, self.storage.find(draft.name))
        if draft.staging is None:
            for directory in {(draft.directory / name).parent for name in files}:
                sync_directory(directory)

    def abandon(self, draft: "Draft") -> None:
        """Remove the files of a draft, unless its manifest was written: then it is a version."""
        draft.is_open = False
        draft.clear_staging()
        if not self.storage.exists(f"{draft.name}/{MANIFEST}"):
            self.storage.delete(draft.name)

    def remove(self, directory: str) -> None:
        """Remove a version; the manifest goes first, so that a crash leaves no damaged version."""
        self.storage.delete(f"{directory}/{MANIFEST}")
        self.storage.delete(directory)

    def offer(self, number: int) -> bool:
        """Make a complete version current. Return False if a rollback holds the model or the version is not newer.

        An older version never replaces a newer one, even if two publishers race; only a rollback does that.
        """
        with self.lock_state() as check:
            # The lock excludes garbage collection.
            self.chain(number)
            state = self.state()
            if state is not None and (state.is_held or number <= state.version):
                return False
            if self._check is not None:
                self._check()
            check()
            self.storage.write(CURRENT, Current(number, (state.generation if state else 0) + 1).encode())
        return True

    def rollback(self, number: int, *, is_loaded: bool = True) -> Current:
        """Roll back to an existing version, and hold it until `resume`.

        With `is_loaded=False` the version is only recorded as wanted; the rollout offers it once the store holds it.
        """
        with self.lock_state() as check:
            if number not in self.directories():
                raise self._missing_error(number)
            found = self.storage.find()
            for version in self.chain(number):
                self._check_files(version.name, version.files, found)
            state = self.state()
            generation = (state.generation if state else 0) + 1
            if state is None or is_loaded or state.version == number:
                current = Current(number, generation, is_held=True)
            else:
                current = Current(state.version, generation, is_held=True, wanted=number)
            check()
            self.storage.write(CURRENT, current.encode())
        return current

    def complete_rollback(self, number: int) -> bool:
        """Make the target of a rollback current. Return False if the rollback was cancelled."""
        with self.lock_state() as check:
            state = self.state()
            if state is None or state.wanted != number:
                return False
            check()
            self.storage.write(CURRENT, Current(number, state.generation + 1, is_held=True).encode())
        return True

    def _check_files(self, directory: str, files: dict[str, FileEntry], found: dict[str, Stat]) -> None:
        """Raise an error unless every file of a version exists with its size."""
        for name, entry in files.items():
            stat = found.get(f"{directory}/{name}")
            where = join(self.location, directory, name)
            if stat is None:
                raise ModelError(f"{where}: named in the manifest but missing")
            if stat.num_bytes != entry.num_bytes:
                raise ModelError(f"{where}: expected {entry.num_bytes} bytes, got {stat.num_bytes}")

    def resume(self) -> Current:
        """End the hold of a rollback, so that new versions are offered again."""
        with self.lock_state() as check:
            state = self.state()
            if state is None:
                raise MissingVersionError(f"{self.location}: no version was offered yet")
            if not state.is_held:
                return state
            current = Current(state.version, state.generation + 1)
            check()
            self.storage.write(CURRENT, current.encode())
        return current

    def pins(self) -> list[int]:
        """Return the versions that are pinned."""
        try:
            content = self.storage.read(PINS)
        except FileNotFoundError:
            return []
        try:
            return sorted({int(number) for number in json.loads(content)["versions"]})
        except JSON_ERRORS:
            raise ModelError(
                f'{join(self.location, PINS)}: expected {{"versions": [N, …]}}, the file is damaged'
            ) from None

    def pin(self, number: int) -> None:
        """Keep a version and its chain until it is unpinned."""
        with self.lock_state():
            self.chain(number)
            self._write_pins({*self.pins(), number})

    def unpin(self, number: int) -> None:
        """Remove the pin of a version."""
        with self.lock_state():
            pins = self.pins()
            if number not in pins:
                raise ConfigError(f"{self.location}: version {number} is not pinned; pinned: {_format_numbers(pins)}")
            self._write_pins(set(pins) - {number})

    def _write_pins(self, numbers: set[int]) -> None:
        self.storage.write(PINS, json.dumps({"versions": sorted(numbers)}).encode())

    @contextlib.contextmanager
    def lock_state(self) -> Iterator[Check]:
        """Lock CURRENT, PINS and garbage collection for a change."""
        with hold_lock(self.storage, STATE, "changing", wait_s=_STATE_WAIT_S) as check:
            yield check


@dataclass
class Draft:
    """A version being written: put files into `directory`, then call `Repository.commit`.

    As a context manager it removes the files if the block ends without a commit.
    """

    repository: Repository
    number: int
    base: int | None
    parent: int | None
    directory: Path
    """The final directory on a local disk, or a staging directory to upload from; `cube/` exists."""
    staging: Path | None
    is_open: bool = True

    @property
    def name(self) -> str:
        """Directory of the version, relative to the model."""
        return directory_of(self.number, self.base)

    def write_network(self, dense: bytes, graph: bytes, reader: bytes | None = None) -> dict[str, FileEntry]:
        """Write the files of the network and return them; a delta has its base's graph.

        `reader` is the source of a custom reader. Deltas contain it too: it is small, and may differ from the base's.
        """
        contents = {DENSE_FILE: dense, GRAPH_FILE: graph if self.base is None else None, READER_FILE: reader}
        return {
            name: FileEntry(*write_synced(self.directory / name, content))
            for name, content in contents.items()
            if content is not None
        }

    def clear_staging(self) -> None:
        """Remove the staging directory."""
        if self.staging is not None:
            shutil.rmtree(self.staging, ignore_errors=True)

    def __enter__(self) -> "Draft":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_open:
            # Do not hide the error of the block.
            with contextlib.suppress(OSError):
                self.repository.abandon(self)


def _format_numbers(numbers: list[int], most: int = 12) -> str:
    """Format the newest version numbers for people."""
    if not numbers:
        return "none"
    more = f"{len(numbers) - most} older, " if len(numbers) > most else ""
    return more + ", ".join(map(str, numbers[-most:]))
