"""The versions of one model: <root>/<model>/<version>/, their deltas, and CURRENT, which says what is served.

Whoever publishes writes files, then the manifest, which makes them a version, and offers it by CURRENT.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from elasticrec.durable import sync_directory
from elasticrec.errors import ConfigError, ModelError
from elasticrec.manifest import MANIFEST, FileEntry, encode_manifest
from elasticrec.repository.lock import LEASE_S, STATE, WRITER, Check, held
from elasticrec.repository.storage import Stat, Storage, join, open_storage
from elasticrec.repository.version import (
    CUBE,
    GRAPH_FILE,
    KIND,
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
# Changes of CURRENT and PINS take moments; who holds them longer is dead, which a store knows after a lease.
_STATE_WAIT_S = LEASE_S + 10.0
# What is raised of JSON that is not what it should be, however odd.
DAMAGES = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Current:
    """What CURRENT says."""

    version: int
    generation: int
    """Goes up with every change."""
    is_held: bool = False
    """After a rollback: nothing newer is offered until `resume`."""
    wanted: int | None = None
    """Where a rollback goes to, as long as the store does not have it."""

    def encode(self) -> bytes:
        """`held` and `wanted` only where they are so: the release before does not know them."""
        content: dict[str, object] = {"version": self.version, "generation": self.generation}
        content |= {"held": True} if self.is_held else {}
        return json.dumps(content | ({} if self.wanted is None else {"wanted": self.wanted})).encode()


class Repository:
    """The versions of one model, in any store."""

    def __init__(self, store: Storage) -> None:
        """A model at a store; making the object reads nothing."""
        self.storage = store
        self._check: Check | None = None
        # Manifests that were read, by their directory: with as many deltas as there are, most of them are known.
        self._known: dict[str, tuple[Stat, Version]] = {}

    @classmethod
    def open(cls, place: str | Path, model: str = "", *, insecure: bool = False) -> "Repository":
        """A model by the path or URL of its directory, or by that of its repository and its name."""
        store = open_storage(place, insecure=insecure)
        return cls(store.below(model) if model else store)

    @property
    def location(self) -> str:
        """Path or URL of the model."""
        return self.storage.location

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.location.rstrip("/").rpartition("/")[2] or self.location

    def directories(self) -> dict[int, str]:
        """The directory of every complete version by its number, oldest first."""
        found = {}
        for directory in self._manifests():
            number = number_of(directory)
            assert number is not None
            found[number] = directory
        return dict(sorted(found.items()))

    def _manifests(self) -> dict[str, Stat]:
        """What the store says of the manifest of every complete version, by its directory."""
        files = {file.rpartition("/"): stat for file, stat in self.storage.find().items()}
        found = {parts[0]: stat for parts, stat in files.items() if parts[2] == MANIFEST}
        manifests = {directory: stat for directory, stat in found.items() if number_of(directory) is not None}
        # a process that publishes for months does not remember all that was ever collected
        self._known = {directory: known for directory, known in self._known.items() if directory in manifests}
        return manifests

    def versions(self) -> list[int]:
        """Numbers of the complete versions, oldest first."""
        return list(self.directories())

    def version(self, number: int) -> Version:
        """A version by its number, its manifest checked."""
        directory = self.directories().get(number)
        if directory is None:
            raise MissingVersionError(f"{self.location}: no version {number}, there are {_listed(self.versions())}")
        return self.read(directory)

    def read(self, directory: str) -> Version:
        """The version in a directory, its manifest checked."""
        return decode_version(self.storage.read(f"{directory}/{MANIFEST}"), directory, self.location)

    def _read_known(self, directory: str, manifests: dict[str, Stat]) -> Version:
        """The version in a directory; a manifest that is as it was is not read again."""
        stat = manifests[directory]
        known = self._known.get(directory)
        if known is None or known[0] != stat:
            known = self._known[directory] = (stat, self.read(directory))
        return known[1]

    def chain(self, number: int) -> list[Version]:
        """All that a version is made of, its base first; what is missing is named."""
        manifests = self._manifests()
        directories = {number_of(directory): directory for directory in manifests}
        if number not in directories:
            raise MissingVersionError(f"{self.location}: no version {number}, there are {_listed(self.versions())}")
        version = self._read_known(directories[number], manifests)
        chain = [version]
        while version.parent is not None:
            place = join(self.location, version.name)
            for key, wanted in (("base", version.base), ("parent", version.parent)):
                if wanted not in directories:
                    raise MissingVersionError(f"{place}: its {key}, version {wanted}, is missing")
            parent = self._read_known(directories[version.parent], manifests)
            if parent.base != version.base:
                raise ModelError(
                    f"{place}: its parent, version {parent.number}, is of base {parent.base}, not {version.base}"
                )
            version = parent
            chain.insert(0, version)
        return chain

    def current(self) -> int | None:
        """The version that CURRENT names."""
        state = self.state()
        return None if state is None else state.version

    def state(self) -> Current | None:
        """What CURRENT says; None before the first offer."""
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
        except DAMAGES:
            raise ModelError(
                f"{join(self.location, CURRENT)}: expected "
                '{"version": N, "generation": N}, the file is damaged; remove it and publish'
            ) from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the model for one publisher; a second one is refused by the name of the first."""
        with held(self.storage, WRITER, "publishing") as check:
            self._check = check
            try:
                yield
            finally:
                self._check = None

    def begin(self) -> "Draft":
        """Begin a version that is whole."""
        return self._begin(None, None)

    def begin_delta(self, parent: int) -> "Draft":
        """Begin a delta onto a version that is there."""
        return self._begin(self.chain(parent)[0].number, parent)

    def _begin(self, base: int | None, parent: int | None) -> "Draft":
        # one that is damaged would make the version that is about to be written useless
        state = self.state()
        number = max([*self._taken(), state.version if state else 0, self._next() - 1]) + 1
        # before anybody hears of it: a file of one that was given up may come late, and must not get into another
        self.storage.write(NEXT, json.dumps({"version": number + 1}).encode())
        path = self.storage.path_of(directory_of(number, base))
        staging = None
        if path is None:
            path = staging = Path(tempfile.mkdtemp(prefix="elasticrec-publish-"))
        (path / CUBE).mkdir(parents=True)
        return Draft(self, number, base, parent, path, staging)

    def _taken(self) -> Iterator[int]:
        """Numbers of versions, complete or not: one that was written by the release before has left no `NEXT`."""
        names = {"/".join(file.split("/")[:length]) for file in self.storage.find() for length in (1, 3)}
        root = self.storage.path_of("")
        if root is not None:
            # nothing may be written into a directory yet
            found = [*root.glob("*"), *root.glob("*/deltas/*")]
            names |= {path.relative_to(root).as_posix() for path in found if path.is_dir()}
        yield from (number for name in names if (number := number_of(name)) is not None)

    def _next(self) -> int:
        """The first number that was never given."""
        try:
            content = self.storage.read(NEXT)
        except FileNotFoundError:
            return 1
        with contextlib.suppress(*DAMAGES):
            return int(json.loads(content)["version"])
        raise ModelError(f'{join(self.location, NEXT)}: expected {{"version": N}}, the file is damaged; remove it')

    def commit(self, draft: "Draft", content: Content, files: dict[str, FileEntry]) -> Version:
        """Make what was written a version: upload it if need be, and write the manifest last."""
        format, body = content.body(self.name, draft.number, draft.base, draft.parent)
        for name in files:
            check_file_name(name, join(self.location, draft.name))
        if draft.base is None and GRAPH_FILE not in files:
            raise ModelError(f"{join(self.location, draft.name)}: expected `{GRAPH_FILE}` among its files")
        self._store_files(draft, files)
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

    def _store_files(self, draft: "Draft", files: dict[str, FileEntry]) -> None:
        """Upload what lies here; then every file is where it belongs, with its size and its name on the disk."""
        for name in files if draft.staging is not None else ():
            # one that is not here was put there by whoever wrote it
            if (draft.directory / name).is_file():
                self.storage.put(draft.directory / name, f"{draft.name}/{name}")
        self._check_files(draft.name, files, self.storage.find(draft.name))
        if draft.staging is None:
            for directory in {(draft.directory / name).parent for name in files}:
                sync_directory(directory)

    def abandon(self, draft: "Draft") -> None:
        """Remove what was written of a version that is not to be; with its manifest it is one, whatever happened."""
        draft.is_open = False
        draft.clear_staging()
        if not self.storage.exists(f"{draft.name}/{MANIFEST}"):
            self.storage.delete(draft.name)

    def remove(self, directory: str) -> None:
        """Remove a version: without its manifest the rest is nothing, wherever a crash stops this."""
        self.storage.delete(f"{directory}/{MANIFEST}")
        self.storage.delete(directory)

    def offer(self, number: int) -> bool:
        """Make a complete version the current one; False if a rollback holds the model, or it is not a newer one.

        Of two who offer at once the older version may come last: back goes only a rollback.
        """
        with self.changing() as check:
            # nobody collects it meanwhile
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
        """Go back to a version that is still there, and hold it until `resume`.

        Where the store has to load it first, the roll-out offers it when it has: until then it is only wanted.
        """
        with self.changing() as check:
            if number not in self.directories():
                there = _listed(self.versions())
                raise MissingVersionError(f"{self.location}: no version {number}; a rollback takes {there}")
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
        """Offer the version that a rollback wants; False if it is not wanted any more."""
        with self.changing() as check:
            state = self.state()
            if state is None or state.wanted != number:
                return False
            check()
            self.storage.write(CURRENT, Current(number, state.generation + 1, is_held=True).encode())
        return True

    def _check_files(self, directory: str, files: dict[str, FileEntry], found: dict[str, Stat]) -> None:
        """Every file of a version is there with its size."""
        for name, entry in files.items():
            stat = found.get(f"{directory}/{name}")
            where = join(self.location, directory, name)
            if stat is None:
                raise ModelError(f"{where}: named in the manifest but missing")
            if stat.num_bytes != entry.num_bytes:
                raise ModelError(f"{where}: expected {entry.num_bytes} bytes, got {stat.num_bytes}")

    def resume(self) -> Current:
        """Let new versions be offered again."""
        with self.changing() as check:
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
        """Versions that are kept until they are unpinned."""
        try:
            content = self.storage.read(PINS)
        except FileNotFoundError:
            return []
        try:
            return sorted({int(number) for number in json.loads(content)["versions"]})
        except DAMAGES:
            raise ModelError(
                f'{join(self.location, PINS)}: expected {{"versions": [N, …]}}, the file is damaged'
            ) from None

    def pin(self, number: int) -> None:
        """Keep a version and all it is made of."""
        with self.changing():
            self.chain(number)
            self._write_pins({*self.pins(), number})

    def unpin(self, number: int) -> None:
        """Let a version go with the others of its age."""
        with self.changing():
            pins = self.pins()
            if number not in pins:
                raise ConfigError(f"{self.location}: version {number} is not pinned; pinned: {_listed(pins)}")
            self._write_pins(set(pins) - {number})

    def _write_pins(self, numbers: set[int]) -> None:
        self.storage.write(PINS, json.dumps({"versions": sorted(numbers)}).encode())

    @contextlib.contextmanager
    def changing(self) -> Iterator[Check]:
        """Hold CURRENT, PINS and the collection of old versions for the moment of a change."""
        with held(self.storage, STATE, "changing", wait_s=_STATE_WAIT_S) as check:
            yield check


@dataclass
class Draft:
    """A version that is being written: files go into `directory`, then `Repository.commit` makes it one.

    As a context manager it removes what was written where the block ends without a commit.
    """

    repository: Repository
    number: int
    base: int | None
    parent: int | None
    directory: Path
    """The version's own on a disk of this machine, else one to upload from; `cube/` is there."""
    staging: Path | None
    is_open: bool = True

    @property
    def name(self) -> str:
        """The directory of the version in that of the model."""
        return directory_of(self.number, self.base)

    def clear_staging(self) -> None:
        """Remove what was only there to be uploaded."""
        if self.staging is not None:
            shutil.rmtree(self.staging, ignore_errors=True)

    def __enter__(self) -> "Draft":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.is_open:
            # what went wrong in the block is what matters
            with contextlib.suppress(OSError):
                self.repository.abandon(self)


def _listed(numbers: list[int], most: int = 12) -> str:
    """Numbers for people, the newest of many."""
    if not numbers:
        return "none"
    more = f"{len(numbers) - most} older, " if len(numbers) > most else ""
    return more + ", ".join(map(str, numbers[-most:]))
