"""The process of a parameter server: a shard in Rust that answers on a socket, and heartbeats that renew its lease."""

import contextlib
import json
import logging
import tempfile
import threading
import time
from pathlib import Path

from elasticrec import _core
from elasticrec.config.train import METRICS, ParameterServers
from elasticrec.durable import write_synced
from elasticrec.errors import ConfigError, ElasticRecError, UnavailableError
from elasticrec.machine import resident_bytes
from elasticrec.net.messages import (
    Boundary,
    Command,
    FencedError,
    Figures,
    MovedError,
    PublishCommand,
    ShardRegistration,
    ShardReport,
    SnapshotCommand,
    SurplusError,
)
from elasticrec.net.metrics import MetricsServer
from elasticrec.repository.http import HttpStorage
from elasticrec.repository.storage import open_storage
from elasticrec.roles.background_writer import BackgroundWriter, Report, file_entry
from elasticrec.roles.member import ListenAddress, RoleOptions, ShutdownRequest, join
from elasticrec.roles.metrics import shard_text
from elasticrec.roles.start import Start, read_start
from elasticrec.training.metrics import MetricSums

# Interval between two computations of the training metrics.
_TRAINING_METRICS_S = 1.0
# The shortest interval between two heartbeats.
_MIN_HEARTBEAT_S = 0.05
# Delay of every push while the process uses too much memory.
_PUSH_DELAY_S = 0.02
# Memory at which pushes are delayed, as a multiple of the limit: tables reserve spare capacity, and snapshots copy.
_MAX_MEMORY_RATIO = 1.5

logger = logging.getLogger(__name__)


class DamagedCheckpointError(ElasticRecError):
    """A checkpoint that cannot be loaded."""


class _ReloadError(Exception):
    """The coordinator told all shards to return to the last checkpoint."""


class ShardProcess:
    """Registers with the coordinator, loads the shard's rows, serves them, and stops on command."""

    def __init__(self, options: RoleOptions, listening: ListenAddress, settings: ParameterServers) -> None:
        self._options, self._listening = options, listening
        self._tls = options.security.wire_tls()
        self._memory_bytes, self._threads = settings.memory_bytes, settings.threads
        self._base_bytes = resident_bytes()
        self._start: Start = read_start(options.run)
        self.shutdown = ShutdownRequest()
        self._client = self.shutdown.watch(options.client())
        self._metrics = MetricsServer(self._metrics_text, token=options.security.token or "", port=options.metrics_port)
        self._lease_until = 0.0
        self._started = time.monotonic()
        self._server: _core.PsServer | None = None
        self._snapshots, self._publishes = BackgroundWriter("snapshot"), BackgroundWriter("publish")
        self._watermark = 0
        self._boundaries: list[Boundary] = []
        self._skipped: list[int] = []
        self._sequence = 0
        self._registration: ShardRegistration | None = None
        self._failure: ElasticRecError | OSError | None = None
        self._training_metrics_due = 0.0
        self._training_metrics: Figures = {}

    def run(self) -> None:
        """Serve until the coordinator stops the shard; raise `FencedError` if the shard was replaced."""
        damaged: dict[str, str] = {}
        while True:
            try:
                registration = join(
                    lambda nonce: self._client.register_shard(
                        nonce, index=self._options.index, run=self._start.run_id, damaged=damaged
                    ),
                    self.shutdown,
                )
            except SurplusError as error:
                if self._registration is None:
                    raise
                logger.info("shard %d: no longer needed: %s", self._registration["index"], error)
                return
            self._registration = registration
            self._boundaries, self._skipped = registration["boundaries"], registration["skipped"]
            self._failure = None
            name = f"shard {registration['index']}"
            try:
                self._serve(registration)
            except DamagedCheckpointError as error:
                # The coordinator verifies the checkpoint, and sends the previous one if it is damaged.
                if registration["checkpoint"] is not None:
                    damaged[registration["checkpoint"]["name"]] = str(error)
                logger.warning("%s: %s", name, error)
            except MovedError as error:
                logger.info("%s: %s", name, error)
            except _ReloadError:
                logger.info("%s: returning to the last checkpoint with the other shards", name)
            else:
                return
            finally:
                with contextlib.suppress(UnavailableError):
                    self._sequence += 1
                    self._client.leave(registration["incarnation"], self._sequence)

    def _serve(self, registration: ShardRegistration) -> None:
        loading = threading.Thread(target=self._try_to_load, args=(registration,), name="load")
        loading.start()
        try:
            while self._heartbeat(registration):
                pass
        finally:
            loading.join()
            if self._server is not None:
                self._server.end_lease()
                self._server.stop()
            self._server = None
            self._snapshots.forget()
            self._publishes.forget()

    def _try_to_load(self, registration: ShardRegistration) -> None:
        try:
            self._load(registration)
        except (ElasticRecError, OSError) as error:
            self._failure = error

    def _load(self, registration: ShardRegistration) -> None:
        """Start the server with the rows of the newest checkpoint, if there is one."""
        owned = range(*registration["partitions"])
        checkpoint = registration["checkpoint"]
        files = [(part["rows"], part["dense"]) for part in checkpoint["parts"]] if checkpoint else []
        started = time.monotonic()
        server = _core.PsServer(
            self._start.shard_spec(owned),
            address=self._listening.address,
            run=self._start.run_id,
            token=self._options.security.token or "",
            incarnation=registration["incarnation"],
            epoch=registration["epoch"],
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
        partitions = f"partitions {owned.start} to {owned.stop - 1}"
        logger.info("shard %d: %s, %s, on %s", registration["index"], what, partitions, server.address)
        self._server = server

    def _heartbeat(self, registration: ShardRegistration) -> bool:
        """Send one heartbeat and wait for the next; return False when the shard has to stop."""
        server = self._server
        if self.shutdown.is_requested():
            return False
        if self._failure is not None:
            if registration["checkpoint"] and not isinstance(self._failure, ConfigError):
                raise DamagedCheckpointError(str(self._failure))
            raise self._failure
        self._sequence += 1
        sent = _core.Moment()
        report: ShardReport = {"state": "loading", "figures": self._own_figures()}
        if server is not None:
            if server.failure is not None:
                raise ElasticRecError(server.failure)
            if self._memory_bytes is not None:
                # The table limits the memory of its rows; copies for a snapshot come on top until they are written.
                limit_bytes = self._base_bytes + _MAX_MEMORY_RATIO * self._memory_bytes
                server.slow_down(_PUSH_DELAY_S if resident_bytes() > limit_bytes else 0.0)
            report = {
                "state": "serving",
                "address": self._listening.announced_address(server.address),
                "boundaries": len(self._boundaries),
                "skipped": len(self._skipped),
                "status": json.loads(server.status()),
                "snapshot": self._snapshots.report,
                "publish": self._publishes.report,
                "figures": self._figures(server),
            }
        try:
            answer = self._client.shard_heartbeat(registration["incarnation"], self._sequence, **report)
        except FencedError:
            raise
        except UnavailableError as error:
            # The coordinator may be restarting; without an answer the lease expires.
            logger.warning("shard %d: %s", registration["index"], error)
            return True
        if server is not None:
            server.extend_lease(sent, answer["lease_s"])
            self._lease_until = self._client.sent_at + answer["lease_s"]
        for command in answer["commands"]:
            if command["command"] == "stop":
                return False
            if command["command"] == "reload":
                raise _ReloadError
            self._execute(command, registration)
        self._wait_for_heartbeat(answer["next_s"])
        return True

    def _wait_for_heartbeat(self, next_s: float) -> None:
        """Wait until the next heartbeat is due: sooner if a unit becomes complete, because trainers may wait for it."""
        self.shutdown.wait(min(next_s, _MIN_HEARTBEAT_S))
        server, left_s = self._server, next_s - _MIN_HEARTBEAT_S
        if server is None or self.shutdown.is_requested():
            self.shutdown.wait(max(left_s, 0.0))
        elif left_s > 0:
            self._watermark = server.wait_for_units(self._watermark, left_s)

    def _figures(self, server: _core.PsServer) -> Figures:
        return {**server.counters(), **self._own_figures(), **self._training_figures(server)}

    def _training_figures(self, server: _core.PsServer) -> Figures:
        """Return the training metrics, cached for a second: computing them takes milliseconds."""
        if time.monotonic() < self._training_metrics_due:
            return self._training_metrics
        self._training_metrics_due = time.monotonic() + _TRAINING_METRICS_S
        figures: Figures = {}
        now, before = server.sums()
        if len(now):
            # The sums of a pass that has just begun are zero: show those of the previous pass.
            sums = now if now.any() else before
            figures |= {"records": int(sums[-2]), "bad_records": int(sums[-1])}
            for label, one in enumerate(MetricSums.of_flat(sums)):
                result = one.result()
                figures[f"samples_{label}"] = result.samples
                figures |= {f"{name}_{label}": getattr(result, name) or 0.0 for name in METRICS}
        self._training_metrics = figures
        return figures

    def _own_figures(self) -> Figures:
        uptime_s = round(time.monotonic() - self._started, 1)
        return {**self._options.figures(), "metrics": self._metrics.url, "uptime_s": uptime_s}

    def _metrics_text(self) -> str:
        server = self._server
        figures: Figures = {
            "serving": int(server is not None),
            "lease_left_s": max(self._lease_until - time.monotonic(), 0.0) if server is not None else 0.0,
            **self._snapshots.figures(),
            **self._publishes.figures(),
        }
        if server is not None:
            figures |= {**server.counters(), **json.loads(server.status())}
        index = self._options.index or 0 if self._registration is None else self._registration["index"]
        return shard_text(index, figures)

    def _execute(self, command: Command, registration: ShardRegistration) -> None:
        server, incarnation = self._server, registration["incarnation"]
        if server is None:
            return
        if command["command"] == "boundaries":
            self._boundaries = command["boundaries"]
            server.set_boundaries(json.dumps(self._boundaries))
        elif command["command"] == "skip":
            self._skipped = command["units"]
            server.skip_units(self._skipped)
        elif command["command"] == "snapshot":
            snapshot = command
            key = {"checkpoint": snapshot["checkpoint"], "incarnation": incarnation}
            self._snapshots.start(key, lambda: _write_snapshot(server, snapshot))
        elif command["command"] == "publish":
            publish = command
            key = {"publish": publish["publish"], "incarnation": incarnation}
            security = self._options.security
            ca = None if security.ca is None else str(security.ca)
            files = HttpStorage(f"{self._options.coordinator}/files", security.token or "", ca, security.insecure)
            self._publishes.start(key, lambda: _write_publish(server, publish, files))


def _write_snapshot(server: _core.PsServer, command: SnapshotCommand) -> Report:
    """Write this shard's part of a checkpoint."""
    rows, dense = server.snapshot(command["rows"], command["dense"])
    return {"rows": file_entry(*rows), "dense": file_entry(*dense)}


def _write_publish(server: _core.PsServer, command: PublishCommand, files: HttpStorage) -> Report:
    """Write this shard's part of a version and its dense values, in the repository or uploaded to it."""
    path = Path(command["cube"])
    if path.parent.is_dir():
        return _write_parts(server, command, path, Path(command["dense"]))
    # The coordinator created the directory of this version: this machine does not share its disk.
    storage = files if command["store"] is None else open_storage(command["store"], insecure=files.insecure)
    with tempfile.TemporaryDirectory(prefix="elasticrec-publish-") as scratch:
        cube, dense = Path(scratch, path.name), Path(scratch, Path(command["dense"]).name)
        written = _write_parts(server, command, cube, dense)
        storage.put(cube, f"{command['name']}/{path.parent.name}/{cube.name}")
        storage.put(dense, f"{command['name']}/{dense.name}")
    return written


def _write_parts(server: _core.PsServer, command: PublishCommand, cube: Path, dense: Path) -> Report:
    figures, values = server.publish(
        command["publish"],
        committed=command["committed"],
        is_base=command["base"],
        row_type=command["row_type"],
        path=str(cube),
    )
    entry = file_entry(figures.pop("bytes"), figures.pop("sha256"))
    return {"cube": entry, "dense": file_entry(*write_synced(dense, values.tobytes())), **figures}
