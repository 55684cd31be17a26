"""The HTTP interface of a store process: Cube's JSON, notices, and access with a token."""

import base64
import json
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from elasticrec.cube.http import LookupResult, make_app
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.server import ListenOptions, WebServer


class FakeNode:
    """A node with rows of two values for even signs."""

    def __init__(self) -> None:
        self.num_notices, self.ready = 0, True
        self.error: Exception | None = None

    def status(self) -> dict[str, Any]:
        return {"versions": [7]}

    def is_ready(self) -> bool:
        return self.ready

    def poll_now(self) -> None:
        self.num_notices += 1

    def seek(self, signs: list[int]) -> LookupResult:
        if self.error is not None:
            raise self.error
        is_present = [sign % 2 == 0 for sign in signs]
        rows = b"".join(
            struct.pack("<2f", sign if present else 0, 0.5 if present else 0)
            for sign, present in zip(signs, is_present, strict=True)
        )
        return LookupResult(7, rows, is_present)

    def metrics(self) -> str:
        return "elasticrec_cube_ready 1\n"


@pytest.fixture
def node() -> FakeNode:
    return FakeNode()


@pytest.fixture
def url(node: FakeNode) -> Iterator[str]:
    server = WebServer(make_app(node, "secret"), ListenOptions("cube", "127.0.0.1", 0))
    server.start()
    yield server.url
    server.stop()


def ask(url: str, body: bytes | None = None, token: str = "secret") -> tuple[int, Any]:
    request = urllib.request.Request(url, data=body, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_seek_answers_in_cubes_json(url: str) -> None:
    status, answer = ask(f"{url}/DictService/seek", b'{"keys": [4, 5, "18446744073709551614"]}')
    assert status == 200 and "version" not in answer
    assert [value["status"] for value in answer["values"]] == [0, 4294967295, 0]
    assert struct.unpack("<2f", base64.b64decode(answer["values"][0]["value"])) == (4.0, 0.5)
    assert answer["values"][1]["value"] == ""
    _, answer = ask(f"{url}/DictService/seek", b'{"keys": [4], "version_required": true}')
    assert answer["version"] == "7"
    assert ask(f"{url}/DictService/seek", b"{}") == (200, {"values": []})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"keys", "body: expected json: "),
        (b"[1]", "body: expected an object"),
        (b'{"keys": [1], "dict": "x"}', "body: `dict`: expected `keys` and `version_required` only"),
        (b'{"keys": 5}', "body: expected `keys`, a list"),
        (b'{"keys": [1, -1]}', "body: keys[1]: expected a u64, got -1"),
        (b'{"keys": [18446744073709551616]}', "body: keys[0]: expected a u64, got 18446744073709551616"),
        (b'{"keys": [1.5]}', "body: keys[0]: expected a u64, got 1.5"),
        (b'{"keys": [true]}', "body: keys[0]: expected a u64, got true"),
        (b'{"keys": ["x"]}', 'body: keys[0]: expected a u64, got "x"'),
    ],
)
def test_malformed_requests_are_refused(url: str, body: bytes, expected: str) -> None:
    status, answer = ask(f"{url}/DictService/seek", body)
    assert status == 400 and answer["error"].startswith(expected), answer


def test_status_notices_and_readiness(url: str, node: FakeNode) -> None:
    assert ask(f"{url}/v1/status") == (200, {"versions": [7]})
    assert ask(f"{url}/v1/load", b"") == (202, {"looking": True}) and node.num_notices == 1
    assert ask(f"{url}/ready", token="") == (200, {"ready": True})
    node.ready = False
    assert ask(f"{url}/ready", token="") == (503, {"ready": False})
    assert ask(f"{url}/health", token="") == (200, {"status": "ok"})
    assert ask(f"{url}/nowhere")[0] == 404
    node.error = UnavailableError("cube: no version is loaded yet")
    assert ask(f"{url}/DictService/seek", b'{"keys": [1]}') == (503, {"error": "cube: no version is loaded yet"})
    node.error = ConfigError("expected signs of partitions 0 to 7, got 1 of 9")
    assert ask(f"{url}/DictService/seek", b'{"keys": [1]}')[0] == 400


@pytest.mark.parametrize("path", ["/v1/status", "/v1/load", "/metrics", "/DictService/seek"])
def test_requests_need_the_token(url: str, node: FakeNode, path: str) -> None:
    body = b'{"keys": [2]}' if path in ("/v1/load", "/DictService/seek") else None
    for token in ("", "wrong"):
        assert ask(url + path, body, token) == (401, {"error": "missing or wrong token"})
    assert node.num_notices == 0
