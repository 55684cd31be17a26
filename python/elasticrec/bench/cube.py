"""The speed of the cube: in one process compared with plain memory access, through sockets compared with Redis.

Servers run in their own processes, the client in this one. Figures are medians; compared figures are measured in turn.
"""

import json
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from elasticrec import _core
from elasticrec.bench import cube_process, cube_versions
from elasticrec.bench.processes import cpu_seconds, free_ports
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.machine import num_cores

Result = dict[str, Any]
Shape = tuple[int, ...]

BATCH = 1000
MISS_SHARE = 0.05
ROW_BYTES = 40
PARTITIONS = 256
# A version with one row, to measure lookups without their memory access.
_EMPTY = 1 << 40
# Connections, and requests in flight on each.
_SHAPES = ((1, 8), (2, 4), (2, 8))
_REDIS_SHAPES = ((1, 8), (2, 8), (4, 4), (8, 2))
# Redis reads and writes its sockets with one thread, or with two.
_REDIS_THREADS = (1, 2)
# Latency is compared at this share of the throughput of Redis, so that Redis has capacity to spare.
_OFFERED = 0.5
_BATCHES = 2000


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    rows: int
    repeats: int
    seconds: float
    deltas: int
    rivals: bool


class Process:
    """A server process and the CPU seconds it has used."""

    def __init__(self, command: list[str], directory: Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=directory)

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its threads."""
        return cpu_seconds(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


class Cube(Process):
    """A cube server with all partitions."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "elasticrec.bench.cube_process", str(PARTITIONS)]
        super().__init__(command, directory)
        self.address = self._line()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the server and return its result."""
        assert self.process.stdin is not None
        print(json.dumps([method, *arguments]), file=self.process.stdin, flush=True)
        return json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            raise UnavailableError("bench: the cube server ended")
        return line

    def traffic(self, rows: int, version: int, connections: int, in_flight: int) -> _core.StoreTraffic:
        """Return a traffic generator for the server."""
        return _core.StoreTraffic(
            cube_process.MODEL,
            [[self.address]],
            token="",
            version=version,
            rows=rows,
            batch=BATCH,
            miss_share=MISS_SHARE,
            connections=connections,
            in_flight=in_flight,
        )


def run(sizes: Sizes, say: Callable[[str], None]) -> Result:
    """Return all figures; those of Redis with `rivals`."""
    result: Result = {
        "rows": sizes.rows,
        "row_bytes": ROW_BYTES,
        "batch": BATCH,
        "miss_share": MISS_SHARE,
        "repeats": sizes.repeats,
        "cores": num_cores(),
    }
    if sizes.rivals and shutil.which("redis-server") is None:
        raise ConfigError("bench: --rivals: redis-server is not installed (Debian: apt-get install redis-server)")
    with tempfile.TemporaryDirectory(prefix="elasticrec-bench-") as scratch:
        directory = Path(scratch)
        result |= _measure_in_process(sizes, directory, say)
        base, empty = directory / "base", directory / "empty"
        say(f"writing a cube of {sizes.rows:,} rows")
        _core.write_bench_cube(base, sizes.rows, 1)
        _core.write_bench_cube(empty, 1, _EMPTY)
        with Cube(directory) as cube:
            cube.call("install_base", 1, [str(base)])
            cube.call("install_base", _EMPTY, [str(empty)])
            with ExitStack() as stack:
                redis = {
                    threads: stack.enter_context(_start_redis(sizes, threads, directory, say))
                    for threads in (_REDIS_THREADS if sizes.rivals else ())
                }
                result |= _measure_sockets(sizes, cube, redis, say)
        result |= cube_versions.measure_switches(sizes, base, directory, say)
        result |= cube_versions.measure_deltas(sizes, base, directory, say)
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in result.items()}


def _measure_in_process(sizes: Sizes, directory: Path, say: Callable[[str], None]) -> Result:
    """Build, open and look up on one core, each time with a new file and new memory."""
    folder = directory / "in-process"
    figures, file_bytes = [], 0
    for number in range(sizes.repeats):
        say(f"in one process, {number + 1}/{sizes.repeats}")
        folder.mkdir()
        bench = _core.CubeBench(str(folder), sizes.rows)
        figures.append((*bench.measure(_BATCHES), bench.build_s, bench.open_s))
        file_bytes = bench.file_bytes
        del bench
        shutil.rmtree(folder)
    lookup_s, probe_s, build_s, open_s = (statistics.median(column) for column in zip(*figures, strict=True))
    return {
        "inprocess_keys_per_s": 1 / lookup_s,
        "inprocess_probe_keys_per_s": 1 / probe_s,
        "inprocess_ratio": statistics.median(probe / lookup for lookup, probe, *_ in figures),
        "bytes_per_key": file_bytes / sizes.rows - ROW_BYTES,
        "build_rows_per_s": sizes.rows / build_s,
        "open_s": open_s,
    }


@contextmanager
def _start_redis(
    sizes: Sizes, threads: int, directory: Path, say: Callable[[str], None]
) -> Iterator[tuple[Process, str]]:
    """Start a Redis and fill it with the same rows."""
    (port,) = free_ports(1)
    command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    command += ["--io-threads", str(threads), "--io-threads-do-reads", "yes"]
    with Process(command, directory) as process:
        # Read its output, because it would block on a full pipe.
        threading.Thread(target=lambda: process.process.stdout and process.process.stdout.read(), daemon=True).start()
        address = f"127.0.0.1:{port}"
        _wait_for(port, process)
        say(f"filling Redis ({threads} I/O threads) with {sizes.rows:,} rows")
        _redis_traffic(address, sizes.rows, (1, 1)).fill(1)
        yield process, address


def _wait_for(port: int, process: Process) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.process.poll() is not None or time.monotonic() > deadline:
                raise UnavailableError("bench: redis-server does not listen") from None
            time.sleep(0.05)


def _redis_traffic(address: str, rows: int, shape: tuple[int, int]) -> _core.RedisTraffic:
    connections, in_flight = shape
    return _core.RedisTraffic(
        address, rows=rows, batch=BATCH, miss_share=MISS_SHARE, connections=connections, in_flight=in_flight
    )


def _rates(
    traffic: _core.StoreTraffic | _core.RedisTraffic, server: Process, seconds: float
) -> tuple[float, float, float]:
    """Return keys per second, per CPU second of the server, and per CPU second of both ends."""
    before, own = server.cpu_s(), time.process_time()
    figures = traffic.run(seconds)
    server_s, own_s = server.cpu_s() - before, time.process_time() - own
    if figures["failed"]:
        raise UnavailableError(f"bench: {figures['failed']} requests failed: {figures['failure']}")
    keys = figures["keys"]
    return keys / figures["seconds"], keys / max(server_s, 0.01), keys / max(server_s + own_s, 0.01)


def _best_shape(generators: dict[Shape, tuple[Any, Process]], seconds: float) -> Shape:
    """Return the shape with the highest rate."""
    return max(generators, key=lambda shape: _rates(*generators[shape], seconds)[0])


def _measure_sockets(
    sizes: Sizes, cube: Cube, redis: dict[int, tuple[Process, str]], say: Callable[[str], None]
) -> Result:
    """Measure through a socket at full speed and at a fixed rate; the cube and each Redis take turns."""
    ours_by_shape: dict[Shape, _core.StoreTraffic] = {shape: cube.traffic(sizes.rows, 1, *shape) for shape in _SHAPES}
    shape = _best_shape({shape: (traffic, cube) for shape, traffic in ours_by_shape.items()}, sizes.seconds / 4)
    empty = cube.traffic(sizes.rows, _EMPTY, *shape)
    rivals: dict[Shape, tuple[_core.RedisTraffic, Process]] = {
        (threads, *each): (_redis_traffic(address, sizes.rows, each), process)
        for threads, (process, address) in redis.items()
        for each in _REDIS_SHAPES
    }
    rival_shape = _best_shape(rivals, sizes.seconds / 4) if redis else (0, 0, 0)
    ours, theirs, limits = [], [], []
    for number in range(sizes.repeats):
        say(f"through a socket, {number + 1}/{sizes.repeats}")
        ours.append(_rates(ours_by_shape[shape], cube, sizes.seconds))
        limits.append(_rates(empty, cube, sizes.seconds / 2)[0])
        if redis:
            theirs.append(_rates(*rivals[rival_shape], sizes.seconds))
    keys, cpu_keys, both_keys = (statistics.median(column) for column in zip(*ours, strict=True))
    result: Result = {
        "connections": shape[0],
        "in_flight": shape[1],
        "keys_per_s": keys,
        "keys_per_server_cpu_s": cpu_keys,
        "keys_per_cpu_s": both_keys,
        "loopback_keys_per_s": statistics.median(limits),
    }
    if not redis:
        return result
    redis_keys, redis_cpu_keys, redis_both = (statistics.median(column) for column in zip(*theirs, strict=True))
    result |= {
        "redis_threads": rival_shape[0],
        "redis_connections": rival_shape[1],
        "redis_in_flight": rival_shape[2],
        "redis_keys_per_s": redis_keys,
        "redis_keys_per_server_cpu_s": redis_cpu_keys,
        "redis_keys_per_cpu_s": redis_both,
        "redis_ratio": keys / redis_keys,
        "redis_cpu_ratio": cpu_keys / redis_cpu_keys,
    }
    rate = _OFFERED * redis_keys / BATCH
    pairs = []
    for number in range(sizes.repeats):
        say(f"latency at {rate:,.0f} requests/s, {number + 1}/{sizes.repeats}")
        pairs.append(
            (ours_by_shape[shape].run(sizes.seconds, rate=rate), rivals[rival_shape][0].run(sizes.seconds, rate=rate))
        )
    for name, side in (("", 0), ("redis_", 1)):
        for q in ("p50_s", "p99_s"):
            result[f"{name}{q}"] = statistics.median(pair[side][q] for pair in pairs)
    return result | {"offered_requests_per_s": rate, "latency_ratio": result["p99_s"] / result["redis_p50_s"]}


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text."""
    lines = [
        f"cube of {result['rows']:,} rows of {ROW_BYTES} bytes, batches of {BATCH}, {MISS_SHARE:.0%} misses:",
        f"in one process: {result['inprocess_keys_per_s'] / 1e6:.1f} M keys/s per core, "
        f"{result['inprocess_ratio']:.2f} of plain memory access "
        f"({result['inprocess_probe_keys_per_s'] / 1e6:.1f} M/s)",
        f"built at {result['build_rows_per_s'] / 1e6:.1f} M rows/s, opened in {result['open_s']:.2f} s, "
        f"{result['bytes_per_key']:.1f} bytes per key in addition to its row",
        f"through sockets: {result['keys_per_s'] / 1e6:.1f} M keys/s with both ends on {result['cores']} cores, "
        f"{result['keys_per_server_cpu_s'] / 1e6:.1f} M per CPU second of the server; limit of the loopback, measured "
        f"with missing keys: {result['loopback_keys_per_s'] / 1e6:.1f} M/s",
    ]
    if "redis_ratio" in result:
        lines += [
            f"Redis: {result['redis_keys_per_s'] / 1e6:.2f} M keys/s, "
            f"{result['redis_keys_per_server_cpu_s'] / 1e6:.2f} M per CPU second; the cube reaches "
            f"{result['redis_ratio']:.1f} and {result['redis_cpu_ratio']:.1f} times as many",
            f"at {result['offered_requests_per_s']:,.0f} requests/s: p50 {result['p50_s'] * 1e6:.0f} µs, "
            f"p99 {result['p99_s'] * 1e6:.0f} µs; Redis p50 {result['redis_p50_s'] * 1e6:.0f} µs, "
            f"p99 {result['redis_p99_s'] * 1e6:.0f} µs",
        ]
    return lines + cube_versions.describe(result)


__all__ = ["Cube", "Sizes", "describe", "run"]
