"""The shared HTTP client: responses, failures in one wording, a kept connection, and back-off."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.http_client import Backoff, HttpClient, check_url
from elasticrec.net.security import Security
from support.store import free_port


class Handler(BaseHTTPRequestHandler):
    """Answers with the method, the token and the body; every connection has a number."""

    protocol_version = "HTTP/1.1"
    connections: set[object]

    def _answer(self) -> None:
        type(self).connections.add(self.connection)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        token = self.headers.get("authorization", "no token")
        content = f"{self.command} {self.path} {token} {body.decode()}".encode()
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    Handler.connections = set()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def client_of(port: int, token: str | None = None, timeout_s: float = 60.0) -> HttpClient:
    return HttpClient(f"http://127.0.0.1:{port}", name="peer", security=Security(token), timeout_s=timeout_s)


def test_requests_share_a_connection_until_reconnect(server: ThreadingHTTPServer) -> None:
    with client_of(server.server_port, "secret") as client:
        assert client.request("GET", "/a").content == b"GET /a Bearer secret "
        response = client.request("POST", "/none", b"body")
        assert (response.status, response.content) == (404, b"POST /none Bearer secret body")
        assert response.headers["content-LENGTH"] == str(len(response.content))
        assert len(Handler.connections) == 1
        client.reconnect()
        assert client.request("GET", "/b").status == 200
        assert len(Handler.connections) == 2


def test_a_peer_that_refuses_or_hangs_is_named() -> None:
    with client_of(free_port()) as client:
        with pytest.raises(UnavailableError, match=r"^peer did not answer: .*refused"):
            client.request("GET", "/")
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        with client_of(silent.getsockname()[1], timeout_s=0.2) as client:
            with pytest.raises(UnavailableError, match=r"^peer did not answer: timed out$"):
                client.request("GET", "/")


def test_the_token_is_not_sent_to_another_machine_in_clear_text() -> None:
    with pytest.raises(ConfigError, match=r"^peer: the token would go to another machine in clear text"):
        HttpClient("http://10.0.0.1:7", name="peer", security=Security("secret"), timeout_s=1.0)


@pytest.mark.parametrize("url", ["", "127.0.0.1:7", "http://h", "ftp://h:1", "http://h:x", "http://[::1"])
def test_urls_without_scheme_host_or_port_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"^peer: expected a URL such as http://h:1, got"):
        check_url("peer", url, "http://h:1")


def test_pauses_double_up_to_a_limit_and_have_jitter() -> None:
    backoff = Backoff(0.1, 1.0)
    pauses = [backoff.next_pause_s() for _ in range(50)]
    assert all(0.1 <= pause <= 1.0 for pause in pauses)
    assert max(pauses[10:]) > 0.5 and len(set(pauses)) > 10
