"""Garbage collection: remove old versions, but never a version that is in use."""

import time
from dataclasses import dataclass

from elasticrec.manifest import MANIFEST
from elasticrec.repository.repository import Repository
from elasticrec.repository.storage import Stat
from elasticrec.repository.version import directory_of, number_of

# Uncommitted versions without a write for this long were left by a crash.
_ABANDONED_S = 3600.0


@dataclass(frozen=True)
class Collection:
    """The versions that a collection keeps and removes."""

    kept: dict[int, str]
    """Versions that are kept, with the reason."""
    removed: list[int]
    """Versions that are removed, newest first, so that deltas go before their parents."""
    abandoned: list[str]
    """Directories of versions that were never committed."""
    num_bytes: int
    """Total size of the removed files."""


def plan_collection(repository: Repository, keep: int, now_s: float | None = None) -> Collection:
    """Return what a collection would do now."""
    files = repository.storage.find()
    directories = {
        number: directory
        for file in files
        for directory, _, last in [file.rpartition("/")]
        if last == MANIFEST and (number := number_of(directory)) is not None
    }
    kept = _versions_to_keep(repository, directories, keep)
    removed = sorted(set(directories) - set(kept), reverse=True)
    abandoned = _abandoned_directories(files, set(directories.values()), time.time() if now_s is None else now_s)
    gone = [directories[number] for number in removed] + abandoned
    num_bytes = sum(stat.num_bytes for file, stat in files.items() if _owner_of(file) in gone)
    return Collection(dict(sorted(kept.items())), removed, abandoned, num_bytes)


def collect(repository: Repository, keep: int, now_s: float | None = None) -> Collection:
    """Plan and run a collection under the lock of CURRENT and PINS."""
    with repository.lock_state():
        plan = plan_collection(repository, keep, now_s)
        directories = repository.directories()
        for number in plan.removed:
            repository.remove(directories[number])
        for directory in [*plan.abandoned, *_empty_directories(repository, time.time() if now_s is None else now_s)]:
            repository.remove(directory)
    return plan


def _versions_to_keep(repository: Repository, directories: dict[int, str], keep: int) -> dict[int, str]:
    bases = sorted(number for number, directory in directories.items() if directory == str(number))
    kept: dict[int, str] = {}
    for base in bases[-keep:]:
        for number, directory in directories.items():
            if directory in (str(base), directory_of(number, base)):
                kept[number] = f"one of the {keep} newest bases" if number == base else f"delta of base {base}"
    state = repository.state()
    roots = {number: "pinned" for number in repository.pins()}
    if state is not None:
        roots[state.version] = "current"
        if state.wanted is not None:
            roots[state.wanted] = "wanted by a rollback"
    for root, why in roots.items():
        if root in directories:
            # A broken chain raises an error here: nothing is removed until the user has repaired it.
            for version in repository.chain(root):
                kept.setdefault(version.number, f"version {root} needs it")
            kept[root] = why
    return kept


def _empty_directories(repository: Repository, now_s: float) -> list[str]:
    """Return old empty directories of versions on a disk; other storage has none."""
    root = repository.storage.path_of("")
    if root is None:
        return []
    found = [path for path in (*root.glob("*/deltas/*"), *root.glob("*")) if path.is_dir()]
    names = {path.relative_to(root).as_posix(): path.stat().st_mtime for path in found}
    old = [name for name, modified_s in names.items() if number_of(name) and now_s - modified_s > _ABANDONED_S]
    return [name for name in old if not repository.storage.find(name)]


def _owner_of(file: str) -> str | None:
    """Return the innermost version directory that contains a file, complete or not."""
    parts = file.split("/")
    for length in (3, 1):
        directory = "/".join(parts[:length])
        if len(parts) > length and number_of(directory) is not None:
            return directory
    return None


def _abandoned_directories(files: dict[str, Stat], complete: set[str], now_s: float) -> list[str]:
    newest: dict[str, float] = {}
    for file, stat in files.items():
        owner = _owner_of(file)
        if owner is not None and owner not in complete:
            newest[owner] = max(newest.get(owner, 0.0), stat.modified_s or now_s)
    old = [directory for directory, modified_s in newest.items() if now_s - modified_s > _ABANDONED_S]
    # A base without a manifest that has complete deltas is damaged, not abandoned.
    return sorted(one for one in old if not any(other.startswith(f"{one}/") for other in complete))
