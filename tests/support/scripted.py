"""A prediction server that gives scripted answers in order and records the requests."""

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.certificates import Files

PATHS = {
    "models": "/v1/models",
    "model": "/v1/models/demo",
    "predict": "/v1/models/demo:predict",
    "ready": "/ready",
}
DEFAULT_ANSWERS: dict[str, Any] = {
    "models": {"models": [{"name": "demo", "version": 1}]},
    "model": {"labels": ["click"]},
    "ready": {"status": "ready"},
    "predict": {"predictions": [{"click": 0.5}]},
}

# Behaviours instead of an answer.
CLOSE = "close"
"""Close the connection."""
HANG = "hang"
"""Send nothing until the server ends."""
TRICKLE = "trickle"
"""Send a byte from time to time, forever."""


@dataclass(frozen=True)
class ReceivedRequest:
    """A received request; names of headers are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    at: float


@dataclass
class Scripted:
    """A server with answers by name; the last answer of a list is repeated."""

    answers: dict[str, Any]
    close_after: bool = False
    url: str = ""
    asked: list[ReceivedRequest] = field(default_factory=list)
    num_connections: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)
    _sockets: list[socket.socket] = field(default_factory=list)

    def predictions(self) -> list[ReceivedRequest]:
        """Return the requests for predictions."""
        return [one for one in self.asked if one.path.endswith(":predict")]

    def next_answer(self, asked: ReceivedRequest) -> Any:
        """Record a request and return its answer."""
        with self._lock:
            self.asked.append(asked)
            name = next((name for name, path in PATHS.items() if asked.path.endswith(path)), None)
            answer = self.answers.get(name, (404, {"error": "no such path"})) if name else (404, {"error": "no path"})
            if isinstance(answer, list):
                answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return answer(asked) if callable(answer) else answer

    def opened(self, connection: socket.socket) -> None:
        """Count a connection."""
        with self._lock:
            self.num_connections += 1
            self._sockets.append(connection)

    def disconnect(self) -> None:
        """Close all connections, like a server that shuts down."""
        self.ended.set()
        with self._lock:
            for connection in self._sockets:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


def answers_of(**answers: Any) -> dict[str, Any]:
    """Return the default answers with some replaced."""
    return DEFAULT_ANSWERS | answers


def echo(asked: ReceivedRequest) -> Any:
    """Answer each instance with the value of its slot `x`."""
    return {"predictions": [{"click": instance["x"]} for instance in json.loads(asked.body)["instances"]]}


@contextmanager
def scripted(
    *, port: int = 0, tls: Files | None = None, close_after: bool = False, **answers: Any
) -> Iterator[Scripted]:
    """Run a server. An answer is `(status, content)`, `(status, content, headers)` or the content of a 200."""
    script = Scripted(answers_of(**answers), close_after)
    handler = type("Handler", (_Handler,), {"script": script})
    with _Server(("127.0.0.1", port), handler) as running:
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls.cert, tls.key)
            # A failing handshake must not block other connections.
            running.socket = context.wrap_socket(running.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        script.url = f"{'https' if tls else 'http'}://127.0.0.1:{running.server_port}"
        try:
            yield script
        finally:
            script.disconnect()
            running.shutdown()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    script: Scripted

    def setup(self) -> None:
        super().setup()
        self.script.opened(self.request)

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        answer = self.script.next_answer(ReceivedRequest(self.command, self.path, headers, body, time.monotonic()))
        if answer == CLOSE:
            self.close_connection = True
        elif answer == HANG:
            self.script.ended.wait()
            self.close_connection = True
        elif answer == TRICKLE:
            self._trickle()
        else:
            self._write(*(answer if isinstance(answer, tuple) else (200, answer)))

    def _write(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        # Like a server that closes idle connections without notice.
        self.close_connection = self.script.close_after

    def _trickle(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "100000")
        self.end_headers()
        while not self.script.ended.wait(0.02):
            self.wfile.write(b" ")
        self.close_connection = True

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


def counted(values: list[float]) -> Callable[[ReceivedRequest], Any]:
    """Return an answer with one prediction per line, taking these scores in order."""
    left = iter(values)

    def answer(asked: ReceivedRequest) -> Any:
        return {"predictions": [{"click": next(left)} for line in asked.body.splitlines() if line.strip()]}

    return answer
