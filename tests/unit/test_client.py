"""The client against servers that are not ours, gone, or strange; and the file of lines that `predict` reads."""

import gzip
import io
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from elasticrec.errors import ConfigError, ElasticRecError, SampleError, UnavailableError
from elasticrec.predict import Scores, Source, score_lines, scores_of
from elasticrec.serving.client import Client

MODELS = {"models": [{"name": "demo", "version": 1}]}
METADATA = {"labels": ["click"]}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answers: ClassVar[dict[str, tuple[int, bytes]]] = {}
    close_after = False

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.answers.get(self.path, (404, b'{"error": "no such path"}'))
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        # as a server does to connections that idle: without a word
        self.close_connection = self.close_after

    do_GET = do_POST = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def server(close_after: bool = False, **answers: Any) -> Iterator[str]:
    """A server with the given answers to `models`, `model` and `predict`; bytes as they are, (status, …), or JSON."""
    paths = {"models": "/v1/models", "model": "/v1/models/demo", "predict": "/v1/models/demo:predict"}
    given = {"models": MODELS, "model": METADATA} | answers
    ready = {}
    for name, answer in given.items():
        status, content = answer if isinstance(answer, tuple) else (200, answer)
        ready[paths[name]] = (status, content if isinstance(content, bytes) else json.dumps(content).encode())
    handler = type("Handler", (_Handler,), {"answers": ready, "close_after": close_after})
    running = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    running.daemon_threads = True
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{running.server_port}"
    finally:
        running.shutdown()
        thread.join()
        running.server_close()


def predict(url: str) -> Scores:
    with Client(url) as client:
        return client.predict_lines(b"1 0 5:0\n")


def test_scores() -> None:
    with server(predict={"predictions": [{"click": 0.25}]}) as url:
        assert predict(url).tolist() == [[0.25]]


def test_a_connection_that_was_closed_is_made_again() -> None:
    with server(close_after=True, predict={"predictions": [{"click": 0.5}]}) as url, Client(url) as client:
        for _ in range(3):
            assert client.predict([{}]).tolist() == [[0.5]]


@pytest.mark.parametrize("answer", [[], {}, None, 5, "x", {"models": 5}, {"models": [{}]}, b"[" * 100_000, b"\xff"])
def test_another_kind_of_server_is_named(answer: Any) -> None:
    with server(models=answer) as url, pytest.raises(UnavailableError) as caught:
        predict(url)
    assert str(caught.value).startswith(url.removeprefix("http://"))


@pytest.mark.parametrize("answer", [{}, {"predictions": 5}, {"predictions": [{}]}, {"predictions": [{"click": "abc"}]}])
def test_predictions_of_another_form(answer: Any) -> None:
    with server(predict=answer) as url, pytest.raises(UnavailableError, match="not a prediction server"):
        predict(url)


def test_no_labels() -> None:
    with server(model={}) as url, pytest.raises(UnavailableError, match="not a prediction server"):
        predict(url)


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, {"error": "line 1: bad"}, SampleError, "400: line 1: bad"),
        (429, {"error": "busy"}, UnavailableError, "429: busy"),
        (500, [], UnavailableError, "500: no reason given"),
        (500, 5, UnavailableError, "500: no reason given"),
    ],
)
def test_refusals(status: int, body: Any, kind: type[ElasticRecError], message: str) -> None:
    with server(predict=(status, body)) as url, pytest.raises(kind, match=message):
        predict(url)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:80", "https://x", "http://", "http://h:99999", "http://h:x", "http://[::1", "http://a b", "http://ü.."],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="expected a URL such as"):
        Client(url)


def test_a_strange_name_is_a_name() -> None:
    with server() as url, pytest.raises(UnavailableError, match="404: no such path"):
        Client(url, "a b/ü")


def score(text: bytes) -> Scores:
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        if line == b"bad":
            raise SampleError(f"line {number}: not good")
    return np.array([[len(line)] for line in lines], np.float32).reshape(len(lines), 1)


def test_a_bad_line_has_its_number_in_the_file() -> None:
    text = b"ok\n" * 1500 + b"\n" + b"bad\n" + b"ok\n" * 10
    with pytest.raises(SampleError, match=r"^f\.txt:1502: not good$"):
        list(score_lines(io.BytesIO(text), "f.txt", Source(score)))


def test_long_lines_go_in_smaller_pieces() -> None:
    sizes = []

    def counted(text: bytes) -> Scores:
        sizes.append(len(text))
        return score(text)

    text = (b"x" * 50_000 + b"\n") * 100
    assert sum(len(scores) for scores in score_lines(io.BytesIO(text), "f.txt", Source(counted))) == 100
    assert max(sizes) < 2 << 20


def test_blank_lines_have_no_scores_and_missing_scores_are_noticed() -> None:
    assert list(score_lines(io.BytesIO(b"\n \n"), "f.txt", Source(score))) == []
    with pytest.raises(UnavailableError, match="expected 3 scores, got 1"):
        source = Source(lambda text: score(text)[:1], is_remote=True)
        list(score_lines(io.BytesIO(b"a\nb\nc\n"), "f.txt", source))


def test_a_header_has_no_score() -> None:
    source = Source(lambda text: score(text.replace(b"head\n", b"")), is_remote=True)
    assert [len(scores) for scores in score_lines(io.BytesIO(b"head\na\nb\n"), "f.txt", source)] == [2]


def test_a_file_is_read_as_in_training(tmp_path: Path) -> None:
    """Compressed or not, without a byte order mark, and a bad line by its number."""
    lines = b"\xef\xbb\xbfone\r\n\ntwo\n" * 1 + b"three\n" * 3000
    for path, content in ((tmp_path / "a.txt", lines), (tmp_path / "a.txt.gz", gzip.compress(lines))):
        path.write_bytes(content)
        scores = np.concatenate(list(scores_of(Source(score), str(path))))
        assert scores[:3, 0].tolist() == [3, 3, 5] and len(scores) == 3002
        path.write_bytes(gzip.compress(lines + b"bad\n") if path.suffix == ".gz" else lines + b"bad\n")
        with pytest.raises(SampleError, match=rf"{path.name}:3004: not good$"):
            list(scores_of(Source(score), str(path)))


def test_a_pipe_is_read_too(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=lambda: (tmp_path / "pipe").write_bytes(b"one\nthree\n"))
    writer.start()
    scores = np.concatenate(list(scores_of(Source(score), str(tmp_path / "pipe"))))
    writer.join()
    assert scores[:, 0].tolist() == [3, 5]
    with pytest.raises(FileNotFoundError):
        list(scores_of(Source(score), str(tmp_path / "nothing")))
