"""The coordinator on a real socket, and the client that the roles use."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from elasticrec.coordinator import api
from elasticrec.coordinator.api import CoordinatorServer, ServerOptions
from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.coordinator.settings import Settings
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.coordinator import CoordinatorClient, Term
from elasticrec.net.messages import FencedError, SurplusError
from elasticrec.net.security import Security
from elasticrec.run import Run
from support.fake_roles import Clock, ask_twice, plan_of
from support.store import free_port

GO: dict[str, Any] = {"term": 1, "epoch": 1, "commands": [], "go": True}
EMPTY = {"watermark": 0, "complete": [], "open": {}, "boundaries": 0}


@contextmanager
def serving(tmp_path: Path, **listen: Any) -> Iterator[CoordinatorServer]:
    """Run a coordinator whose clock stands still, so that no lease expires on a slow machine."""
    settings = Settings(job="j", num_partitions=4, servers=1, plan=plan_of(tmp_path))
    with closing(Coordinator(Run(tmp_path / "run"), settings, clock=Clock())) as coordinator:
        address = {name: listen.pop(name) for name in ("host", "port") if name in listen}
        with CoordinatorServer(coordinator, ServerOptions(**address, security=Security(**listen))) as server:
            yield server


def client_of(url: str, **options: Any) -> CoordinatorClient:
    security = Security(**{name: options.pop(name) for name in ("token", "ca") if name in options})
    return CoordinatorClient(url, security=security, **{"deadline_s": 60.0, "attempt_s": 60.0, **options})


def raw(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    with closing(connection):
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_a_unit_from_lease_to_report(tmp_path: Path) -> None:
    with serving(tmp_path) as server, client_of(server.url) as client:
        shard = client.register_shard("s", index=0)
        assert (shard["partitions"], shard["epoch"], shard["checkpoint"]) == ([0, 4], 1, None)
        assert [boundary["before_unit"] for boundary in shard["boundaries"]] == [6]
        trainer = client.register_trainer("t")["incarnation"]
        assert "shard 0 is down" in client.lease(trainer, [])["why"]

        def beat(sequence: int, record: dict[str, Any]) -> dict[str, Any]:
            status = {"num_rows": 7, "records": [[[0, 1, 2, 3], record]]}
            more = {"address": "127.0.0.1:1", "state": "serving", "boundaries": 0, "status": status}
            return client.shard_heartbeat(shard["incarnation"], sequence, **more)

        assert [command["command"] for command in beat(1, EMPTY)["commands"]] == ["boundaries"]
        lease = client.lease(trainer, [])
        assert lease["unit"]["id"] == 0 and lease["unit"]["path"] == str(tmp_path / "train.txt")
        assert lease["skip"] == [] and lease["shards"][0]["address"] == "127.0.0.1:1"
        assert client.trainer_heartbeat(trainer, 1, units=[0])["drop"] == []
        assert client.report_done(trainer, 0)["held"]
        beat(2, EMPTY | {"watermark": 1, "open": {"1": {"batches": {"0": 2**64 - 1}, "num_batches": None}}})
        lease = client.lease(trainer, [])
        assert (lease["unit"]["id"], lease["skip"], lease["replay"]) == (1, [0], True)
        assert client.give_back(trainer, 1)["held"]
        assert client.checkpoint()["ticket"] == 1
        (command,) = [one for one in beat(3, EMPTY | {"watermark": 1})["commands"] if one["command"] == "snapshot"]
        assert Path(command["rows"]).parent == tmp_path / "run/checkpoints" / command["checkpoint"]
        status = client.status()
        assert status["units"]["complete"] == 1 and status["shards"][0]["figures"] == {"num_rows": 7}
        assert status["checkpoint"]["writing"] == command["checkpoint"]
        with pytest.raises(FencedError, match="incarnation 5: not a member: it never registered"):
            client.shard_heartbeat(5, 1)
        with pytest.raises(ConfigError, match="unit: expected a unit below 6, got 6"):
            client.report_done(trainer, 6)
        with pytest.raises(ConfigError, match="shard 0: not a trainer"):
            client.lease(shard["incarnation"], [])
        with pytest.raises(SurplusError, match="index: expected a shard below 1, got 1"):
            client.register_shard("x", index=1)
        with pytest.raises(ConfigError, match="protocol") as raised:
            client._post("register", protocol=0, role="ps", nonce="y")
        assert not isinstance(raised.value, SurplusError)


def test_metrics(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        with closing(http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)) as connection:
            connection.request("GET", "/metrics")
            response = connection.getresponse()
            assert response.getheader("content-type") == "text/plain; version=0.0.4; charset=utf-8"
            lines = response.read().decode().splitlines()
    values = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}
    assert values["elasticrec_coordinator_term"] == 1
    assert values["elasticrec_coordinator_units_planned"] == 6
    assert values['elasticrec_coordinator_shards{state="down"}'] == 1
    assert "elasticrec_coordinator_units_complete" not in values, "no shard has reported"
    named = {line.split(" ")[2] for line in lines if line.startswith("# TYPE")}
    assert {name.partition("{")[0] for name in values} <= named
    assert len(named) == len([line for line in lines if line.startswith("# HELP")])


@pytest.mark.parametrize("path", ["/v1/status", "/metrics"])
@pytest.mark.parametrize("given", [None, "Bearer secre", "Bearer secretx", "Bearer ", "secret", "Basic secret", "é"])
def test_a_wrong_token(tmp_path: Path, path: str, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    with serving(tmp_path, token="secret") as server:
        expected = (401, {"term": 1, "error": "missing or wrong token"})
        assert raw(server.url, "GET", path, **headers) == expected
        assert raw(server.url, "POST", "/v1/register", b"{", **headers) == expected
        assert raw(server.url, "GET", "/health", **headers) == (200, {"status": "ok", "term": 1})


def test_the_right_token(tmp_path: Path) -> None:
    with serving(tmp_path, token="secret") as server:
        with client_of(server.url, token="secret") as client:
            assert client.status()["state"] == "running"
        with client_of(server.url, token="other") as client:
            with pytest.raises(ConfigError, match=r"^coordinator at 127.0.0.1:\d+: missing or wrong token$"):
                client.status()


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("register", b"", "register: body: invalid json"),
        ("register", b"[]", "register: body: "),
        ("register", b"{}", "register: protocol: field required"),
        ("register", b'{"protocol": 1, "role": "king", "nonce": "a"}', "register: role: input should be 'ps' or"),
        ("register", b'{"protocol": 1, "role": "ps", "nonce": ""}', "register: nonce: "),
        ("register", b'{"protocol": 2, "role": "ps", "nonce": "a"}', "register: protocol: expected 1, got 2: the role"),
        ("register", b'{"protocol": 2, "role": "ps", "nonce": "a", "new": 1}', "register: protocol: expected 1, got 2"),
        ("register", b'{"protocol": 1, "role": "ps", "nonce": "a", "new": 1}', "register: new: extra inputs"),
        ("heartbeat", b'{"incarnation": -1, "sequence": 0}', "heartbeat: incarnation: "),
        ("heartbeat", b'{"incarnation": 18446744073709551616, "sequence": 0}', "heartbeat: incarnation: "),
        ("heartbeat", b'{"incarnation": 1, "sequence": 0, "status": {"records": [[1]]}}', "heartbeat: status.records"),
        ("lease", b'{"incarnation": "x"}', "lease: incarnation: "),
        ("lease", b"[" * 100_000, "lease: body: invalid json"),
        ("lease", b'{"incarnation": 1, "holds": "\xff"}', "lease: body: invalid json"),
    ],
)  # fmt: skip
def test_bad_bodies(tmp_path: Path, path: str, body: bytes, error: str) -> None:
    with serving(tmp_path) as server:
        status, answer = raw(server.url, "POST", f"/v1/{path}", body)
    assert status == 400 and answer["error"].startswith(error), answer
    assert "\n" not in answer["error"]


def test_other_paths_and_methods(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert raw(server.url, "GET", "/v2") == (404, {"term": 1, "error": "not found"})
        assert raw(server.url, "GET", "/v1/lease") == (405, {"term": 1, "error": "method not allowed"})


def test_long_bodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_BODY_BYTES", 1000)
    with serving(tmp_path) as server:
        status, answer = raw(server.url, "POST", "/v1/lease", b" " * 1001)
        assert (status, answer["error"]) == (413, "body: expected at most 1000 bytes")
        assert raw(server.url, "POST", "/v1/lease", b" " * 1000)[0] == 400


def test_internal_errors_show_the_type_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Coordinator) -> None:
        raise KeyError("secret")

    monkeypatch.setattr(Coordinator, "status", fail)
    with serving(tmp_path) as server:
        assert raw(server.url, "GET", "/v1/status") == (500, {"term": 1, "error": "internal error: KeyError"})


def test_small_answers_do_not_wait_for_the_peer(tmp_path: Path) -> None:
    # asyncio turns off Nagle's algorithm for accepted connections only if the listening socket names its protocol.
    with serving(tmp_path) as server:
        assert server._web._socket.proto == socket.IPPROTO_TCP


def test_a_port_in_use(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^coordinator: 127.0.0.1:{port}: cannot listen: the port is in use$"):
            with serving(tmp_path, port=port):
                pass


def test_no_server_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with client_of(f"http://127.0.0.1:{port}", **ask_twice(monkeypatch)) as client:
        with pytest.raises(
            UnavailableError,
            match=rf"^coordinator at 127.0.0.1:{port} did not answer: .*refused \(2 attempts in 119 s\)$",
        ):
            client.status()


@pytest.mark.parametrize("url", ["", "127.0.0.1:7", "http://", "http://h", "ftp://h:1", "http://h:x", "http://[::1"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="coordinator: expected a URL such as"):
        client_of(url)


def test_requests_wait_for_the_next_coordinator(tmp_path: Path) -> None:
    """The next coordinator at the same address knows all members, and requests wait for it."""
    port = free_port()
    with serving(tmp_path, port=port) as server, client_of(server.url) as client:
        trainer = client.register_trainer("t")["incarnation"]
    answers: list[dict[str, Any]] = []
    with client_of(f"http://127.0.0.1:{port}", term=client.term, deadline_s=100.0) as again:
        thread = threading.Thread(target=lambda: answers.append(again.trainer_heartbeat(trainer, 2)))
        thread.start()
        with serving(tmp_path, port=port):
            thread.join(timeout=120)
    assert [answer["term"] for answer in answers] == [2] and client.term.value == 2


@contextmanager
def answering(answer: Callable[[], bytes]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer()

        def _answer(self) -> None:
            body = answer()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_lower_term_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terms = iter([5, 3, 4, 6])
    with answering(lambda: json.dumps(GO | {"term": next(terms)}).encode()) as url:
        with client_of(url) as client, client_of(url, term=client.term) as other:
            assert client.meet(1, 1)["term"] == 5
            assert other.meet(1, 1)["term"] == 6, "the request is repeated until the term is high enough"
    with serving(tmp_path) as server:
        status = raw(server.url, "GET", "/v1/status")[1]
    terms = iter([5, 3, 4, 6])
    with answering(lambda: json.dumps(status | {"term": next(terms)}).encode()) as url:
        with client_of(url) as client, client_of(url, term=client.term) as other:
            assert (client.status()["term"], other.status()["term"]) == (5, 6), "GET requests are repeated too"
    with answering(lambda: b'{"term": 5}') as url:
        term = Term()
        assert term.accept(7) and not term.accept(6) and term.accept(7)
        with client_of(url, term=term, **ask_twice(monkeypatch)) as client:
            with pytest.raises(UnavailableError, match="an old coordinator: expected term 7 or later, got 5"):
                client.status()


def test_responses_are_checked() -> None:
    """A response of another release is refused if it lacks a field; unknown fields are kept."""
    with answering(lambda: json.dumps(GO | {"new": 1}).encode()) as url, client_of(url) as client:
        assert client.meet(1, 1) == GO | {"new": 1}
        with pytest.raises(
            ConfigError,
            match=r"^coordinator at 127.0.0.1:\d+: ticket: field required: the coordinator runs another release$",
        ):
            client.checkpoint()
        with pytest.raises(ConfigError, match=r"unit: field required"):
            client.lease(1, [])
        with pytest.raises(ConfigError, match=r"incarnation: field required"):
            client.register_shard("s")
    with answering(lambda: json.dumps(GO | {"go": "perhaps"}).encode()) as url, client_of(url) as client:
        with pytest.raises(ConfigError, match=r"go: input should be a valid boolean"):
            client.meet(1, 1)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b"{}", b'{"term": "x"}', b"[" * 100_000])
def test_another_server_at_the_address(body: bytes) -> None:
    with answering(lambda: body) as url, client_of(url, deadline_s=0.5) as client:
        with pytest.raises(UnavailableError):
            client.status()


def test_leases_start_when_the_request_is_sent() -> None:
    arrivals: list[float] = []

    def answer() -> bytes:
        arrivals.append(time.monotonic())
        # The first answer is empty: the request is sent again, and the lease runs from the second one.
        return json.dumps(GO).encode() if len(arrivals) > 1 else b""

    with answering(answer) as url, client_of(url) as client:
        client.meet(1, 1)
        assert arrivals[0] < client.sent_at <= arrivals[1]
