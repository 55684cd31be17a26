"""`bench load`: send the lines of a file to a running server and measure throughput and latency."""

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.config import Secret
from elasticrec.data.raw_lines import any_parser, record_batches
from elasticrec.errors import ConfigError, SampleError
from elasticrec.serving.client import Client
from elasticrec.serving.protocol import Answer, ServerAddress, model_path

Result = dict[str, Any]

FORMATS = ("text", "json")
_CONTENT_TYPES = {"text": "text/plain", "json": "application/json"}
# Lines are kept in memory. More lines than fit into the CPU caches would not change the figures.
_MAX_BYTES = 64 * 2**20
_BATCH_SIZE = 4096
_PROGRESS_LINES = 10
_POISSON_SEED = 1
# Beyond these limits the figures say more about the generator than about the server.
_MAX_LAG_US = 1000.0
_MAX_LATE_SHARE = 0.01


@dataclass(frozen=True)
class Settings:
    """The requests to send and their rate."""

    file: Path
    format: str
    instances: int
    """Lines per request."""
    connections: int
    seconds: float
    rate: float | None
    """Requests per second; None sends as fast as the server answers."""
    poisson: bool


def run(url: str, name: str | None, token: str | None, settings: Settings, say: Callable[[str], None]) -> Result:
    """Send the traffic to a server and return the figures."""
    if settings.format not in FORMATS:
        raise ConfigError(f"bench: --format: expected {' or '.join(FORMATS)}, got `{settings.format}`")
    if settings.poisson and settings.rate is None:
        raise ConfigError("bench: --poisson needs --rate")
    address = ServerAddress.of(url)
    if address.has_tls:
        raise ConfigError(f"bench: {address.where}: expected http://, got https://: `bench load` does not support TLS")
    secret = Secret(token, Path.cwd()).reveal_token() if token else None
    bodies = _bodies(_lines(settings), settings)
    with Client(url, name, token=secret, retries=0) as client:
        # Send one request first: if the server refuses the file, report one error instead of a million failures.
        model = _ask(client, settings.format, bodies[0]).model
    pace = f"{settings.rate:,g} requests/s" if settings.rate else "as fast as it answers"
    say(f"{model} at {url}: {settings.instances:,} lines per request, {settings.connections:,} connections, {pace}")
    report = _core.run_traffic(
        address.where,
        f"{address.prefix}{model_path(model)}:predict",
        bodies,
        content_type=_CONTENT_TYPES[settings.format],
        token=secret,
        connections=settings.connections,
        seconds=settings.seconds,
        rate=settings.rate,
        poisson_seed=_POISSON_SEED if settings.poisson else None,
        progress=_progress(settings.seconds, say),
    )
    return _result(settings, model, report)


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text, with warnings if they cannot be trusted."""
    lines = [
        f"{result['requests_per_s']:,.0f} requests/s, {result['instances_per_s']:,.0f} samples/s: "
        f"{result['answered']:,} answered in {result['seconds']:.1f} s, {result['failed']:,} failed"
    ]
    lines += [f"  failed: {count:,} × {kind}" for kind, count in result["failures"].items()]
    lines.append(
        "latency of answered requests: "
        + ", ".join(
            f"{label} {result[f'{name}_us'] / 1000:,.2f} ms"
            for label, name in (("p50", "p50"), ("p90", "p90"), ("p99", "p99"), ("p99.9", "p999"), ("max", "max"))
        )
    )
    return lines + _warnings(result)


def _warnings(result: Result) -> list[str]:
    """Return the reasons why the generator did not keep the rate."""
    warnings = []
    if result["unsent"]:
        warnings.append(
            f"the generator fell behind: {result['unsent']:,} of {result['offered']:,} requests were never sent: all "
            f"{result['connections']:,} connections were busy; the latencies do not include them"
        )
    elif result["late"] > _MAX_LATE_SHARE * result["offered"]:
        warnings.append(
            f"{result['late']:,} of {result['offered']:,} requests waited for a connection, which counts as latency: "
            "the server is slow, or --connections is too small"
        )
    if result["lag_p99_us"] > _MAX_LAG_US:
        warnings.append(
            f"the generator fell behind: 1 % of the requests were sent {result['lag_p99_us'] / 1000:,.1f} ms or more "
            "after they were due; give it a core of its own"
        )
    return warnings


def _result(settings: Settings, model: str, report: _core.TrafficReport) -> Result:
    names = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us", "lag_p99_us")
    return {
        "model": model,
        "instances": settings.instances,
        "connections": settings.connections,
        "rate": settings.rate,
        "poisson": settings.poisson,
        "seconds": round(report.seconds, 4),
        "offered": report.offered,
        "answered": report.answered,
        "failed": report.failed,
        "failures": report.failures,
        "late": report.late,
        "unsent": report.unsent,
        "requests_per_s": round(report.requests_per_s, 1),
        "instances_per_s": round(report.requests_per_s * settings.instances, 1),
        **{name: round(getattr(report, name), 1) for name in names},
    }


def _lines(settings: Settings) -> list[bytes]:
    """Return the lines of the file, plain or compressed, without blank lines."""
    size = 0
    lines: list[bytes] = []
    for batch in record_batches(settings.file, any_parser(), batch_size=_BATCH_SIZE):
        for index in range(len(batch)):
            line = batch[index]
            lines.append(line if settings.format == "text" else _instance(line, batch.location_of(index)))
            size += len(line)
        if size >= _MAX_BYTES:
            break
    if not lines:
        raise SampleError(f"{settings.file}: expected lines, got none")
    return lines


def _instance(line: bytes, where: str) -> bytes:
    try:
        if isinstance(json.loads(line), dict):
            return line
    except (ValueError, RecursionError):
        pass
    raise SampleError(f"{where}: expected a JSON object of named slots, got {line[:60]!r}")


def _bodies(lines: list[bytes], settings: Settings) -> list[bytes]:
    """Return request bodies of `instances` lines each; the lines repeat if the file has too few."""
    endless = itertools.cycle(lines)
    num_bodies = max(len(lines) // settings.instances, 1)
    chunks = (list(itertools.islice(endless, settings.instances)) for _ in range(num_bodies))
    if settings.format == "text":
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
