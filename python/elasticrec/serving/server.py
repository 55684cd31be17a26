"""Starting the server and watching it; requests are answered in Rust."""

import signal
import socket
from collections.abc import Callable
from pathlib import Path

from elasticrec import _core
from elasticrec.config import Serve
from elasticrec.errors import ConfigError
from elasticrec.machine import num_cores
from elasticrec.serving.onnxruntime import library_path

# How often the main thread looks up from its wait, so that Python handles signals.
_TICK_S = 0.2
# What was accepted before a stop has so long to be answered.
_DRAIN_S = 10.0


def start_server(settings: Serve, models: list[tuple[str, list[tuple[str, float]]]]) -> _core.Server:
    """Bind the address; the server answers 503 until its models are loaded."""
    return _core.Server(
        str(library_path()),
        _address(settings.host, settings.port),
        models,
        workers=settings.threads or num_cores(),
        queue=settings.queue,
        max_body_bytes=settings.max_body_bytes,
        max_instances=settings.max_instances,
        batch_size=settings.batch_size,
        batch_wait_us=settings.batch_wait_us,
        timeout_ms=None,
        token=settings.token.reveal_token() if settings.token else None,
    )


def serve_model(path: Path, model: str, settings: Serve, say: Callable[[str], None]) -> None:
    """Serve a version until SIGINT or SIGTERM, then answer what was accepted and return."""
    server = start_server(settings, [(model, [("", 1.0)])])
    url = f"http://{server.address}"
    say(f"loading {path}")
    version, rows = server.load(model, "", str(path))
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    say(f"serving {model} version {version} ({rows:,} rows) on {url}/v1/models/{model}:predict")
    while not stopping and not server.wait(_TICK_S):
        pass
    say("stopping: answering what was accepted")
    if not server.stop(_DRAIN_S):
        say(f"stopped with requests that took longer than {_DRAIN_S:.0f} s")


def _address(host: str, port: int) -> str:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"serve.host: expected an address, got `{host}`: {error.strerror}") from None
    ip = str(address[0])
    return f"[{ip}]:{port}" if family == socket.AF_INET6 else f"{ip}:{port}"
