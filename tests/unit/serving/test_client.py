"""Both clients against servers that work, are busy, are gone, or are not prediction servers."""

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import AsyncClient, Client
from elasticrec.errors import ConfigError, ElasticRecError, SampleError, UnavailableError
from elasticrec.serving.protocol import Answer, ServerAddress
from support.certificates import Files, write_certificates
from support.harness import TIMEOUT_S
from support.scripted import CLOSE, HANG, TRICKLE, Scripted, echo, scripted

BUSY = (429, {"error": "busy"})
LOADING = (503, {"error": "no model is ready yet"})
GOOD = {"predictions": [{"click": 0.25}]}

Call = Callable[..., Any]


def with_threads(url: str, method: str, *given: Any, options: dict[str, Any] | None = None, **more: Any) -> Any:
    with Client(url, **(options or {})) as client:
        return getattr(client, method)(*given, **more)


def with_asyncio(url: str, method: str, *given: Any, options: dict[str, Any] | None = None, **more: Any) -> Any:
    async def run() -> Any:
        async with AsyncClient(url, **(options or {})) as client:
            return await getattr(client, method)(*given, **more)

    return asyncio.run(run())


@pytest.fixture(params=[with_threads, with_asyncio], ids=["threads", "asyncio"])
def call(request: pytest.FixtureRequest) -> Call:
    """Return a function that creates a client, calls one of its methods and closes it."""
    found: Call = request.param
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_certificates(tmp_path_factory.mktemp("tls"))


def where(server: Scripted) -> str:
    return server.url.partition("//")[2]


@contextlib.contextmanager
def replying(reply: bytes) -> Iterator[str]:
    """Start a server that sends `reply` after the first bytes of a request and closes; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            thread.join()


def unused_url() -> str:
    """Return the URL of a server that has stopped."""
    with scripted() as server:
        return server.url


# requests and answers


def test_scores(call: Call) -> None:
    with scripted(predict=GOOD) as server:
        for scores in (call(server.url, "predict", [{}]), call(server.url, "predict_lines", b"1 0 5:0\n")):
            assert scores.tolist() == [[0.25]] and scores.dtype == np.float32
        assert call(server.url, "predict_lines", "1 0 ü:0\n").shape == (1, 1)
    asked = server.predictions()
    assert [one.headers["content-type"] for one in asked] == ["application/json", "text/plain", "text/plain"]
    assert [one.body for one in asked] == [b'{"instances": [{}]}', b"1 0 5:0\n", "1 0 ü:0\n".encode()]


def test_an_answer_names_model_version_and_variant(call: Call) -> None:
    content = {"model": "demo", "version": 7, "variant": "b", "predictions": [{"click": 0.5, "buy": 0.125}]}
    headers = {"elasticrec-version": "7", "elasticrec-variant": "b"}
    with scripted(predict=(200, content, headers)) as server:
        answer: Answer = call(server.url, "ask", [{}])
        assert (answer.model, answer.version, answer.variant) == ("demo", 7, "b")
        assert answer.labels == ("click", "buy") and answer.scores.tolist() == [[0.5, 0.125]]
        assert call(server.url, "ask_lines", b"- - 5:0").version == 7


def test_an_answer_without_version_and_variant(call: Call) -> None:
    with scripted(predict=GOOD) as server:
        answer = call(server.url, "ask", [{}])
    assert (answer.model, answer.version, answer.variant) == ("demo", None, None)


def test_scores_of_no_samples_have_the_labels_of_the_model(call: Call) -> None:
    with scripted(predict={"predictions": []}, model={"labels": ["click", "buy"]}) as server:
        answer = call(server.url, "ask", [])
    assert answer.scores.shape == (0, 2) and answer.labels == ("click", "buy")


def test_the_headers_of_a_request(call: Call) -> None:
    with scripted() as server:
        call(server.url, "predict", [{}], key="user 17 ü", variant="b", timeout_s=2, options={"token": "secret"})
        call(server.url, "predict_lines", b"1 0\n", key=17)
        call(server.url, "predict", [{}])
        call(server.url, "predict", [{}], timeout_s=1e6)
    first, second, third, last = (one.headers for one in server.predictions())
    assert last["elasticrec-timeout-ms"] == "3600000", "the largest timeout that a server accepts"
    assert first["authorization"] == "Bearer secret" and "authorization" not in third
    assert first["elasticrec-key"].encode("latin-1").decode() == "user 17 ü" and second["elasticrec-key"] == "17"
    assert first["elasticrec-variant"] == "b"
    assert 0 < int(first["elasticrec-timeout-ms"]) <= 2000 < int(third["elasticrec-timeout-ms"]) <= 30_000
    assert not {"elasticrec-key", "elasticrec-variant"} & third.keys()


def test_numpy_values_are_sent_as_json_numbers(call: Call) -> None:
    with scripted(predict=echo) as server:
        assert call(server.url, "predict", [{"x": np.float32(0.5), "y": np.arange(2)}]).tolist() == [[0.5]]
        for value in (float("nan"), object()):
            with pytest.raises(SampleError, match=r"^instances: cannot be written as JSON: "):
                call(server.url, "predict", [{"x": value}])


def test_models_metadata_and_readiness(call: Call) -> None:
    with scripted(ready=[LOADING, {"status": "ready"}]) as server:
        assert call(server.url, "models") == [{"name": "demo", "version": 1}]
        assert call(server.url, "metadata") == {"labels": ["click"]}
        assert [call(server.url, "is_ready") for _ in range(2)] == [False, True]
    assert call(server.url, "is_ready") is False
    assert len([one for one in server.asked if one.path == "/ready"]) == 2, "each call sends one request"


def test_a_hanging_server_is_not_ready(call: Call) -> None:
    with scripted(ready=HANG) as server:
        assert call(server.url, "is_ready", timeout_s=0.1) is False


def test_one_of_several_models_must_be_named(call: Call) -> None:
    with scripted(models={"models": [{"name": "a"}, {"name": "demo"}]}) as server:
        with pytest.raises(ConfigError, match=r": expected one model, got a, demo; name one$"):
            call(server.url, "predict", [{}])
        assert call(server.url, "predict", [{}], options={"model": "demo"}).tolist() == [[0.5]]


def test_variants_of_a_model_are_one_model(call: Call) -> None:
    variants = [{"name": "demo", "version": 1, "variant": "a"}, {"name": "demo", "version": 2, "variant": "b"}]
    with scripted(models={"models": variants}) as server:
        assert call(server.url, "predict", [{}]).tolist() == [[0.5]]


def test_a_server_without_a_model(call: Call) -> None:
    with scripted(models={"models": []}) as server, pytest.raises(UnavailableError, match="no model is ready yet"):
        call(server.url, "predict", [{}])


def test_the_name_of_the_model_is_requested_once() -> None:
    with scripted() as server, Client(server.url) as client:
        for _ in range(3):
            client.predict([{}])
        assert [one.path for one in server.asked] == ["/v1/models"] + ["/v1/models/demo:predict"] * 3
        assert server.num_connections == 1


def test_the_name_of_the_model_is_percent_encoded(call: Call) -> None:
    with scripted() as server, pytest.raises(UnavailableError, match="404: no path"):
        call(server.url, "predict", [{}], options={"model": "a b/ü"})
    assert server.asked[0].path == "/v1/models/a%20b%2F%C3%BC:predict"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://[::1]:8500", "[::1]:8500"),
        ("https://Ctr.example/", "ctr.example:443"),
        ("http://bücher.example", "xn--bcher-kva.example:80"),
    ],
)
def test_errors_name_host_and_port(url: str, expected: str) -> None:
    assert ServerAddress.of(url).where == expected


def test_a_url_may_have_a_path_prefix(call: Call) -> None:
    with scripted() as server:
        assert call(f"{server.url}/feed/", "predict", [{}]).tolist() == [[0.5]]
    assert server.asked[-1].path == "/feed/v1/models/demo:predict"


# errors


@pytest.mark.parametrize("answer", [[], {}, None, 5, "x", {"models": 5}, {"models": [{}]}, b"[" * 100_000, b"\xff"])
def test_errors_name_a_server_of_another_kind(call: Call, answer: Any) -> None:
    with scripted(models=(200, answer)) as server, pytest.raises(UnavailableError) as caught:
        call(server.url, "predict", [{}])
    assert str(caught.value).startswith(f"{where(server)}: ")


@pytest.mark.parametrize("answer", [{}, {"predictions": 5}, {"predictions": [{}]}, {"predictions": [{"click": "abc"}]}])
def test_predictions_in_an_unexpected_format(call: Call, answer: Any) -> None:
    with scripted(predict=answer) as server, pytest.raises(UnavailableError, match="not a prediction server"):
        call(server.url, "predict", [{}])


def test_metadata_in_an_unexpected_format(call: Call) -> None:
    with scripted(model={}) as server, pytest.raises(UnavailableError, match="not a prediction server"):
        call(server.url, "metadata")


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": "line 1: bad"}, SampleError, "400: line 1: bad"),
        (413, {"error": "too many"}, SampleError, "413: too many"),
        (401, {"error": "no token"}, UnavailableError, "401: no token"),
        (404, {"error": "no model"}, UnavailableError, "404: no model"),
        (500, [], UnavailableError, "500: no reason given"),
        (500, 5, UnavailableError, "500: no reason given"),
        (502, b"<html>\n<h1>Bad Gateway</h1>", UnavailableError, "502: <html> <h1>Bad Gateway</h1>"),
    ],
)
def test_refusals_are_final(call: Call, status: int, body: Any, kind: type[ElasticRecError], message: str) -> None:
    with scripted(predict=(status, body)) as server, pytest.raises(kind) as caught:
        call(server.url, "predict", [{}])
    assert str(caught.value) == f"{where(server)}: {message}"
    assert len(server.predictions()) == 1


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:80",
        "ftp://h:1",
        "http://",
        "http://h:99999",
        "http://h:0",
        "http://h:x",
        "http://[::1",
        "http://a b",
        "http://ü..",
        "http://user@h",
        "http://h?x",
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_malformed_urls_are_refused(kind: Any, url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL such as"):
        kind(url)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 0}, "timeout_s: expected a number of seconds above 0, got 0"),
        ({"timeout_s": float("inf")}, "timeout_s: expected a number of seconds above 0, got inf"),
        ({"retries": -1}, "retries: expected a whole number of at least 0, got -1"),
        ({"connections": 0}, "connections: expected a whole number of at least 1, got 0"),
        ({"token": "a\r\nb"}, "token: expected visible ASCII without spaces, got something else"),
        ({"ca": "ca.pem"}, "h:80: expected https:// with a `ca` file, got http://"),
    ],
)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_invalid_settings_of_a_client_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind("http://h", **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "options", [{"key": "a\r\nb"}, {"key": ""}, {"variant": " b"}, {"variant": "ü"}, {"timeout_s": -1}]
)
def test_invalid_options_of_a_call_are_refused(call: Call, options: dict[str, Any]) -> None:
    with scripted() as server, pytest.raises(ConfigError, match=f"^{next(iter(options))}: expected "):
        call(server.url, "predict", [{}], **options)
    assert server.predictions() == []


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (b"220 mail.example ESMTP\r\n", "did not answer: expected HTTP, got b'220 mail.example ESMTP\\r\\n'"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "the server uses TLS: expected https://, got http://"),
        (b"HTTP/1.1 200 OK\r\n\0: x\r\n\r\n", "did not answer: expected HTTP, got something else: "),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n{", "did not answer: the connection was closed"),
    ],
)
def test_a_server_that_does_not_speak_http(call: Call, reply: bytes, problem: str) -> None:
    with replying(reply) as address, pytest.raises(UnavailableError) as caught:
        call(f"http://{address}", "models", options={"retries": 0})
    assert str(caught.value).startswith(f"{address}: {problem}")


# attempts and deadlines


@pytest.mark.parametrize("problem", [BUSY, LOADING, CLOSE], ids=["busy", "loading", "broken"])
def test_temporary_failures_are_retried(call: Call, problem: Any) -> None:
    with scripted(predict=[problem, problem, GOOD]) as server:
        assert call(server.url, "predict", [{}], options={"model": "demo"}).tolist() == [[0.25]]
    first, second, third = server.asked
    assert second.at - first.at >= 0.02 and third.at - second.at >= 0.04, "the pause grows"
    assert {one.body for one in server.asked} == {first.body}


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (BUSY, "429: busy"),
        (LOADING, "503: no model is ready yet"),
        ((503, b"no healthy upstream"), "503: no healthy upstream"),
        (CLOSE, "did not answer: the connection was closed"),
    ],
)
@pytest.mark.parametrize("retries", [0, 1])
def test_retries_are_limited(call: Call, problem: Any, message: str, retries: int) -> None:
    with scripted(predict=problem) as server, pytest.raises(UnavailableError) as caught:
        call(server.url, "predict", [{}], options={"model": "demo", "retries": retries})
    attempts = f" ({retries + 1} attempts)" if retries else ""
    assert str(caught.value) == f"{where(server)}: {message}{attempts}"
    assert len(server.asked) == retries + 1


def test_an_unreachable_server(call: Call) -> None:
    url = unused_url()
    for location in (url, url.replace("127.0.0.1", "localhost")):
        with pytest.raises(UnavailableError) as caught:
            call(location, "predict", [{}])
        assert str(caught.value) == f"{location.partition('//')[2]}: did not answer: connection refused (3 attempts)"
    with pytest.raises(UnavailableError, match=r"^nowhere\.invalid:80: did not answer: "):
        call("http://nowhere.invalid", "predict", [{}], options={"retries": 0})


def test_a_server_that_starts_during_the_retries(call: Call) -> None:
    url = unused_url()
    port = int(url.rpartition(":")[2])
    started = threading.Event()

    def ask() -> Any:
        started.set()
        return call(url, "predict", [{}], options={"retries": 1000})

    with ThreadPoolExecutor(1) as pool:
        scores = pool.submit(ask)
        started.wait()
        with scripted(port=port):
            assert scores.result(TIMEOUT_S).tolist() == [[0.5]]


def test_retry_after_is_respected(call: Call) -> None:
    with scripted(predict=[(*BUSY, {"Retry-After": "1"}), GOOD]) as server:
        assert call(server.url, "predict", [{}], options={"model": "demo"}).tolist() == [[0.25]]
        first, second = server.asked
        assert second.at - first.at >= 1
    with scripted(predict=(*BUSY, {"Retry-After": "60"})) as server:
        with pytest.raises(UnavailableError, match=r"429: busy$"):
            call(server.url, "predict", [{}], timeout_s=30)
    assert len(server.predictions()) == 1, "no retry, because it would be after the deadline"


@pytest.mark.parametrize("problem", [HANG, TRICKLE])
def test_a_deadline_is_kept(call: Call, problem: Any) -> None:
    with scripted(predict=problem) as server, pytest.raises(UnavailableError) as caught:
        call(server.url, "predict", [{}], timeout_s=1)
    assert str(caught.value) == f"{where(server)}: did not answer in 1 s"
    assert len(server.predictions()) == 1, "not retried"


def test_an_early_answer_to_a_large_request_is_read(call: Call) -> None:
    body = b'{"error": "too much of it"}'
    head = b"HTTP/1.1 429 Too Many Requests\r\nconnection: close\r\ncontent-type: application/json\r\n"
    answer = head + b"content-length: %d\r\n\r\n" % len(body) + body
    with replying(answer) as address, pytest.raises(UnavailableError, match="429: too much of it"):
        call(f"http://{address}", "predict_lines", bytes(2**25), options={"model": "small", "retries": 0})


def test_a_deadline_is_for_all_attempts(call: Call) -> None:
    with scripted(predict=[BUSY, HANG]) as server, pytest.raises(UnavailableError) as caught:
        call(server.url, "predict", [{}], timeout_s=2)
    assert str(caught.value) == f"{where(server)}: did not answer in 2 s (attempt 2; before: 429: busy)"
    first, second = (int(one.headers["elasticrec-timeout-ms"]) for one in server.predictions())
    assert second < first <= 2000, "each attempt sends the remaining time"


def test_a_busy_server_is_retried_until_the_deadline(call: Call) -> None:
    started = time.monotonic()
    # The last attempt may begin shortly before the deadline and get no answer in time.
    error = r"429: busy( \(\d+ attempts\)|\))$"
    with scripted(predict=BUSY) as server, pytest.raises(UnavailableError, match=error):
        call(server.url, "predict", [{}], timeout_s=1, options={"retries": 1000})
    assert time.monotonic() - started < 30
    assert 1 < len(server.predictions()) < 20


def test_calls_time_out_while_all_connections_are_in_use(call: Call) -> None:
    with scripted(predict=HANG) as server, Client(server.url, "demo", connections=1) as client:
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(client.predict, [{}], timeout_s=0.3) for _ in range(2)]
            for one in calls:
                with pytest.raises(UnavailableError, match=r"did not answer in 0\.3 s"):
                    one.result(TIMEOUT_S)


# concurrent calls, and servers that restart


def test_threads_share_a_client() -> None:
    with scripted(predict=echo) as server, Client(server.url, connections=8) as client:

        def ask(thread: int) -> None:
            for number in range(100):
                value = (thread * 100 + number) / 1024
                assert client.predict([{"x": value}, {"x": -value}]).tolist() == [[value], [-value]]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        assert len(server.predictions()) == 800 and server.num_connections <= 8


def test_tasks_share_a_client() -> None:
    async def run(url: str) -> None:
        async with AsyncClient(url, connections=16) as client:
            values = [number / 128 for number in range(100)]
            for _ in range(2):
                scores = await asyncio.gather(*(client.predict([{"x": value}]) for value in values))
                assert [one.tolist() for one in scores] == [[[value]] for value in values]

    with scripted(predict=echo) as server:
        asyncio.run(run(server.url))
        assert len(server.predictions()) == 200 and server.num_connections <= 16


def test_a_cancelled_task_does_not_affect_the_next_call() -> None:
    async def run(server: Scripted) -> None:
        async with AsyncClient(server.url, "demo", connections=1) as client:
            task = asyncio.create_task(client.predict([{"x": 1.0}]))
            while not server.asked:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await client.predict([{"x": 0.5}])).tolist() == [[0.5]]

    with scripted(predict=[HANG, echo]) as server:
        asyncio.run(run(server))


def test_a_closed_connection_is_reopened() -> None:
    """A closed connection is reopened for each call, which does not count as a retry."""
    with scripted(close_after=True) as server, Client(server.url, retries=0) as client:
        for _ in range(3):
            assert client.predict([{}]).tolist() == [[0.5]]

    async def run(url: str) -> None:
        async with AsyncClient(url, retries=0) as client:
            for _ in range(3):
                assert (await client.predict([{}])).tolist() == [[0.5]]

    with scripted(close_after=True) as server:
        asyncio.run(run(server.url))


def test_a_server_is_restarted_between_calls() -> None:
    """Connections kept from before the restart do not count as failed attempts."""
    barrier = threading.Barrier(4)

    def together(_: Any) -> Any:
        barrier.wait(TIMEOUT_S)
        return GOOD

    with scripted(predict=together) as server:
        port = int(server.url.rpartition(":")[2])
        client = Client(server.url, "demo", retries=0)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: client.predict([{}]), range(4)))
        assert server.num_connections == 4
    with pytest.raises(UnavailableError, match=r"refused$"):
        client.predict([{}])
    with scripted(port=port) as server, client:
        assert client.predict([{}]).tolist() == [[0.5]]


def test_a_server_is_restarted_between_calls_of_a_loop() -> None:
    loop = asyncio.new_event_loop()
    with scripted(predict=GOOD) as server:
        port = int(server.url.rpartition(":")[2])
        client = AsyncClient(server.url, retries=0)
        assert loop.run_until_complete(client.predict([{}])).tolist() == [[0.25]]
    with scripted(port=port):
        assert loop.run_until_complete(client.predict([{}])).tolist() == [[0.5]]
        loop.run_until_complete(client.aclose())
    loop.close()


# Runs in a process of its own: a fork of a process with threads inherits the locks that they hold.
FORK = """\
import os
import sys

from elasticrec import Client

with Client(sys.argv[1]) as client:
    assert client.predict([{"x": 0.5}]).tolist() == [[0.5]]
    child = os.fork()
    if not child:
        os._exit(0 if client.predict([{"x": 0.25}]).tolist() == [[0.25]] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert client.predict([{"x": 0.75}]).tolist() == [[0.75]]
"""


def test_a_child_process_has_its_own_connections() -> None:
    with scripted(predict=echo) as server:
        command = [sys.executable, "-c", FORK, server.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stderr
        assert len(server.predictions()) == 3 and server.num_connections == 2


def test_a_closed_client_raises() -> None:
    with scripted() as server:
        client = Client(server.url)
        client.predict([{}])
        client.close()
        client.close()
        with pytest.raises(RuntimeError, match=rf"^client of {where(server)}: closed$"):
            client.predict([{}])

        async def run() -> None:
            client = AsyncClient(server.url)
            await client.predict([{}])
            await client.aclose()
            await client.aclose()
            with pytest.raises(RuntimeError, match=rf"^client of {where(server)}: closed$"):
                await client.predict([{}])

        asyncio.run(run())


def test_a_call_in_flight_finishes_after_its_client_is_closed() -> None:
    go = threading.Event()

    def slow(_: Any) -> Any:
        go.wait(TIMEOUT_S)
        return GOOD

    with scripted(predict=slow) as server, ThreadPoolExecutor(1) as pool:
        client = Client(server.url, "demo")
        scores = pool.submit(client.predict, [{}])
        deadline = time.monotonic() + TIMEOUT_S
        while not server.asked and time.monotonic() < deadline:
            time.sleep(0.001)
        client.close()
        go.set()
        assert scores.result(TIMEOUT_S).tolist() == [[0.25]]


def test_an_async_client_belongs_to_one_event_loop() -> None:
    loop = asyncio.new_event_loop()
    with scripted() as server:
        client = AsyncClient(server.url)
        loop.run_until_complete(client.predict([{}]))
        with pytest.raises(RuntimeError, match="expected the event loop of its first call, got another"):
            asyncio.run(client.predict([{}]))  # type: ignore[arg-type]
        loop.run_until_complete(client.aclose())
    loop.close()


# TLS


def test_tls(call: Call, files: Files) -> None:
    with scripted(tls=files) as server:
        assert call(server.url, "predict", [{}], options={"ca": files.ca}).tolist() == [[0.5]]
        with Client(server.url, ca=str(files.ca)) as client:
            for _ in range(3):
                client.predict([{}])
        assert server.num_connections == 2


def test_certificates_that_are_not_trusted(call: Call, files: Files, tmp_path: Path) -> None:
    other = write_certificates(tmp_path / "other")
    stranger = write_certificates(tmp_path / "stranger", "10.0.0.1")
    for shown, ca, problem in [
        (files, other.ca, "its certificate is not signed by an authority of the `ca` file"),
        (files, None, "its certificate is not signed by an authority of the `ca` file"),
        (stranger, stranger.ca, "its certificate is for another host: expected `127.0.0.1`"),
    ]:
        with scripted(tls=shown) as server, pytest.raises(UnavailableError) as caught:
            call(server.url, "predict", [{}], options={"ca": ca})
        assert str(caught.value) == f"{where(server)}: {problem}"


def test_tls_on_one_side_only(call: Call, files: Files) -> None:
    with scripted() as server, pytest.raises(UnavailableError, match="expected TLS, got something else: TLS is off at"):
        call(server.url.replace("http:", "https:"), "predict", [{}])
    with scripted(tls=files) as server, pytest.raises(UnavailableError) as caught:
        call(server.url.replace("https:", "http:"), "predict", [{}], options={"retries": 0})
    assert where(server) in str(caught.value)


def test_an_invalid_ca_file(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name, reason in (("ca.pem", "expected certificates in PEM"), ("none.pem", "No such file or directory")):
        with pytest.raises(ConfigError, match=rf"^tls: .*/{name}: cannot be used: {reason}$"):
            Client("https://h", ca=tmp_path / name)
