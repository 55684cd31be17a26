"""A server at its limits: many connections, large requests, overload, and meaningless bytes."""

import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.errors import SampleError
from elasticrec.repository.repository import Repository
from elasticrec.serving.client import Client
from elasticrec.serving.process import ServerProcess
from support.harness import serving
from support.request_threads import RequestThreads, metrics_of, score_of
from support.store import MODEL, NUM_ROWS, publish

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs/metrics.md"

# `make soak` runs a minute.
OVERLOAD_S = 60.0 if "ELASTICREC_SOAK" in os.environ else 10.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model whose scores show its version."""
    directory = tmp_path_factory.mktemp("limits")
    (directory / "models" / MODEL).mkdir(parents=True)
    repository = Repository.open(directory / "models", MODEL)
    repository.offer(publish(repository).number)
    return directory


@pytest.fixture
def server(directory: Path) -> Iterator[ServerProcess]:
    """Start a server with few scorers and a short queue."""
    with serving(f"models/{MODEL}", *("--set", "serve.threads=1", "--set", "serve.queue=16"), cwd=directory) as server:
        yield server


def resident_bytes(server: ServerProcess) -> int:
    pages = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def load(server: ServerProcess, lines: int, **options: float) -> _core.TrafficReport:
    random = np.random.default_rng(1)
    bodies = [
        b"".join(b"1 0 %d:0\n" % sign for sign in random.integers(1, NUM_ROWS + 1, lines).tolist()) for _ in range(20)
    ]
    report: _core.TrafficReport = _core.run_traffic(server.address, server.predict_path, bodies, **options)
    return report


def test_twice_its_capacity(server: ServerProcess) -> None:
    """Excess requests are refused at once, the others are answered correctly and in time, and memory stays bounded."""
    lines = 500
    capacity = load(server, lines, connections=16, seconds=2.0).requests_per_s
    before = resident_bytes(server)
    with RequestThreads(server.url, retries=1000).running() as requests:
        report = load(server, lines, connections=400, seconds=OVERLOAD_S, rate=2 * capacity)
        requests.wait_for(1)
    assert requests.wrong == [] and set(requests.answers) == {1}
    assert set(report.failures) == {"status 429"}, report.failures
    # The proportion depends on other work on the machine, but both kinds of answers must occur.
    assert report.failed > 100 and report.answered > 0.1 * capacity * OVERLOAD_S
    # The longest wait in the queue, times ten for a busy machine.
    assert report.max_us < 1e6 * (5 + 10 * 16 / capacity)
    assert resident_bytes(server) - before < 100 * 2**20
    figures = metrics_of(server.url)
    assert figures['requests_total{protocol="http",code="429"}'] >= report.failed


def test_a_thousand_connections(server: ServerProcess) -> None:
    report = load(server, 1, connections=1000, seconds=3.0, timeout_s=60.0)
    assert report.answered > 1000 and set(report.failures) <= {"status 429"}, report.failures
    with Client(server.url) as client:
        assert client.predict([{"0": 1}]).item() == score_of(1)


def test_requests_of_one_and_of_ten_thousand(server: ServerProcess) -> None:
    with Client(server.url, timeout_s=120) as client:
        for count in (1, 10_000):
            scores = client.predict([{"0": 1 + at % NUM_ROWS} for at in range(count)])
            assert scores.shape == (count, 1) and (scores == score_of(1)).all()
        with pytest.raises(SampleError, match="413: expected at most 10000 instances in a request, got more"):
            client.predict([{"0": 1}] * 10_001)
        assert client.predict([]).shape == (0, 1)
        # No sign is known: only the part of the score from the weights remains.
        assert client.predict([{}, {"0": 2**64 - 1}, {"0": []}]).ravel().tolist() == [1000.0] * 3


def test_every_metric_is_in_the_reference(server: ServerProcess) -> None:
    with Client(server.url) as client:
        client.predict([{"0": 1}])
    written = set(re.findall(r"^\| `(elasticrec_serve_[a-z_]+)`", DOCS.read_text(), re.MULTILINE))
    names = {name.partition("{")[0] for name in metrics_of(server.url)}
    shown = {f"elasticrec_serve_{re.sub('_(bucket|sum|count)$', '', name)}" for name in names}
    assert shown == written


def test_slow_and_invalid_clients_block_no_others(server: ServerProcess) -> None:
    host, _, port = server.address.rpartition(":")
    heads = [
        b"POST /v1/models/small:predict HTTP/1.1\r\nHost: x\r\nContent-",
        b"POST /v1/models/small:predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
        b"PRPC\xff\xff\xff\xff\xff\xff\xff\xff",
        b"PRPC\x00\x00\x00\x10\x00\x00",
        b"\x16\x03\x01\x02\x00\x01",
        bytes(range(256)),
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 10_000,
    ]
    opened = []
    try:
        for number in range(300):
            connection = socket.create_connection((host, int(port)), timeout=60)
            opened.append(connection)
            # The server may close the connection before all bytes are sent.
            threading.Thread(target=_send, args=(connection, heads[number % len(heads)]), daemon=True).start()
        with RequestThreads(server.url).running() as requests:
            requests.wait_for(1, 300)
        assert requests.wrong == []
    finally:
        for connection in opened:
            connection.close()


def _send(connection: socket.socket, content: bytes) -> None:
    try:
        connection.sendall(content)
    except OSError:
        pass
