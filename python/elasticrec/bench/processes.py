"""Processes of a measurement: their CPU time, free ports for them, and the scripts that they run."""

import contextlib
import os
import socket
from pathlib import Path

from elasticrec.errors import ConfigError


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
