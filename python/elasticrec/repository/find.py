"""Resolve MODEL on the command line: a directory, a URL, a name, a version of it, or a packed model."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST
from elasticrec.repository.fetch import FetchedVersion, default_cache, fetch
from elasticrec.repository.pack import is_pack, unpack, unpack_url
from elasticrec.repository.repository import CURRENT, Repository
from elasticrec.repository.storage import Storage, is_url
from elasticrec.repository.version import decode_version, number_of

# Default repository, where models are found by name.
MODELS = Path("models")

_WITH_VERSION = re.compile(r"(.*[^:/]):([1-9][0-9]{0,17})")
_VERSION_URL = re.compile(r"(.+?)/([1-9][0-9]{0,17}(?:/deltas/[1-9][0-9]{0,17})?)")


@dataclass(frozen=True)
class ModelReference:
    """A model, and a version if one was named."""

    repository: Repository
    number: int | None

    def version(self) -> int:
        """Return the named version, or the current one."""
        if self.number is not None:
            return self.number
        current = self.repository.current()
        if current is None:
            raise ModelError(missing_model_text(self.repository.location))
        return current


def open_model(text: str, *, insecure: bool = False) -> ModelReference:
    """Resolve MODEL or MODEL:VERSION."""
    if is_pack(text):
        found = unpack_url(text, default_cache()) if is_url(text) else unpack(Path(text), default_cache())
        return ModelReference(Repository.open(found), None)
    if is_url(text):
        return _open_url(text, insecure)
    path = Path(text)
    match = _WITH_VERSION.fullmatch(text)
    number = None
    if match is not None and not path.exists():
        path, number = Path(match[1]), int(match[2])
    if (path / MANIFEST).is_file():
        return _open_version_directory(path)
    if _is_name(path):
        path = MODELS / path
    if not path.is_dir():
        raise ModelError(f"{path}: no such model, expected <repository>/<model> or <repository>/<model>/<version>")
    return ModelReference(Repository.open(path), number)


def _is_name(path: Path) -> bool:
    """Return whether a path is the name of a model. Names take precedence over directories, which may hold data."""
    return len(path.parts) == 1 and (MODELS / path).is_dir() and not (path / CURRENT).is_file()


def _open_url(text: str, insecure: bool) -> ModelReference:
    match = _WITH_VERSION.fullmatch(text)
    if match is not None:
        return ModelReference(Repository.open(match[1], insecure=insecure), int(match[2]))
    inner = _VERSION_URL.fullmatch(text.rstrip("/"))
    if inner is not None and Repository.open(text, insecure=insecure).storage.exists(MANIFEST):
        return ModelReference(Repository.open(inner[1], insecure=insecure), number_of(inner[2]))
    return ModelReference(Repository.open(text, insecure=insecure), None)


def _open_version_directory(path: Path) -> ModelReference:
    """Resolve the directory of a version; the model's directory contains it."""
    name = _name_of(path)
    number = number_of(name)
    if number is None:
        raise ModelError(f"{path}: not inside a model, expected <repository>/<model>/<version>")
    return ModelReference(Repository.open(_model_directory(path, name)), number)


def _model_directory(path: Path, name: str) -> Path:
    """Return the model's directory above a version's directory, spelled as the user wrote it if possible."""
    depth = name.count("/")
    written = path if len(path.parts) > depth + 1 and ".." not in path.parts else path.resolve()
    return written.parents[depth]


def _name_of(path: Path) -> str:
    """Return the name of a version's directory, relative to its model."""
    parts = path.resolve().parts
    delta = "/".join(parts[-3:])
    return delta if number_of(delta) is not None else parts[-1]


def find_version(model: str | Path) -> tuple[Path, dict[str, Any]]:
    """Fetch the named or the current version. Return its local directory and its manifest."""
    fetched = find_chain(model)
    return fetched.directory, fetched.version.manifest


def find_chain(model: str | Path) -> FetchedVersion:
    """Fetch the named or the current version with its chain."""
    text = str(model)
    path = Path(text)
    if not is_url(text) and (path / MANIFEST).is_file():
        name = _name_of(path)
        model = _model_directory(path, name)
        version = decode_version((path / MANIFEST).read_bytes(), name, str(model))
        if not version.is_delta:
            # A base may be a copy outside of a model.
            return FetchedVersion(model, [version])
    reference = open_model(text)
    return fetch(reference.repository, reference.version(), default_cache())


def missing_model_text(location: str) -> str:
    """Return the error text for a location without a current version."""
    path = Path(location)
    inside = sorted(entry.name for entry in path.iterdir() if (entry / CURRENT).is_file()) if path.is_dir() else []
    hint = f"; models in it: {', '.join(inside)}" if inside else ""
    return f"{location}: not a model, expected `{CURRENT}` or `{MANIFEST}` in it{hint}"


def open_listing(text: str) -> list[Repository]:
    """Return the named model, or all models of a repository."""
    if not is_url(text) and (_is_name(Path(text)) or not Path(text).is_dir()):
        return [open_model(text).repository]
    repository = Repository.open(text)
    if repository.state() is not None or repository.versions():
        return [repository]
    names = models_in(repository.storage)
    if not names:
        raise ModelError(f"{text}: no models in it")
    return [Repository(repository.storage.subdirectory(name)) for name in names]


def models_in(storage: Storage) -> list[str]:
    """Return the names of the models in a repository."""
    found = set()
    for name in storage.find():
        model, _, inner = name.partition("/")
        directory, _, last = inner.rpartition("/")
        if inner == CURRENT or (last == MANIFEST and number_of(directory) is not None):
            found.add(model)
    return sorted(found)
