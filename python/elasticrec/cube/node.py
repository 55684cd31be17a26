"""One process of the online store: it watches a repository, holds a shard's rows and answers, in Rust, for them."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elasticrec import _core
from elasticrec.cube.http import Sought, make_app
from elasticrec.cube.loader import Loader
from elasticrec.cube.metrics import node_text
from elasticrec.errors import ConfigError, ModelError, UnavailableError
from elasticrec.machine import resident_bytes
from elasticrec.net.security import Security
from elasticrec.net.server import ListenOptions, WebServer
from elasticrec.repository.repository import Repository

Say = Callable[[str], None]

# At the end a look that is under way has so long.
_LAST_LOOK_S = 1.0


@dataclass(frozen=True)
class NodeOptions:
    """Which shard, of which model, where."""

    repository: Repository
    shard: int
    num_shards: int
    host: str
    port: int
    http_port: int
    security: Security
    cache: Path
    keep: int
    poll_s: float


def partitions_of(shard: int, num_shards: int, num_partitions: int) -> range:
    """The partitions of a shard; each is one's."""
    return range(shard * num_partitions // num_shards, (shard + 1) * num_partitions // num_shards)


class StoreNode:
    """Looks, loads, answers, until it is stopped."""

    def __init__(self, options: NodeOptions, say: Say) -> None:
        options.security.check_listen("cube", options.host)
        self._options, self._say = options, say
        self._started = time.monotonic()
        self._noticed, self._stopping = threading.Event(), threading.Event()
        self._next_look = time.monotonic()
        self._server: _core.CubeServer | None = None
        self._loader: Loader | None = None
        self._problem: str | None = None
        self._error: Exception | None = None
        security = options.security
        place = ListenOptions("cube", options.host, options.http_port, security.cert, security.key)
        self._web = WebServer(make_app(self, security.token), place)
        self.url = self._web.url

    def run(self) -> None:
        """Serve until `stop`; then what is being answered ends first."""
        self._web.start()
        looking = threading.Thread(target=self._follow, name="cube-look", daemon=True)
        looking.start()
        try:
            self._stopping.wait()
            # one that hangs, because the repository does, is not waited for
            looking.join(_LAST_LOOK_S)
            if self._error is not None:
                raise self._error
        finally:
            self._web.stop()
            if self._server is not None:
                self._say("stopping: answering what was asked")
                self._server.stop()

    def _follow(self) -> None:
        """Look again and again; what ends it ends the process."""
        try:
            while not self._stopping.is_set():
                # before the look: what is told meanwhile may be too late for it
                self._noticed.clear()
                self._look()
                self._next_look = time.monotonic() + self._options.poll_s
                self._tell()
                self._noticed.wait(self._options.poll_s)
        except Exception as error:
            self._error = error
            self._stopping.set()

    def stop(self) -> None:
        """End; for signal handlers."""
        self._stopping.set()
        self._noticed.set()

    def notice(self) -> None:
        """Look for new versions now."""
        self._noticed.set()

    def _look(self) -> None:
        if self._loader is None:
            self._begin()
        if self._loader is not None:
            self._loader.look()
            self._tell()

    def _begin(self) -> None:
        """Listen for clients once a first version says how many partitions there are."""
        options = self._options
        try:
            num_partitions = self._num_partitions()
            if num_partitions is None:
                return
            owned = partitions_of(options.shard, options.num_shards, num_partitions)
            if not owned:
                raise ConfigError(
                    f"cube: shards: expected at most {num_partitions}, the partitions of the model, "
                    f"got {options.num_shards}"
                )
            server = _core.CubeServer(
                options.repository.name,
                address=address_of(options.host, options.port),
                token=options.security.token or "",
                tls=options.security.wire(),
                partitions=(owned.start, owned.stop),
                num_partitions=num_partitions,
            )
        except (ModelError, OSError) as error:
            self._note(str(error))
            return
        self._say(f"shard {options.shard} of {options.num_shards}: partitions {owned.start} to {owned.stop - 1}")
        self._server = server
        self._loader = Loader(
            options.repository, server, options.cache, options.keep, self._say, self._tell, partitions=owned
        )

    def _num_partitions(self) -> int | None:
        """Of the version that is offered, else of the newest that can be read; None before there is one."""
        repository = self._options.repository
        versions = repository.versions()
        if not versions:
            self._note(f"waiting for the first version in {repository.location}")
            return None
        offered = repository.current()
        first = [offered] if offered in versions else []
        problem: ModelError | None = None
        for version in dict.fromkeys([*first, *reversed(versions)]):
            try:
                return int(repository.version(version).manifest["table"]["partitions"])
            except ModelError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _note(self, problem: str) -> None:
        """Why it does not listen yet, once."""
        if problem != self._problem:
            self._problem = problem
            self._say(problem)

    def _tell(self) -> None:
        """Let whoever greets the server know how it is."""
        if self._server is not None:
            self._server.set_about(json.dumps(self._about()))

    def _about(self) -> dict[str, Any]:
        assert self._loader is not None
        return {**self._loader.status(), "http": self.url}

    @property
    def address(self) -> str | None:
        """Where clients find it, once it listens."""
        return None if self._server is None else self._server.address

    def is_ready(self) -> bool:
        """Whether it has the version that is offered, or any while none is."""
        loader, server = self._loader, self._server
        if loader is None or server is None:
            return False
        versions = server.versions()
        return bool(versions) and (loader.current is None or loader.current.version in versions)

    def seek(self, signs: list[int]) -> Sought:
        """Rows of the version that is offered; signs of other shards are refused."""
        loader, server = self._loader, self._server
        versions = [] if server is None else server.versions()
        if server is None or loader is None or not versions:
            raise UnavailableError("cube: no version is loaded yet")
        version = None if loader.current is None else loader.current.version
        if version is None or version not in versions:
            what = "no version is offered" if version is None else f"version {version} is not loaded"
            raise UnavailableError(f"cube: {what} yet")
        rows, is_there = server.seek(version, np.asarray(signs, np.uint64))
        return Sought(version, rows, is_there.tolist())

    def status(self) -> dict[str, Any]:
        """All there is to know."""
        options, server, loader = self._options, self._server, self._loader
        now = time.monotonic()
        return {
            "model": options.repository.name,
            "repository": options.repository.location,
            "shard": options.shard,
            "shards": options.num_shards,
            "address": self.address,
            "ready": self.is_ready(),
            "next_look_s": round(max(self._next_look - now, 0.0), 2),
            "uptime_s": round(now - self._started, 1),
            "memory_bytes": resident_bytes(),
            **({"versions": [], "problem": self._problem} if loader is None else loader.status()),
            **(
                {}
                if server is None
                else {
                    "held": {str(version): figures for version, figures in server.held()},
                    "counters": server.counters(),
                }
            ),
        }

    def metrics(self) -> str:
        """For Prometheus."""
        latency = None if self._server is None else self._server.latency()
        return node_text(self.status(), latency)


def address_of(host: str, port: int) -> str:
    """Host and port as a listener takes them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
