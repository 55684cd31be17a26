"""The text that Prometheus reads, and a small server for roles that have no other HTTP face."""

import hmac
import math
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from elasticrec.errors import ConfigError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Value = float | int | None
Sample = tuple[dict[str, str], Value]


class Families:
    """Metrics under one prefix, with labels that all of them have."""

    def __init__(self, prefix: str, **labels: str) -> None:
        self._prefix, self._labels = prefix, labels
        self._lines: list[str] = []

    def add(self, name: str, kind: Literal["counter", "gauge"], help_text: str, *samples: Sample | Value) -> None:
        """One metric; a value that is not known is left out."""
        full = self._prefix + name
        self._lines += [f"# HELP {full} {help_text}", f"# TYPE {full} {kind}"]
        for sample in samples:
            labels, value = sample if isinstance(sample, tuple) else ({}, sample)
            if value is not None:
                text = ",".join(f'{key}="{label}"' for key, label in (self._labels | labels).items())
                self._lines.append(f"{full}{{{text}}} {value}" if text else f"{full} {value}")

    def histogram(self, name: str, help_text: str, buckets: Sequence[tuple[float, int]], total: float) -> None:
        """Counts by upper bound, the last of which is infinite, and the sum of all values."""
        full = self._prefix + name
        self._lines += [f"# HELP {full} {help_text}", f"# TYPE {full} histogram"]
        labels = "".join(f'{key}="{label}",' for key, label in self._labels.items())
        below = 0
        for bound, count in buckets:
            below += count
            text = "+Inf" if math.isinf(bound) else f"{bound:.6g}"
            self._lines.append(f'{full}_bucket{{{labels}le="{text}"}} {below}')
        own = f"{{{labels.rstrip(',')}}}" if labels else ""
        self._lines += [f"{full}_sum{own} {total}", f"{full}_count{own} {below}"]

    def text(self) -> str:
        """All of it."""
        return "".join(f"{line}\n" for line in self._lines)


class MetricsServer:
    """`/metrics` on a port of this machine, on threads of its own."""

    def __init__(self, render: Callable[[], str], *, token: str, port: int = 0) -> None:
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(render, token))
        except OSError as error:
            raise ConfigError(f"metrics: 127.0.0.1:{port}: cannot listen there: {error.strerror}") from None
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._server.shutdown()
        self._server.server_close()


def _handler(render: Callable[[], str], token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # a peer that says nothing must not keep a thread for ever
        timeout = 10

        def do_GET(self) -> None:
            given = self.headers.get("authorization", "")
            if token and not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode()):
                self._answer(401, "wrong token, or none\n")
            elif self.path != "/metrics":
                self._answer(404, "not found\n")
            else:
                self._answer(200, render())

        def _answer(self, status: int, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: scrapes are no news."""

    return Handler
