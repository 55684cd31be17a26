"""The model repository: <root>/<model>/<version>/ and CURRENT, the one small object that says which is served."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.durable import hold, write_atomically
from elasticrec.errors import ModelError
from elasticrec.manifest import MANIFEST, read_manifest

CURRENT = "CURRENT"
KIND = "model"


@dataclass(frozen=True)
class Repository:
    """The versions of one model."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.path.name

    def versions(self) -> list[int]:
        """Complete versions, oldest first."""
        return sorted(int(path.parent.name) for path in self.path.glob(f"*/{MANIFEST}") if path.parent.name.isdecimal())

    def version_path(self, version: int) -> Path:
        """Directory of a version."""
        return self.path / str(version)

    def current(self) -> int | None:
        """The version that CURRENT names."""
        current = self._read_current()
        return None if current is None else current[0]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the model for one writer; a second one is refused."""
        self.path.mkdir(parents=True, exist_ok=True)
        with hold(self.path / ".lock", f"{self.path}: another process is publishing it"):
            yield

    def begin(self) -> tuple[int, Path]:
        """A new version's number and empty directory; what a crash left of that number is removed."""
        # one that is damaged would make the version that is about to be written useless
        self.current()
        versions = self.versions()
        version = versions[-1] + 1 if versions else 1
        path = self.version_path(version)
        if path.exists():
            shutil.rmtree(path)
        (path / "cube").mkdir(parents=True)
        return version, path

    def offer(self, version: int) -> None:
        """Make a complete version the current one."""
        read_manifest(self.version_path(version), KIND)
        _, generation = self._read_current() or (None, 0)
        content = {"version": version, "generation": generation + 1}
        write_atomically(self.path / CURRENT, json.dumps(content).encode())

    def _read_current(self) -> tuple[int, int] | None:
        """Version and generation."""
        path = self.path / CURRENT
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_bytes())
            return int(content["version"]), int(content["generation"])
        except (ValueError, KeyError, TypeError):
            raise ModelError(
                f'{path}: expected {{"version": N, "generation": N}}, the file is damaged; remove it and publish'
            ) from None


def find_version(path: Path) -> tuple[Path, dict[str, Any]]:
    """The directory and manifest of a version, from that directory or from its model's (then the current one)."""
    if (path / MANIFEST).is_file():
        return path, read_manifest(path, KIND)
    repository = Repository(path)
    if not path.is_dir():
        raise ModelError(f"{path}: no such model, expected <repository>/<model> or <repository>/<model>/<version>")
    version = repository.current()
    if version is None:
        inside = sorted(entry.name for entry in path.iterdir() if (entry / CURRENT).is_file())
        hint = f"; models in it: {', '.join(inside)}" if inside else ""
        raise ModelError(f"{path}: not a model, expected `{CURRENT}` or `{MANIFEST}` in it{hint}")
    return repository.version_path(version), read_manifest(repository.version_path(version), KIND)
