"""The process of a parameter server: a shard in Rust on a socket, and a thread that keeps its lease."""

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elasticrec import _core
from elasticrec.config.train import ParameterServers
from elasticrec.durable import write_synced
from elasticrec.errors import ConfigError, ElasticRecError, UnavailableError
from elasticrec.machine import resident_bytes
from elasticrec.net.messages import FencedError, MovedError, SurplusError
from elasticrec.net.metrics import MetricsServer
from elasticrec.repository.http import HttpStorage
from elasticrec.repository.storage import open_storage
from elasticrec.roles.member import Answer, ListenAddress, RoleOptions, ShutdownRequest, join
from elasticrec.roles.metrics import shard_text
from elasticrec.roles.start import Start, read_start
from elasticrec.roles.writing import Writing, file_entry
from elasticrec.training.metrics import MetricSums

Say = Callable[[str], None]

# Between two looks at the metric sums.
_TRAINING_S = 1.0

# Between two signs of life.
_SOONEST_S = 0.05


# Each push of a server with too much memory waits so long.
_PAUSE_S = 0.02
# Of the limit: beside its rows a table has spare room, and a snapshot copies.
_TOO_MUCH = 1.5


class DamagedError(ElasticRecError):
    """A checkpoint that cannot be loaded."""


class _ReloadError(Exception):
    """All shards go back to the last checkpoint."""


class ShardProcess:
    """Registers, loads, serves and stops as the coordinator says."""

    def __init__(self, options: RoleOptions, listening: ListenAddress, say: Say, settings: ParameterServers) -> None:
        self._options, self._listening = options, listening
        self._tls = options.security.wire()
        self._memory_bytes, self._threads = settings.memory_bytes, settings.threads
        self._base_bytes = resident_bytes()
        self._say = say
        self._start: Start = read_start(options.run)
        self.shutdown = ShutdownRequest()
        self._client = self.shutdown.watch(options.client())
        self._metrics = MetricsServer(self._metrics_text, token=options.security.token or "", port=options.metrics_port)
        self._lease_until = 0.0
        self._started = time.monotonic()
        self._server: _core.PsServer | None = None
        self._snapshots, self._publishes = Writing("snapshot"), Writing("publish")
        self._watermark = 0
        self._boundaries: list[Answer] = []
        self._skipped: list[int] = []
        self._sequence = 0
        self._place: Answer = {}
        self._failure: ElasticRecError | OSError | None = None
        self._training_due = 0.0
        self._last_training: Answer = {}

    def run(self) -> None:
        """Serve until the coordinator says stop; a shard that was replaced raises `FencedError`."""
        damaged: dict[str, str] = {}
        while True:
            try:
                self._place = join(
                    self._client,
                    "ps",
                    self._options.index,
                    self.shutdown,
                    run=self._start.run_id,
                    damaged=damaged,
                )
            except SurplusError as error:
                if not self._place:
                    raise
                self._say(f"shard {self._place['index']}: is not needed any more: {error}")
                return
            self._boundaries, self._skipped = self._place["boundaries"], self._place["skipped"]
            self._failure = None
            try:
                self._serve()
            except DamagedError as error:
                # the coordinator looks for itself, and offers the one before
                damaged[self._place["checkpoint"]["name"]] = str(error)
                self._say(f"shard {self._place['index']}: {error}")
            except MovedError as error:
                self._say(f"shard {self._place['index']}: {error}")
            except _ReloadError:
                self._say(f"shard {self._place['index']}: goes back to the last checkpoint with the others")
            else:
                return
            finally:
                with contextlib.suppress(UnavailableError):
                    self._sequence += 1
                    self._client.heartbeat(self._place["incarnation"], self._sequence, leaving=True)

    def _serve(self) -> None:
        loading = threading.Thread(target=self._try_to_load, name="load")
        loading.start()
        try:
            while self._beat():
                pass
        finally:
            loading.join()
            if self._server is not None:
                self._server.end_lease()
                self._server.stop()
            self._server = None
            self._snapshots.forget()
            self._publishes.forget()

    def _try_to_load(self) -> None:
        try:
            self._load()
        except (ElasticRecError, OSError) as error:
            self._failure = error

    def _load(self) -> None:
        """Make the server, with the rows of the newest checkpoint if there is one."""
        place = self._place
        owned = range(*place["partitions"])
        checkpoint = place["checkpoint"]
        files = [(part["rows"], part["dense"]) for part in checkpoint["parts"]] if checkpoint else []
        started = time.monotonic()
        server = _core.PsServer(
            self._start.shard_spec(owned),
            address=self._listening.address,
            run=self._start.run_id,
            token=self._options.security.token or "",
            incarnation=place["incarnation"],
            epoch=place["epoch"],
            threads=self._threads,
            files=files,
            dense=None if files else self._start.dense_of(owned),
            steps=self._start.steps,
            rows=None if files else self._start.rows or None,
            tls=self._tls,
        )
        if self._memory_bytes is not None:
            try:
                server.limit_memory(self._memory_bytes)
            except ConfigError as error:
                raise ConfigError(f"train.ps.memory_bytes: {error}") from None
        server.set_boundaries(json.dumps(self._boundaries))
        server.skip_units(self._skipped)
        seconds = time.monotonic() - started
        what = "started empty"
        if checkpoint or self._start.warm:
            name = checkpoint["name"] if checkpoint else self._start.warm["checkpoint"]
            what = f"loaded {name} in {seconds:.1f} s"
        self._started = time.monotonic()
        self._say(f"shard {place['index']}: {what}, partitions {owned.start} to {owned.stop - 1}, on {server.address}")
        self._server = server

    def _beat(self) -> bool:
        """One sign of life; false when it is to stop."""
        server = self._server
        if self.shutdown.is_requested():
            return False
        if self._failure is not None:
            if self._place["checkpoint"] and not isinstance(self._failure, ConfigError):
                raise DamagedError(str(self._failure))
            raise self._failure
        self._sequence += 1
        asked = _core.Moment()
        more: Answer = {"state": "loading", "figures": self._own_figures()}
        if server is not None:
            if server.failure is not None:
                raise ElasticRecError(server.failure)
            if self._memory_bytes is not None:
                # rows have their own limit: beyond it are copies for the disk, which need a while
                most = self._base_bytes + _TOO_MUCH * self._memory_bytes
                server.slow_down(_PAUSE_S if resident_bytes() > most else 0.0)
            more = {
                "state": "serving",
                "address": self._listening.announced(server.address),
                "boundaries": len(self._boundaries),
                "skipped": len(self._skipped),
                "status": json.loads(server.status()),
                "snapshot": self._snapshots.told,
                "publish": self._publishes.told,
                "figures": self._figures(server),
            }
        try:
            answer = self._client.heartbeat(self._place["incarnation"], self._sequence, **more)
        except FencedError:
            raise
        except UnavailableError as error:
            # it may be started again; without it the lease runs out by itself
            self._say(f"shard {self._place['index']}: {error}")
            return True
        if server is not None:
            server.extend_lease(asked, answer["lease_s"])
            self._lease_until = self._client.sent_at + answer["lease_s"]
        for command in answer["commands"]:
            if command["command"] == "stop":
                return False
            if command["command"] == "reload":
                raise _ReloadError
            self._obey(command)
        self._rest(answer["next_s"])
        return True

    def _rest(self, next_s: float) -> None:
        """Until the next sign of life, which comes sooner when a unit is complete: somebody may wait for that."""
        self.shutdown.wait(min(next_s, _SOONEST_S))
        server, left_s = self._server, next_s - _SOONEST_S
        if server is None or self.shutdown.is_requested():
            self.shutdown.wait(max(left_s, 0.0))
        elif left_s > 0:
            self._watermark = server.wait_for_units(self._watermark, left_s)

    def _figures(self, server: _core.PsServer) -> Answer:
        return {**server.counters(), **self._own_figures(), **self._training(server)}

    def _training(self, server: _core.PsServer) -> Answer:
        """Metrics of the training, made anew now and then: it takes milliseconds, and signs of life may follow fast."""
        if time.monotonic() < self._training_due:
            return self._last_training
        self._training_due = time.monotonic() + _TRAINING_S
        figures: Answer = {}
        now, before = server.sums()
        if len(now):
            # a pass that has just begun says nothing yet
            sums = now if now.any() else before
            figures |= {"records": int(sums[-2]), "bad_records": int(sums[-1])}
            for label, one in enumerate(MetricSums.of_flat(sums)):
                result = one.result()
                figures[f"samples_{label}"] = result.samples
                figures |= {f"auc_{label}": result.auc or 0.0, f"log_loss_{label}": result.log_loss or 0.0}
                figures[f"copc_{label}"] = result.copc or 0.0
        self._last_training = figures
        return figures

    def _own_figures(self) -> Answer:
        uptime_s = round(time.monotonic() - self._started, 1)
        return {**self._options.figures(), "metrics": self._metrics.url, "uptime_s": uptime_s}

    def _metrics_text(self) -> str:
        server = self._server
        figures: Answer = {
            "serving": int(server is not None),
            "lease_left_s": max(self._lease_until - time.monotonic(), 0.0) if server is not None else 0.0,
            **self._snapshots.figures(),
            **self._publishes.figures(),
        }
        if server is not None:
            figures |= {**server.counters(), **json.loads(server.status())}
        return shard_text(self._place.get("index", self._options.index or 0), figures)

    def _obey(self, command: Answer) -> None:
        server = self._server
        if server is None:
            return
        if command["command"] == "boundaries":
            self._boundaries = command["boundaries"]
            server.set_boundaries(json.dumps(self._boundaries))
        elif command["command"] == "skip":
            self._skipped = command["units"]
            server.skip_units(self._skipped)
        elif command["command"] == "snapshot":
            whose = {"checkpoint": command["checkpoint"], "incarnation": self._place["incarnation"]}
            self._snapshots.start(whose, lambda: _write_snapshot(server, command))
        elif command["command"] == "publish":
            whose = {"publish": command["publish"], "incarnation": self._place["incarnation"]}
            security = self._options.security
            ca = None if security.ca is None else str(security.ca)
            files = HttpStorage(f"{self._options.coordinator}/files", security.token or "", ca, security.insecure)
            self._publishes.start(whose, lambda: _write_publish(server, command, files))


def _write_snapshot(server: _core.PsServer, command: Answer) -> Answer:
    """Write this shard's part of a checkpoint."""
    rows, dense = server.snapshot(command["rows"], command["dense"])
    return {"rows": file_entry(*rows), "dense": file_entry(*dense)}


def _write_publish(server: _core.PsServer, command: Answer, files: HttpStorage) -> Answer:
    """Write this shard's part of a version, its dense values beside it; where they belong, or sent there."""
    place = Path(command["cube"])
    if place.parent.is_dir():
        return _write_parts(server, command, place, Path(command["dense"]))
    # the directory was made for this version: who does not see it shares no disk with the coordinator
    store = files if command["store"] is None else open_storage(command["store"], insecure=files.insecure)
    with tempfile.TemporaryDirectory(prefix="elasticrec-publish-") as scratch:
        cube, dense = Path(scratch, place.name), Path(scratch, Path(command["dense"]).name)
        written = _write_parts(server, command, cube, dense)
        store.put(cube, f"{command['name']}/{place.parent.name}/{cube.name}")
        store.put(dense, f"{command['name']}/{dense.name}")
    return written


def _write_parts(server: _core.PsServer, command: Answer, cube: Path, dense: Path) -> Answer:
    figures, values = server.publish(
        command["publish"],
        committed=command["committed"],
        is_base=command["base"],
        row_type=command["row_type"],
        path=str(cube),
    )
    entry = file_entry(figures.pop("bytes"), figures.pop("sha256"))
    return {"cube": entry, "dense": file_entry(*write_synced(dense, values.tobytes())), **figures}
