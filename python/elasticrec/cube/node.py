"""One process of the online store: it polls a repository, loads a shard's rows, and answers lookups in Rust."""

import json
import logging
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from elasticrec import _core
from elasticrec.cube.http import LookupResult, make_app
from elasticrec.cube.loader import Loader
from elasticrec.cube.metrics import node_text
from elasticrec.errors import ConfigError, ModelError, UnavailableError
from elasticrec.machine import resident_bytes
from elasticrec.net.logs import RepeatFilter
from elasticrec.net.placement import partitions_of
from elasticrec.net.security import Security
from elasticrec.net.server import ListenOptions, WebServer, join_host_port
from elasticrec.repository.repository import Repository

# Time for a poll in progress to end at shutdown.
_LAST_POLL_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeOptions:
    """The shard, its model, and the addresses to listen on."""

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


class StoreNode:
    """Polls, loads and serves until it is stopped."""

    def __init__(self, options: NodeOptions) -> None:
        options.security.check_listen("cube", options.host)
        self._options = options
        self._started = time.monotonic()
        self._notified, self._stopping = threading.Event(), threading.Event()
        self._next_poll = time.monotonic()
        self._server: _core.CubeServer | None = None
        self._loader: Loader | None = None
        # Why the process does not listen yet.
        self._problems = RepeatFilter(logger.info)
        self._error: Exception | None = None
        security = options.security
        listening = ListenOptions("cube", options.host, options.http_port, security.cert, security.key)
        self._web = WebServer(make_app(self, security.token), listening)
        self.url = self._web.url

    def run(self) -> None:
        """Serve until `stop` is called, then finish the requests in flight."""
        self._web.start()
        polling = threading.Thread(target=self._poll_until_stopped, name="cube-poll", daemon=True)
        polling.start()
        try:
            self._stopping.wait()
            # Do not wait for a poll that hangs with its repository.
            polling.join(_LAST_POLL_S)
            if self._error is not None:
                raise self._error
        finally:
            self._web.stop()
            if self._server is not None:
                logger.info("stopping: finishing requests in flight")
                self._server.stop()

    def _poll_until_stopped(self) -> None:
        """Poll the repository; an error ends the process."""
        try:
            while not self._stopping.is_set():
                # Clear before the poll: a notice that arrives during the poll may need another one.
                self._notified.clear()
                self._poll()
                self._next_poll = time.monotonic() + self._options.poll_s
                self._update_status()
                self._notified.wait(self._options.poll_s)
        except Exception as error:
            self._error = error
            self._stopping.set()

    def stop(self) -> None:
        """Stop the process; may be called from a signal handler."""
        self._stopping.set()
        self._notified.set()

    def poll_now(self) -> None:
        """Poll the repository now."""
        self._notified.set()

    def _poll(self) -> None:
        if self._loader is None:
            self._start_server()
        if self._loader is not None:
            self._loader.poll()
            self._update_status()

    def _start_server(self) -> None:
        """Listen for clients once the first version shows the number of partitions."""
        options = self._options
        try:
            num_partitions = self._num_partitions()
            if num_partitions is None:
                return
            owned = partitions_of(options.shard, options.num_shards, num_partitions)
            if not owned:
                raise ConfigError(
                    f"cube: shards: expected at most {num_partitions}, the number of partitions, "
                    f"got {options.num_shards}"
                )
            server = _core.CubeServer(
                options.repository.name,
                address=join_host_port(options.host, options.port),
                token=options.security.token or "",
                tls=options.security.wire_tls(),
                partitions=(owned.start, owned.stop),
                num_partitions=num_partitions,
            )
        except (ModelError, OSError) as error:
            self._problems.write(str(error))
            return
        logger.info(
            "shard %d of %d: partitions %d to %d", options.shard, options.num_shards, owned.start, owned.stop - 1
        )
        self._server = server
        self._loader = Loader(
            options.repository, server, options.cache, options.keep, self._update_status, partitions=owned
        )

    def _num_partitions(self) -> int | None:
        """Return the partitions of the current version or of the newest readable one; None without versions."""
        repository = self._options.repository
        versions = repository.versions()
        if not versions:
            self._problems.write(f"waiting for the first version in {repository.location}")
            return None
        current = repository.current()
        first = [current] if current in versions else []
        problem: ModelError | None = None
        for version in dict.fromkeys([*first, *reversed(versions)]):
            try:
                return int(repository.version(version).manifest["table"]["partitions"])
            except ModelError as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _update_status(self) -> None:
        """Update the description that clients receive with the inventory."""
        if self._server is not None:
            self._server.set_about(json.dumps(self._about()))

    def _about(self) -> dict[str, Any]:
        assert self._loader is not None
        return {**self._loader.status(), "http": self.url}

    @property
    def address(self) -> str | None:
        """The address for clients, None until the process listens."""
        return None if self._server is None else self._server.address

    def is_ready(self) -> bool:
        """Whether the current version is loaded, or any version while none is current."""
        loader, server = self._loader, self._server
        if loader is None or server is None:
            return False
        versions = server.versions()
        return bool(versions) and (loader.current is None or loader.current.version in versions)

    def seek(self, signs: list[int]) -> LookupResult:
        """Look up rows of the current version; refuse signs of other shards."""
        loader, server = self._loader, self._server
        versions = [] if server is None else server.versions()
        if server is None or loader is None or not versions:
            raise UnavailableError("cube: no version is loaded yet")
        version = None if loader.current is None else loader.current.version
        if version is None or version not in versions:
            what = "no version is offered" if version is None else f"version {version} is not loaded"
            raise UnavailableError(f"cube: {what} yet")
        rows, is_there = server.seek(version, np.asarray(signs, np.uint64))
        return LookupResult(version, rows, is_there.tolist())

    def status(self) -> dict[str, Any]:
        """Return the status for the HTTP API."""
        options, server, loader = self._options, self._server, self._loader
        now = time.monotonic()
        return {
            "model": options.repository.name,
            "repository": options.repository.location,
            "shard": options.shard,
            "shards": options.num_shards,
            "address": self.address,
            "ready": self.is_ready(),
            "next_look_s": round(max(self._next_poll - now, 0.0), 2),
            "uptime_s": round(now - self._started, 1),
            "memory_bytes": resident_bytes(),
            **({"versions": [], "problem": self._problems.last} if loader is None else loader.status()),
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
        """Return the metrics in the text format of Prometheus."""
        latency = None if self._server is None else self._server.latency()
        return node_text(self.status(), latency)
