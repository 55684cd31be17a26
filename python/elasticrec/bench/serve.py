"""The server against the engine underneath: instances a CPU second, what joining brings, latencies, hot swaps."""

import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.bench import serve_rivals
from elasticrec.bench.serve_model import NAME, Requests, Served, Sizes, make, over_grpc, over_http
from elasticrec.bench.stages import mean_us, stages_of
from elasticrec.errors import UnavailableError
from elasticrec.machine import num_cores
from elasticrec.serving.onnxruntime import library_path
from elasticrec.serving.process import ServerProcess, server_process

Result = dict[str, Any]
Say = Callable[[str], None]

PARTS = ("engine", "joining", "latency", "swap")
# installs other servers, so that it has to be asked for
RIVALS = "rivals"

_TICKS = os.sysconf("SC_CLK_TCK")
# Of the requests of an open loop, so that runs are alike.
_POISSON_SEED = 1
# Requests that take turns: more than caches hold of their rows.
_NUM_BODIES = 256
_ENGINE_CONNECTIONS, _MANY_CONNECTIONS = 4, 64
# Rows of a delta.
_CHANGED = 5000
_PATIENCE_S = 60.0


def run(sizes: Sizes, parts: list[str], say: Say) -> Result:
    """The figures of some parts, each the median of `repeats`."""
    if RIVALS in parts:
        serve_rivals.check_clone()
    with tempfile.TemporaryDirectory(prefix="elasticrec-bench-") as scratch, contextlib.chdir(scratch):
        say(f"making a model of {sizes.rows:,} rows")
        served = make(sizes.rows)
        result: Result = {"rows": sizes.rows, "repeats": sizes.repeats, "cores": num_cores()}
        measures = {
            "engine": _engine,
            "joining": _joining,
            "latency": _latency,
            "swap": _swap,
            RIVALS: serve_rivals.run,
        }
        for part in parts:
            result |= measures[part](served, sizes, say)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


@contextlib.contextmanager
def _on(core: int | None) -> Iterator[None]:
    """Threads and processes that are started meanwhile stay on a core, if there are several."""
    before = os.sched_getaffinity(0)
    if core is not None and len(before) > 1:
        os.sched_setaffinity(0, {sorted(before)[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _serving(core: int | None, *settings: str) -> Iterator[ServerProcess]:
    arguments = [part for setting in settings for part in ("--set", f"serve.{setting}")]
    with contextlib.ExitStack() as stack:
        with _on(core):
            server = stack.enter_context(server_process(f"models/{NAME}", *arguments))
        yield server


def _load(server: ServerProcess, requests: Requests, **options: Any) -> _core.LoadReport:
    report = _core.load_test(
        server.address,
        requests.path,
        requests.bodies,
        content_type=requests.content_type,
        headers=requests.headers,
        grpc=requests.is_grpc,
        **options,
    )
    assert not report.failed, report.failures
    return report


def _cpu_s(process_id: int) -> float:
    """Seconds of processor time that a process has had."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _per_cpu_s(server: ServerProcess, requests: Requests, connections: int, seconds: float) -> float:
    """Requests a CPU second of the server, load on the other core."""
    with _on(1):
        _load(server, requests, connections=connections, seconds=min(seconds, 0.5))
        before = _cpu_s(server.process.pid)
        report = _load(server, requests, connections=connections, seconds=seconds)
        return report.answered / (_cpu_s(server.process.pid) - before)


def _engine(served: Served, sizes: Sizes, say: Say) -> Result:
    """Instances a CPU second of the server over those of the engine alone, both on the same core."""
    result: Result = {}
    with _serving(0, "threads=1") as server:
        for instances in (128, 512):
            batches = served.batches(instances, _NUM_BODIES)
            faces = {"http": over_http(batches), "grpc": over_grpc(batches)}
            rates: dict[str, list[float]] = {"engine": [], "http": [], "grpc": []}
            for repeat in range(sizes.repeats):
                say(f"engine, {instances} instances a request: {repeat + 1}/{sizes.repeats}")
                rates["engine"].append(_engine_rate(served, instances, sizes.seconds))
                for face, requests in faces.items():
                    before = stages_of(server.address)
                    rate = _per_cpu_s(server, requests, _ENGINE_CONNECTIONS, sizes.seconds)
                    rates[face].append(instances * rate)
                    result[f"stages_us_{face}_{instances}"] = mean_us(before, stages_of(server.address))
            middle = {name: statistics.median(values) for name, values in rates.items()}
            result[f"engine_instances_per_cpu_s_{instances}"] = middle["engine"]
            for face in faces:
                result[f"instances_per_cpu_s_{face}_{instances}"] = middle[face]
                # of pairs that were measured one after the other
                pairs = zip(rates[face], rates["engine"], strict=True)
                result[f"engine_ratio_{face}_{instances}"] = statistics.median(ours / bare for ours, bare in pairs)
            result[f"engine_ratio_{instances}"] = min(result[f"engine_ratio_{face}_{instances}"] for face in faces)
    return result


def _engine_rate(served: Served, instances: int, seconds: float) -> float:
    """Instances a CPU second of the engine on ready tensors."""
    with _on(0):
        before = time.process_time()
        started = time.perf_counter()
        rate = _core.engine_rate(str(served.path), str(library_path()), batch=instances, seconds=seconds, threads=1)
        # of a core that somebody else had for a while, only what was ours counts
        share = (time.process_time() - before) / (time.perf_counter() - started)
    return rate / min(share, 1.0)


def _joining(served: Served, sizes: Sizes, say: Say) -> Result:
    """Requests of one instance from many connections, a CPU second of the server, joined and each alone."""
    requests = over_http(served.batches(1, 4096))
    rates: dict[str, list[float]] = {"on": [], "off": []}
    with _serving(0, "threads=1") as joins, _serving(0, "threads=1", "batch_size=1") as alone:
        for repeat in range(sizes.repeats):
            say(f"joining: {repeat + 1}/{sizes.repeats}")
            rates["on"].append(_per_cpu_s(joins, requests, _MANY_CONNECTIONS, sizes.seconds))
            rates["off"].append(_per_cpu_s(alone, requests, _MANY_CONNECTIONS, sizes.seconds))
    gains = [on / off for on, off in zip(rates["on"], rates["off"], strict=True)]
    return {
        "joined_requests_per_cpu_s": statistics.median(rates["on"]),
        "alone_requests_per_cpu_s": statistics.median(rates["off"]),
        "batching_gain": statistics.median(gains),
    }


def _capacity(server: ServerProcess, requests: Requests, seconds: float) -> float:
    return _load(server, requests, connections=_MANY_CONNECTIONS, seconds=seconds).requests_per_s


def _open_loop(server: ServerProcess, requests: Requests, rate: float, seconds: float) -> _core.LoadReport:
    return _load(
        server,
        requests,
        connections=_MANY_CONNECTIONS,
        seconds=seconds,
        rate=rate,
        poisson_seed=_POISSON_SEED,
    )


def _latency(served: Served, sizes: Sizes, say: Say) -> Result:
    """Latencies at shares of the capacity, random arrivals, counted from when requests were due."""
    result: Result = {}
    worst = []
    with _serving(None) as server:
        for instances in (1, 16):
            requests = over_http(served.batches(instances, 1024))
            capacities = [_capacity(server, requests, sizes.seconds) for _ in range(sizes.repeats)]
            capacity = statistics.median(capacities)
            result[f"capacity_{instances}"] = capacity
            for share in (50, 80):
                say(f"latency at {share} % of {capacity:,.0f} requests/s of {instances}")
                reports = [
                    _open_loop(server, requests, capacity * share / 100, sizes.seconds) for _ in range(sizes.repeats)
                ]
                for name, value in (
                    ("p50", "p50_us"),
                    ("p99", "p99_us"),
                    ("p999", "p999_us"),
                    ("lag_p99", "lag_p99_us"),
                ):
                    middle = statistics.median(getattr(report, value) for report in reports) / 1e3
                    result[f"{name}_ms_at_{share}_{instances}"] = middle
                # due and never sent, which no latency speaks of
                unsent = [report.unsent / report.offered for report in reports]
                result[f"unsent_share_at_{share}_{instances}"] = statistics.median(unsent)
            worst.append(result[f"p99_ms_at_50_{instances}"])
    return result | {"p99_ms_at_50": max(worst)}


def _swap(served: Served, sizes: Sizes, say: Say) -> Result:
    """Latencies at half of the capacity while versions come, over those while none do."""
    requests = over_http(served.batches(1, 4096))
    seconds = max(sizes.seconds, 4.0)
    seen: dict[str, list[float]] = {"calm": [], "base": [], "delta": []}
    with _serving(None, "poll_s=0.1") as server:
        rate = _capacity(server, requests, sizes.seconds) / 2

        def measure(kind: str) -> None:
            seen[kind].append(_open_loop(server, requests, rate, seconds).p99_us / 1e3)

        for repeat in range(sizes.repeats):
            say(f"swaps at {rate:,.0f} requests/s: {repeat + 1}/{sizes.repeats}")
            measure("calm")
            # written before: that is somebody else's work, to load it is the server's
            version = served.publish()
            with _offering(server, served, [version]):
                measure("base")
            chain = [version]
            for _ in range(int(seconds)):
                chain.append(served.publish(chain[-1], _CHANGED))
            with _offering(server, served, chain[1:]):
                measure("delta")
    # of the middle ones: a single p99 without swaps varies by more than the swaps add to it
    middle = {kind: statistics.median(values) for kind, values in seen.items()}
    ratios = {kind: middle[kind] / middle["calm"] for kind in ("base", "delta")}
    return {
        "p99_ms_without_swaps": middle["calm"],
        "p99s_ms_around_swaps": {kind: [round(value, 2) for value in values] for kind, values in seen.items()},
        "swap_p99_ratio_base": ratios["base"],
        "swap_p99_ratio_delta": ratios["delta"],
        "swap_p99_ratio": max(ratios.values()),
    }


@contextlib.contextmanager
def _offering(server: ServerProcess, served: Served, versions: list[int]) -> Iterator[None]:
    """Offer versions a second apart while the block runs; the server has the last one at its end."""

    def offer() -> None:
        for version in versions:
            time.sleep(1.0)
            served.repository.offer(version)

    offering = threading.Thread(target=offer)
    offering.start()
    try:
        yield
    finally:
        offering.join()
    end = time.monotonic() + _PATIENCE_S
    while _version(server) != versions[-1]:
        if time.monotonic() > end:
            raise UnavailableError(f"serve: version {versions[-1]} did not come to work in {_PATIENCE_S:.0f} s")
        time.sleep(0.05)


def _version(server: ServerProcess) -> int:
    with urllib.request.urlopen(f"http://{server.address}/v1/models") as response:
        return int(json.load(response)["models"][0]["version"])


def describe(result: Result) -> list[str]:
    """The figures for people, and where the time goes."""
    lines = []
    for instances in (128, 512):
        if f"engine_ratio_{instances}" not in result:
            continue
        lines.append(
            f"{instances} instances a request: the engine alone "
            f"{result[f'engine_instances_per_cpu_s_{instances}']:,.0f} instances a CPU second"
        )
        for face in ("http", "grpc"):
            stages = result[f"stages_us_{face}_{instances}"]
            lines.append(
                f"  {face}: {result[f'instances_per_cpu_s_{face}_{instances}']:,.0f}, "
                f"{result[f'engine_ratio_{face}_{instances}']:.2f} of it; a request: "
                + ", ".join(f"{name} {micros:,.0f} µs" for name, micros in stages.items() if name != "queue")
            )
    if "batching_gain" in result:
        lines.append(
            f"1 instance a request, {_MANY_CONNECTIONS} connections: "
            f"{result['joined_requests_per_cpu_s']:,.0f} requests a CPU second joined, "
            f"{result['alone_requests_per_cpu_s']:,.0f} each alone: {result['batching_gain']:.1f} times"
        )
    for instances in (1, 16):
        if f"capacity_{instances}" not in result:
            continue
        lines.append(f"{instances} instances a request: at most {result[f'capacity_{instances}']:,.0f} requests/s")
        for share in (50, 80):
            figures = ", ".join(
                f"{name} {result[f'{key}_ms_at_{share}_{instances}']:.2f} ms"
                for name, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("generator late by", "lag_p99"))
            )
            lines.append(f"  at {share} %: {figures}")
    if "swap_p99_ratio" in result:
        lines.append(
            f"p99 at half of that: {result['p99_ms_without_swaps']:.2f} ms; while a base is switched to "
            f"{result['swap_p99_ratio_base']:.2f} times, with a delta every second {result['swap_p99_ratio_delta']:.2f}"
        )
    return lines + serve_rivals.describe(result)
