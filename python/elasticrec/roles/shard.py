"""The process of a parameter server: a shard in Rust on a socket, and a thread that keeps its lease."""

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from elasticrec import _core
from elasticrec.coordinator.messages import FencedError
from elasticrec.errors import ElasticRecError, UnavailableError
from elasticrec.roles.place import Answer, RoleOptions, join
from elasticrec.roles.start import Start, read_start
from elasticrec.training.metrics import MetricSums

Say = Callable[[str], None]


class DamagedError(ElasticRecError):
    """A checkpoint that cannot be loaded."""


class ShardProcess:
    """Registers, loads, serves and stops as the coordinator says."""

    def __init__(self, options: RoleOptions, say: Say) -> None:
        self._options = options
        self._say = say
        self._start: Start = read_start(options.run)
        self._client = options.client()
        self._server: _core.PsServer | None = None
        self._snapshot: Answer | None = None
        self._boundaries: list[Answer] = []
        self._sequence = 0
        self._place: Answer = {}
        self._failure: ElasticRecError | OSError | None = None

    def run(self) -> None:
        """Serve until the coordinator says stop; a shard that was replaced raises `FencedError`."""
        damaged: dict[str, str] = {}
        while True:
            self._place = join(self._client, "ps", self._options.index, damaged=damaged)
            self._boundaries = self._place["boundaries"]
            self._failure = None
            try:
                self._serve()
            except DamagedError as error:
                # the coordinator looks for itself, and offers the one before
                damaged[self._place["checkpoint"]["name"]] = str(error)
                self._say(f"shard {self._place['index']}: {error}")
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
            address=f"{self._options.host}:0",
            run=self._start.run_id,
            token=self._options.token,
            incarnation=place["incarnation"],
            epoch=place["epoch"],
            threads=1,
            files=files,
            dense=None if files else self._start.dense_of(owned),
        )
        server.set_boundaries(json.dumps(self._boundaries))
        seconds = time.monotonic() - started
        what = f"loaded {checkpoint['name']} in {seconds:.1f} s" if checkpoint else "started empty"
        self._say(f"shard {place['index']}: {what}, partitions {owned.start} to {owned.stop - 1}, on {server.address}")
        self._server = server

    def _beat(self) -> bool:
        """One sign of life; false when it is to stop."""
        server = self._server
        if self._failure is not None:
            if self._place["checkpoint"]:
                raise DamagedError(str(self._failure))
            raise self._failure
        self._sequence += 1
        asked = _core.Moment()
        more: Answer = {"state": "loading"}
        if server is not None:
            if server.failure is not None:
                raise ElasticRecError(server.failure)
            more = {
                "state": "serving",
                "address": server.address,
                "boundaries": len(self._boundaries),
                "status": json.loads(server.status()),
                "snapshot": self._snapshot,
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
        for command in answer["commands"]:
            if command["command"] == "stop":
                return False
            self._obey(command)
        time.sleep(answer["next_s"])
        return True

    def _figures(self, server: _core.PsServer) -> Answer:
        figures: Answer = dict(server.counters())
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
        return figures

    def _obey(self, command: Answer) -> None:
        server = self._server
        if server is None:
            return
        if command["command"] == "boundaries":
            self._boundaries = command["boundaries"]
            server.set_boundaries(json.dumps(self._boundaries))
        elif command["command"] == "snapshot":
            if self._snapshot is None or self._snapshot["checkpoint"] != command["checkpoint"]:
                self._snapshot = self._told(command, "writing")
                threading.Thread(target=self._write, args=(server, command), name="snapshot", daemon=True).start()

    def _told(self, command: Answer, state: str, **more: Any) -> Answer:
        incarnation = self._place["incarnation"]
        return {"checkpoint": command["checkpoint"], "incarnation": incarnation, "state": state, **more}

    def _write(self, server: _core.PsServer, command: Answer) -> None:
        """Write this shard's part of a checkpoint; the next sign of life tells."""
        try:
            rows, dense = server.snapshot(command["rows"], command["dense"])
        except (ElasticRecError, OSError) as error:
            self._snapshot = self._told(command, "failed", error=str(error))
            return
        written = {
            name: {"bytes": size, "sha256": digest} for name, (size, digest) in (("rows", rows), ("dense", dense))
        }
        self._snapshot = self._told(command, "written", **written)
