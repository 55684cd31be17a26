"""Load on a live server with the lines of a file: how many requests it answers, and how long they take."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.config import Secret
from elasticrec.data.lines import any_parser, record_batches
from elasticrec.errors import ConfigError, SampleError
from elasticrec.serving.client import Client
from elasticrec.serving.protocol import Answer, Place, model_path

Result = dict[str, Any]

FORMATS = ("text", "json")
_CONTENT_TYPES = {"text": "text/plain", "json": "application/json"}
# Lines are kept in memory; more of them than caches hold make no difference.
_MAX_BYTES = 64 * 2**20
_BATCH_SIZE = 4096
_PROGRESS_LINES = 10
_POISSON_SEED = 1
# From there on the figures say more about the generator than about the server.
_MAX_LAG_US = 1000.0
_MAX_LATE_SHARE = 0.01


@dataclass(frozen=True)
class Load:
    """What to send, and how hard."""

    file: Path
    format: str
    instances: int
    """Lines a request."""
    connections: int
    seconds: float
    rate: float | None
    """Requests a second; without it, as fast as answers come."""
    poisson: bool


def run(url: str, name: str | None, token: str | None, load: Load, say: Callable[[str], None]) -> Result:
    """Put the load on a server and return the figures."""
    if load.format not in FORMATS:
        raise ConfigError(f"bench: --format: expected {' or '.join(FORMATS)}, got `{load.format}`")
    if load.poisson and load.rate is None:
        raise ConfigError("bench: --poisson goes with --rate")
    place = Place.of(url)
    if place.has_tls:
        raise ConfigError(f"bench: {place.where}: expected http://, got https://: the load does not speak TLS")
    secret = Secret(token, Path.cwd()).reveal_token() if token else None
    bodies = _bodies(_lines(load), load)
    with Client(url, name, token=secret, retries=0) as client:
        # a file that the server refuses is one error here, and a million failures below
        model = _ask(client, load.format, bodies[0]).model
    pace = f"{load.rate:,g} requests/s" if load.rate else "as fast as it answers"
    say(f"{model} at {url}: {load.instances:,} lines a request, {load.connections:,} connections, {pace}")
    report = _core.load_test(
        place.where,
        f"{place.prefix}{model_path(model)}:predict",
        bodies,
        content_type=_CONTENT_TYPES[load.format],
        token=secret,
        connections=load.connections,
        seconds=load.seconds,
        rate=load.rate,
        poisson_seed=_POISSON_SEED if load.poisson else None,
        progress=_progress(load.seconds, say),
    )
    return _result(load, model, report)


def describe(result: Result) -> list[str]:
    """The figures for people, and whether they are to be trusted."""
    lines = [
        f"{result['requests_per_s']:,.0f} requests/s, {result['instances_per_s']:,.0f} samples/s: "
        f"{result['answered']:,} answered in {result['seconds']:.1f} s, {result['failed']:,} failed"
    ]
    lines += [f"  failed: {count:,} × {kind}" for kind, count in result["failures"].items()]
    lines.append(
        "latency of the answered ones: "
        + ", ".join(
            f"{label} {result[f'{name}_us'] / 1000:,.2f} ms"
            for label, name in (("p50", "p50"), ("p90", "p90"), ("p99", "p99"), ("p99.9", "p999"), ("max", "max"))
        )
    )
    return lines + _doubts(result)


def _doubts(result: Result) -> list[str]:
    """Why an open loop is not what was asked for."""
    doubts = []
    if result["unsent"]:
        doubts.append(
            f"the generator fell behind: {result['unsent']:,} of {result['offered']:,} requests were never sent, all "
            f"{result['connections']:,} connections were busy; the latencies leave them out"
        )
    elif result["late"] > _MAX_LATE_SHARE * result["offered"]:
        doubts.append(
            f"{result['late']:,} of {result['offered']:,} requests waited for a connection, which counts as latency: "
            "is it the server, or are these too few --connections?"
        )
    if result["lag_p99_us"] > _MAX_LAG_US:
        doubts.append(
            f"the generator fell behind: 1 % of the requests were sent {result['lag_p99_us'] / 1000:,.1f} ms or more "
            "after they were due; give it a core of its own"
        )
    return doubts


def _result(load: Load, model: str, report: _core.LoadReport) -> Result:
    names = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us", "lag_p99_us")
    return {
        "model": model,
        "instances": load.instances,
        "connections": load.connections,
        "rate": load.rate,
        "poisson": load.poisson,
        "seconds": round(report.seconds, 4),
        "offered": report.offered,
        "answered": report.answered,
        "failed": report.failed,
        "failures": report.failures,
        "late": report.late,
        "unsent": report.unsent,
        "requests_per_s": round(report.requests_per_s, 1),
        "instances_per_s": round(report.requests_per_s * load.instances, 1),
        **{name: round(getattr(report, name), 1) for name in names},
    }


def _lines(load: Load) -> list[bytes]:
    """The lines of the file, plain or compressed, without those that are blank."""
    size = 0
    lines: list[bytes] = []
    for batch in record_batches(load.file, any_parser(), batch_size=_BATCH_SIZE):
        for index in range(len(batch)):
            line = batch[index]
            lines.append(line if load.format == "text" else _instance(line, batch.place(index)))
            size += len(line)
        if size >= _MAX_BYTES:
            break
    if not lines:
        raise SampleError(f"{load.file}: expected lines, got none")
    return lines


def _instance(line: bytes, place: str) -> bytes:
    try:
        if isinstance(json.loads(line), dict):
            return line
    except (ValueError, RecursionError):
        pass
    raise SampleError(f"{place}: expected a JSON object of named slots, got {line[:60]!r}")


def _bodies(lines: list[bytes], load: Load) -> list[bytes]:
    """Requests of so many lines each, over and over the same ones where the file has fewer."""
    endless = itertools.cycle(lines)
    num_bodies = max(len(lines) // load.instances, 1)
    chunks = (list(itertools.islice(endless, load.instances)) for _ in range(num_bodies))
    if load.format == "text":
        return [b"".join(line + b"\n" for line in chunk) for chunk in chunks]
    return [b'{"instances":[' + b",".join(chunk) + b"]}" for chunk in chunks]


def _ask(client: Client, format: str, body: bytes) -> Answer:
    return client.ask_lines(body) if format == "text" else client.ask(json.loads(body)["instances"])


def _progress(seconds: float, say: Callable[[str], None]) -> Callable[[float, int, int], None]:
    every = max(seconds / _PROGRESS_LINES, 1.0)
    last = 0.0

    def tell(elapsed: float, answered: int, failed: int) -> None:
        nonlocal last
        if elapsed >= last + 0.9 * every:
            last = elapsed
            say(f"{elapsed:.0f} of {seconds:g} s: {answered:,} answered, {failed:,} failed")

    return tell
