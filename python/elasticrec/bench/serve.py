"""Serving compared with the engine: instances per CPU second, gain of joined requests, latency, version swaps."""

import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from elasticrec import _core
from elasticrec.bench import serve_rivals
from elasticrec.bench.processes import cpu_seconds, request, require_clone
from elasticrec.bench.serve_model import NAME, BenchModel, Requests, Sizes, grpc_requests, http_requests, make_model
from elasticrec.bench.stages import mean_us, stages_of
from elasticrec.errors import UnavailableError
from elasticrec.machine import num_cores
from elasticrec.serving.onnxruntime import library_path
from elasticrec.serving.process import ServerProcess, server_process

Result = dict[str, Any]
Say = Callable[[str], None]

PARTS = ("engine", "joining", "latency", "swap")
# Not measured by default, because it installs other servers.
RIVALS = "rivals"

# Seed of the random arrivals, so that runs are comparable.
_POISSON_SEED = 1
# Distinct requests, whose rows do not fit into the caches.
_NUM_BODIES = 256
_ENGINE_CONNECTIONS, _MANY_CONNECTIONS = 4, 64
# Rows of a delta.
_CHANGED = 5000
_TIMEOUT_S = 60.0


def run(sizes: Sizes, parts: list[str], say: Say) -> Result:
    """Return the figures of the parts, medians of `repeats`."""
    if RIVALS in parts:
        require_clone(serve_rivals.SCRIPTS)
    with tempfile.TemporaryDirectory(prefix="elasticrec-bench-") as scratch, contextlib.chdir(scratch):
        say(f"making a model of {sizes.rows:,} rows")
        model = make_model(sizes.rows)
        result: Result = {"rows": sizes.rows, "repeats": sizes.repeats, "cores": num_cores()}
        measures = {
            "engine": _measure_engine,
            "joining": _measure_joining,
            "latency": _measure_latency,
            "swap": _measure_swaps,
            RIVALS: serve_rivals.run,
        }
        for part in parts:
            result |= measures[part](model, sizes, say)
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


@contextlib.contextmanager
def _pin_to_core(core: int | None) -> Iterator[None]:
    """Keep threads and processes that are started in the block on one core, if there are several."""
    before = os.sched_getaffinity(0)
    if core is not None and len(before) > 1:
        os.sched_setaffinity(0, {sorted(before)[core]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def _start_server(core: int | None, *settings: str) -> Iterator[ServerProcess]:
    arguments = [part for setting in settings for part in ("--set", f"serve.{setting}")]
    with contextlib.ExitStack() as stack:
        with _pin_to_core(core):
            server = stack.enter_context(server_process(f"models/{NAME}", *arguments))
        yield server


def _send_traffic(server: ServerProcess, requests: Requests, **options: Any) -> _core.TrafficReport:
    report = _core.run_traffic(
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


def _per_cpu_s(server: ServerProcess, requests: Requests, connections: int, seconds: float) -> float:
    """Return requests per CPU second of the server, with the traffic generator on the other core."""
    with _pin_to_core(1):
        _send_traffic(server, requests, connections=connections, seconds=min(seconds, 0.5))
        before = cpu_seconds(server.process.pid)
        report = _send_traffic(server, requests, connections=connections, seconds=seconds)
        return report.answered / (cpu_seconds(server.process.pid) - before)


def _measure_engine(model: BenchModel, sizes: Sizes, say: Say) -> Result:
    """Compare instances per CPU second of the server with the engine alone, both on the same core."""
    result: Result = {}
    with _start_server(0, "threads=1") as server:
        for instances in (128, 512):
            batches = model.batches(instances, _NUM_BODIES)
            protocols = {"http": http_requests(batches), "grpc": grpc_requests(batches)}
            rates: dict[str, list[float]] = {"engine": [], "http": [], "grpc": []}
            for repeat in range(sizes.repeats):
                say(f"engine, {instances} instances per request: {repeat + 1}/{sizes.repeats}")
                rates["engine"].append(_engine_rate(model, instances, sizes.seconds))
                for protocol, requests in protocols.items():
                    before = stages_of(server.address)
                    rate = _per_cpu_s(server, requests, _ENGINE_CONNECTIONS, sizes.seconds)
                    rates[protocol].append(instances * rate)
                    result[f"stages_us_{protocol}_{instances}"] = mean_us(before, stages_of(server.address))
            middle = {name: statistics.median(values) for name, values in rates.items()}
            result[f"engine_instances_per_cpu_s_{instances}"] = middle["engine"]
            for protocol in protocols:
                result[f"instances_per_cpu_s_{protocol}_{instances}"] = middle[protocol]
                # The median over pairs of consecutive measurements.
                pairs = zip(rates[protocol], rates["engine"], strict=True)
                result[f"engine_ratio_{protocol}_{instances}"] = statistics.median(ours / bare for ours, bare in pairs)
            result[f"engine_ratio_{instances}"] = min(result[f"engine_ratio_{name}_{instances}"] for name in protocols)
    return result


def _engine_rate(model: BenchModel, instances: int, seconds: float) -> float:
    """Return instances per CPU second of the engine on tensors in memory."""
    with _pin_to_core(0):
        before = time.process_time()
        started = time.perf_counter()
        rate = _core.engine_rate(str(model.path), str(library_path()), batch=instances, seconds=seconds, threads=1)
        # Count only our share of the core, if other processes used it too.
        share = (time.process_time() - before) / (time.perf_counter() - started)
    return rate / min(share, 1.0)


def _measure_joining(model: BenchModel, sizes: Sizes, say: Say) -> Result:
    """Measure requests of one instance from many connections per CPU second, joined and scored one by one."""
    requests = http_requests(model.batches(1, 4096))
    rates: dict[str, list[float]] = {"on": [], "off": []}
    with _start_server(0, "threads=1") as joins, _start_server(0, "threads=1", "batch_size=1") as alone:
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
    return _send_traffic(server, requests, connections=_MANY_CONNECTIONS, seconds=seconds).requests_per_s


def _open_loop(server: ServerProcess, requests: Requests, rate: float, seconds: float) -> _core.TrafficReport:
    return _send_traffic(
        server,
        requests,
        connections=_MANY_CONNECTIONS,
        seconds=seconds,
        rate=rate,
        poisson_seed=_POISSON_SEED,
    )


def _measure_latency(model: BenchModel, sizes: Sizes, say: Say) -> Result:
    """Measure latency at shares of the capacity, with random arrivals, counted from the due time of each request."""
    result: Result = {}
    worst = []
    with _start_server(None) as server:
        for instances in (1, 16):
            requests = http_requests(model.batches(instances, 1024))
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
                # Requests that were due but never sent; the latencies do not include them.
                unsent = [report.unsent / report.offered for report in reports]
                result[f"unsent_share_at_{share}_{instances}"] = statistics.median(unsent)
            worst.append(result[f"p99_ms_at_50_{instances}"])
    return result | {"p99_ms_at_50": max(worst)}


def _measure_swaps(model: BenchModel, sizes: Sizes, say: Say) -> Result:
    """Measure latency at half of the capacity while versions change, relative to a time without changes."""
    requests = http_requests(model.batches(1, 4096))
    seconds = max(sizes.seconds, 4.0)
    seen: dict[str, list[float]] = {"calm": [], "base": [], "delta": []}
    with _start_server(None, "poll_s=0.1") as server:
        rate = _capacity(server, requests, sizes.seconds) / 2

        def measure(kind: str) -> None:
            seen[kind].append(_open_loop(server, requests, rate, seconds).p99_us / 1e3)

        for repeat in range(sizes.repeats):
            say(f"swaps at {rate:,.0f} requests/s: {repeat + 1}/{sizes.repeats}")
            measure("calm")
            # Publish before the measurement, in which the server only loads the version.
            version = model.publish()
            with _offer_versions(server, model, [version]):
                measure("base")
            chain = [version]
            for _ in range(int(seconds)):
                chain.append(model.publish(chain[-1], _CHANGED))
            with _offer_versions(server, model, chain[1:]):
                measure("delta")
    # Use medians: a single p99 varies more than the swaps add to it.
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
def _offer_versions(server: ServerProcess, model: BenchModel, versions: list[int]) -> Iterator[None]:
    """Make versions current one second apart while the block runs; wait until the server has the last one."""

    def offer() -> None:
        for version in versions:
            time.sleep(1.0)
            model.repository.offer(version)

    offering = threading.Thread(target=offer)
    offering.start()
    try:
        yield
    finally:
        offering.join()
    end = time.monotonic() + _TIMEOUT_S
    while _served_version(server) != versions[-1]:
        if time.monotonic() > end:
            raise UnavailableError(f"serve: version {versions[-1]} was not loaded within {_TIMEOUT_S:.0f} s")
        time.sleep(0.05)


def _served_version(server: ServerProcess) -> int:
    return int(json.loads(request(server.address, "/v1/models").content)["models"][0]["version"])


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text, with the time of each stage."""
    lines = []
    for instances in (128, 512):
        if f"engine_ratio_{instances}" not in result:
            continue
        lines.append(
            f"{instances} instances per request: the engine alone "
            f"{result[f'engine_instances_per_cpu_s_{instances}']:,.0f} instances per CPU second"
        )
        for protocol in ("http", "grpc"):
            stages = result[f"stages_us_{protocol}_{instances}"]
            lines.append(
                f"  {protocol}: {result[f'instances_per_cpu_s_{protocol}_{instances}']:,.0f}, "
                f"{result[f'engine_ratio_{protocol}_{instances}']:.2f} of the engine; per request: "
                + ", ".join(f"{name} {micros:,.0f} µs" for name, micros in stages.items() if name != "queue")
            )
    if "batching_gain" in result:
        lines.append(
            f"1 instance per request, {_MANY_CONNECTIONS} connections: "
            f"{result['joined_requests_per_cpu_s']:,.0f} requests per CPU second joined, "
            f"{result['alone_requests_per_cpu_s']:,.0f} each alone: {result['batching_gain']:.1f} times"
        )
    for instances in (1, 16):
        if f"capacity_{instances}" not in result:
            continue
        lines.append(f"{instances} instances per request: at most {result[f'capacity_{instances}']:,.0f} requests/s")
        for share in (50, 80):
            figures = ", ".join(
                f"{name} {result[f'{key}_ms_at_{share}_{instances}']:.2f} ms"
                for name, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999"), ("generator lag", "lag_p99"))
            )
            lines.append(f"  at {share} %: {figures}")
    if "swap_p99_ratio" in result:
        lines.append(
            f"p99 at half of the capacity: {result['p99_ms_without_swaps']:.2f} ms; times as long during a switch to a "
            f"new base: {result['swap_p99_ratio_base']:.2f}, with a delta per second: "
            f"{result['swap_p99_ratio_delta']:.2f}"
        )
    return lines + serve_rivals.describe(result)
