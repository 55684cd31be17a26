"""An online store of real processes, with versions whose rows contain their version number."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.audit.part import partition_of
from elasticrec.durable import write_synced
from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.launch.local import reserve_port
from elasticrec.manifest import FileEntry
from elasticrec.repository.repository import Repository
from elasticrec.repository.version import DENSE_FILE, GRAPH_FILE, Content, Version, part_name
from support.versions import content

NUM_PARTITIONS = 16
NUM_ROWS = 2000
COLUMNS = [("value", 1), ("version", 1)]
MODEL = "small"
TIMEOUT_S = 300.0


def wait_until(condition: Callable[[], bool], describe: Callable[[], str] = lambda: "timed out") -> None:
    """Poll a condition until it holds; fail with a description after the deadline."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, describe()
        time.sleep(0.02)


@contextlib.contextmanager
def running(threads: list[threading.Thread], stopping: threading.Event) -> Iterator[None]:
    """Run threads during the block; they must end soon after `stopping` is set."""
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


_held: list[socket.socket] = []


def free_port() -> int:
    """Return a port that stays reserved for the server that will use it, also while that server is down."""
    held, port = reserve_port()
    _held.append(held)
    return port


def publish(
    repository: Repository,
    parent: int | None = None,
    *,
    signs: npt.NDArray[np.uint64] | None = None,
    removed: npt.NDArray[np.uint64] | None = None,
    num_parts: int = 3,
) -> Version:
    """Publish a version with rows (value = sign, version = its number), written by a number of shards.

    Deltas have a row for every sign too, so that every row shows its version.
    """
    signs = np.arange(1, NUM_ROWS + 1, dtype=np.uint64) if signs is None else signs
    removed = np.empty(0, np.uint64) if removed is None else removed
    with repository.begin() if parent is None else repository.begin_delta(parent) as draft:
        dense = np.array([draft.number, 0.5], np.float32).tobytes()
        files = {DENSE_FILE: FileEntry(*write_synced(draft.directory / DENSE_FILE, dense))}
        for part in range(num_parts):
            owned = range(part * NUM_PARTITIONS // num_parts, (part + 1) * NUM_PARTITIONS // num_parts)
            path = draft.directory / part_name(part)
            files[part_name(part)] = FileEntry(*_write_part(path, draft.number, owned, signs, removed, parent is None))
        if parent is None:
            files[GRAPH_FILE] = FileEntry(*write_synced(draft.directory / GRAPH_FILE, graph()))
        return repository.commit(draft, manifest_content(len(signs)), files)


def graph() -> bytes:
    """Return a graph whose score is the version of the rows plus a thousand times the version of the weights."""
    import onnx
    from onnx import TensorProto, helper

    weights = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", DENSE_FILE), ("offset", "0"), ("length", "8")):
        weights.external_data.add(key=key, value=value)
    nodes = [
        # pooled[:, 0, 1] + 1000 * w[0]
        helper.make_node("Slice", ["pooled", "from", "to", "axes"], ["sliced"]),
        helper.make_node("Reshape", ["sliced", "shape"], ["row_version"]),
        helper.make_node("Gather", ["w", "first"], ["weights_version"], axis=0),
        helper.make_node("Mul", ["weights_version", "thousand"], ["thousands"]),
        helper.make_node("Add", ["row_version", "thousands"], ["scores"]),
    ]
    constants = {"from": [0, 1], "to": [1, 2], "axes": [1, 2], "shape": [-1, 1], "first": [0]}
    initializers = [onnx.numpy_helper.from_array(np.array(value, np.int64), name) for name, value in constants.items()]
    thousand = onnx.numpy_helper.from_array(np.array([1000], np.float32), "thousand")
    made = helper.make_graph(
        nodes,
        "versions",
        [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, ["batch", 1, 2])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", 1])],
        [weights, thousand, *initializers],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    content: bytes = model.SerializeToString()
    return content


def manifest_content(num_rows: int) -> Content:
    """Return the manifest content of a version with a number of rows."""
    columns = [{"name": name, "width": width} for name, width in COLUMNS]
    return content(partitions=NUM_PARTITIONS, columns=columns, rows=num_rows)


def _write_part(
    path: Path, number: int, owned: range, signs: npt.NDArray[np.uint64], removed: npt.NDArray[np.uint64], is_base: bool
) -> tuple[int, str]:
    options: dict[str, Any] = {"row_type": "f32", "num_partitions": NUM_PARTITIONS}
    writer: Any = (_core.CubeWriter if is_base else _core.DeltaWriter)(str(path), COLUMNS, **options)
    of_signs, of_removed = partition_of(signs, NUM_PARTITIONS), partition_of(removed, NUM_PARTITIONS)
    for partition in owned:
        some = np.ascontiguousarray(signs[of_signs == partition])
        rows = np.stack([some.astype(np.float32), np.full(len(some), number, np.float32)], axis=1)
        more = () if is_base else (np.ascontiguousarray(removed[of_removed == partition]),)
        writer.add(partition, some, np.ascontiguousarray(rows), *more)
    size, digest = writer.finish()
    return int(size), str(digest)


@dataclass
class Process:
    """An `elasticrec` command that runs until it is stopped, and its output."""

    arguments: list[str]
    cwd: Path
    log: Path
    process: "subprocess.Popen[bytes]" = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Start it, or start it again."""
        with self.log.open("ab") as output:
            command = [sys.executable, "-m", "elasticrec", *self.arguments]
            self.process = subprocess.Popen(command, cwd=self.cwd, stdout=output, stderr=output)

    def output(self) -> str:
        """Return its output since the first start."""
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str) -> None:
        """Wait until the output matches a pattern."""
        wait_until(lambda: re.search(pattern, self.output()) is not None, self.output)

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stop it with SIGTERM and return its exit code."""
        self.process.terminate()
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it did not stop: {self.output()}") from None


class StoreProcesses:
    """Shards × replicas of `elasticrec cube serve`, and `elasticrec deliver`."""

    def __init__(self, directory: Path, shards: int, replicas: int) -> None:
        self.directory = directory
        self.repository = Repository.open(directory / "models", MODEL)
        (directory / "models" / MODEL).mkdir(parents=True, exist_ok=True)
        self.ports = [[(free_port(), free_port()) for _ in range(replicas)] for _ in range(shards)]
        self.nodes: dict[tuple[int, int], Process] = {}
        self.controllers: list[Process] = []

    @property
    def addresses(self) -> list[list[str]]:
        """The addresses of the replicas of each shard."""
        return [[f"127.0.0.1:{port}" for port, _ in replicas] for replicas in self.ports]

    def url(self, shard: int, replica: int) -> str:
        """Return the HTTP URL of a replica."""
        return f"http://127.0.0.1:{self.ports[shard][replica][1]}"

    def start(self, shard: int, replica: int, *more: str, model: str = f"models/{MODEL}") -> Process:
        """Start a replica."""
        port, http_port = self.ports[shard][replica]
        arguments = ["cube", "serve", model, "--shard", f"{shard}/{len(self.ports)}", "--poll", "0.1"]
        arguments += ["--port", str(port), "--http-port", str(http_port), *more]
        self.nodes[shard, replica] = Process(arguments, self.directory, self.directory / f"node-{shard}-{replica}.log")
        return self.nodes[shard, replica]

    def start_all(self) -> None:
        """Start all replicas."""
        for shard, replicas in enumerate(self.ports):
            for replica in range(len(replicas)):
                self.start(shard, replica)

    def deliver(self, *more: str) -> Process:
        """Start a rollout process."""
        addresses = [part for shard in self.addresses for part in ("--address", ",".join(shard))]
        log = self.directory / f"deliver-{len(self.controllers)}.log"
        arguments = ["deliver", f"models/{MODEL}", *addresses, "--poll", "0.1", *more]
        self.controllers.append(Process(arguments, self.directory, log))
        return self.controllers[-1]

    def client(self) -> _core.CubeClient:
        """Return a client of all shards."""
        return _core.CubeClient(MODEL, self.addresses, token="", deadline_s=10.0)

    def wait_for_version(self, number: int) -> None:
        """Wait until a version, or a newer one, is current."""
        wait_until(lambda: (self.repository.current() or 0) >= number, self.output)

    def output(self) -> str:
        """Return the output of all processes."""
        processes = [*self.controllers, *self.nodes.values()]
        return "\n".join(f"== {one.log.name}\n{one.output()}" for one in processes)

    def stop(self) -> None:
        """Kill all processes."""
        for one in (*self.controllers, *self.nodes.values()):
            if one.process.poll() is None:
                one.kill()


class Readers:
    """Threads that look up rows repeatedly and record wrong answers."""

    def __init__(self, store: StoreProcesses, count: int = 2) -> None:
        self._store, self._stopping = store, threading.Event()
        self._client = store.client()
        self.num_reads, self.num_retries = 0, 0
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._read, args=(seed,)) for seed in range(count)]

    def _read(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        while not self._stopping.is_set():
            signs = random.integers(1, NUM_ROWS + 1, 100).astype(np.uint64)
            try:
                self._look_up(signs)
            except ElasticRecError as error:
                self.wrong.append(str(error))
            self.num_reads += 1

    def _look_up(self, signs: npt.NDArray[np.uint64]) -> None:
        """Look up rows of the current version; if the store no longer holds it, retry with the new current version."""
        version = self._store.repository.current()
        assert version is not None
        try:
            rows, is_there = self._client.get(version, signs)
        except ModelError:
            self.num_retries += 1
            version = self._store.repository.current()
            assert version is not None
            rows, is_there = self._client.get(version, signs)
        if not is_there.all() or (rows[:, 0] != signs.astype(np.float32)).any():
            self.wrong.append(f"version {version}: rows are missing or of other signs")
        if (rows[:, 1] != version).any():
            self.wrong.append(f"version {version}: got {sorted(set(rows[:, 1].tolist()))}")

    @contextlib.contextmanager
    def reading(self) -> Iterator["Readers"]:
        """Read while the block runs; check at the end that nothing was wrong."""
        with running(self._threads, self._stopping):
            yield self
        assert self.wrong == [], (self.wrong[:5], self.num_reads, self._store.output())
        assert self.num_reads > 0
