"""A complete online store for `bench cube`: a repository, `cube serve` for each replica, and `deliver`.

Versions take the normal path: files, checksums, a manifest, polls of the repository, a rollout.
"""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from elasticrec import _core
from elasticrec.errors import UnavailableError
from elasticrec.launch.local import reserve_port
from elasticrec.manifest import FileEntry
from elasticrec.repository.repository import Draft, Repository
from elasticrec.repository.version import Content, Version, part_name

MODEL = "bench"
_TIMEOUT_S = 120.0
_POLL_S = 0.002


class RealStore:
    """A store of one shard, whose processes run inside a `with` block."""

    def __init__(self, directory: Path, columns: Sequence[tuple[str, int]], num_partitions: int, replicas: int) -> None:
        self._directory = directory
        (directory / "models" / MODEL).mkdir(parents=True)
        self.repository = Repository.open(directory / "models", MODEL)
        self._table: dict[str, Any] = {
            "partitions": num_partitions,
            "columns": [{"name": name, "width": width} for name, width in columns],
        }
        self._processes = ExitStack()
        self._ports: list[int] = []
        for _ in range(replicas):
            listener, port = reserve_port()
            self._processes.enter_context(listener)
            self._ports.append(port)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the replicas."""
        return [f"127.0.0.1:{port}" for port in self._ports]

    def __enter__(self) -> Self:
        for port in self._ports:
            self._start("cube", "serve", f"models/{MODEL}", "--port", str(port))
        self._start("deliver", f"models/{MODEL}", "--address", ",".join(self.addresses))
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()

    def _start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "elasticrec", *arguments]
        silent = subprocess.DEVNULL
        process = self._processes.enter_context(
            subprocess.Popen(command, cwd=self._directory, stdout=silent, stderr=silent)
        )
        # Exits run in reverse order: kill the process, then wait for it.
        self._processes.callback(process.kill)

    def publish_base(self, part: Path, rows: int, entry: FileEntry | None = None) -> Version:
        """Publish a base with one part file, which is linked into it."""
        entry = entry or entry_of(part)
        with self.repository.begin() as draft:
            os.link(part, draft.directory / part_name(0))
            return self._commit(draft, entry, rows, changed=0)

    def publish_delta(self, parent: int, rows: int, changed: int, write: Callable[[Path], tuple[int, str]]) -> Version:
        """Publish a delta; `write` writes its part file."""
        with self.repository.begin_delta(parent) as draft:
            return self._commit(draft, FileEntry(*write(draft.directory / part_name(0))), rows, changed)

    def _commit(self, draft: Draft, part: FileEntry, rows: int, changed: int) -> Version:
        files = {part_name(0): part, **draft.write_network(bytes(8), b"none")}
        content = Content(
            run=MODEL,
            checkpoint="none",
            features={"format": "slots", "hash": 1, "slots": [{"name": "0", "pooling": "sum"}], "dense": []},
            rows=rows,
            inputs=["pooled"],
            tensors=[{"name": "w", "shape": [2], "offset": 0}],
            metrics={"train": [], "eval": None},
            data={"samples": 0, "until": None},
            changed=changed,
            **self._table,
        )
        return self.repository.commit(draft, content, files)

    def wait_for(self, version: int) -> None:
        """Wait until a version, or a newer one, is current."""
        self._wait(lambda: (self.repository.current() or 0) >= version, f"version {version} is not current")

    def wait_for_all(self, version: int) -> None:
        """Wait until every replica has a version and it is current."""
        self.wait_for(version)
        self._wait(
            lambda: all(version in _versions_of(address) for address in self.addresses),
            f"a replica does not have version {version}",
        )

    def _wait(self, is_reached: Callable[[], bool], problem: str) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while not is_reached():
            if time.monotonic() > end:
                raise UnavailableError(f"bench: {problem} after {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)

    def clients(self) -> list[_core.CubeClient]:
        """Return a client of each replica."""
        return [_core.CubeClient(MODEL, [[address]], token="", deadline_s=10.0) for address in self.addresses]


def entry_of(path: Path) -> FileEntry:
    """Return size and checksum of a file."""
    with open(path, "rb") as file:
        return FileEntry(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _versions_of(address: str) -> list[int]:
    """Return the versions of a replica; none while it does not answer."""
    try:
        return _core.probe_cube_server(address, MODEL, token="", timeout_s=2.0)[0]
    except UnavailableError:
        return []
