"""Metrics in the text format of Prometheus, and a small server for roles without an HTTP API."""

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from elasticrec.errors import ConfigError
from elasticrec.net.security import has_token

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

Value = float | int | None
Sample = tuple[dict[str, str], Value]


class Families(Collector):
    """Metrics with a common prefix and common labels, from figures that are counted elsewhere."""

    def __init__(self, prefix: str, **labels: str) -> None:
        self._prefix, self._labels = prefix, labels
        self._metrics: list[Metric] = []

    def add(self, name: str, help_text: str, *samples: Sample | Value) -> None:
        """Add a counter if the name ends in `_total`, else a gauge; unknown values are left out."""
        full_name = self._prefix + name
        base_name = full_name.removesuffix("_total")
        metric = Metric(base_name, help_text, "gauge" if base_name == full_name else "counter")
        for sample in samples:
            labels, value = sample if isinstance(sample, tuple) else ({}, sample)
            if value is not None:
                metric.add_sample(full_name, self._labels | labels, value)
        self._metrics.append(metric)

    def add_by(self, name: str, help_text: str, label: str, values: Mapping[str, Value]) -> None:
        """Add a metric with a sample for each value of a label."""
        self.add(name, help_text, *(({label: key}, value) for key, value in values.items()))

    def histogram(self, name: str, help_text: str, buckets: Sequence[tuple[float, int]], total: float) -> None:
        """Add a histogram: counts by upper bound, of which the last is infinite, and the sum of all values."""
        metric = HistogramMetricFamily(self._prefix + name, help_text, labels=list(self._labels))
        cumulative, count = [], 0
        for bound, number in buckets:
            count += number
            cumulative.append(("+Inf" if math.isinf(bound) else f"{bound:.6g}", count))
        metric.add_metric(list(self._labels.values()), cumulative, total)
        self._metrics.append(metric)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics

    def text(self) -> str:
        """Return the metrics in the text format."""
        return generate_latest(self).decode()


class MetricsServer:
    """Serves `/metrics` on 127.0.0.1, on separate threads."""

    def __init__(self, render: Callable[[], str], *, token: str, port: int = 0) -> None:
        try:
            self._server = ThreadingHTTPServer(("127.0.0.1", port), _handler(render, token))
        except OSError as error:
            raise ConfigError(f"metrics: 127.0.0.1:{port}: cannot listen: {error.strerror}") from None
        self.url = f"http://127.0.0.1:{self._server.server_port}/metrics"
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _handler(render: Callable[[], str], token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        # A silent peer must not occupy a thread.
        timeout = 10

        def do_GET(self) -> None:
            if token and not has_token(self.headers.get("authorization", ""), token):
                self._answer(401, "missing or wrong token\n")
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
            """Log nothing: scrapes are frequent."""

    return Handler
