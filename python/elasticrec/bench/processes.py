"""Processes of a measurement: their CPU time, free ports and scripts for them, and single requests to them."""

import contextlib
import os
import socket
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.http_client import HttpClient, HttpResponse
from elasticrec.net.security import Security

_TIMEOUT_S = 10.0


def cpu_seconds(process_id: int) -> float:
    """Return the user and system time of a process and all its threads so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def require_clone(scripts: Path) -> Path:
    """Return a path below `benchmarks/`; raise an error in an installed package, which lacks it."""
    if not scripts.exists():
        raise ConfigError("bench: --rivals: expected a clone with `benchmarks/`, got an installed package")
    return scripts


def free_ports(count: int) -> list[int]:
    """Return distinct ports of the loopback address that no process listens on."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def request(
    address: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> HttpResponse:
    """Send a GET request, or a POST request if there is a body, and return the response; raise if it is an error."""
    with HttpClient(f"http://{address}", name=address, security=Security(), timeout_s=_TIMEOUT_S) as client:
        response = client.request("GET" if body is None else "POST", path, body, headers)
    if response.status != HTTPStatus.OK:
        raise UnavailableError(f"{address}: {path}: {response.status} {response.reason}")
    return response
