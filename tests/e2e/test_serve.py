"""`elasticrec serve` as a process: settings reach the server, it shuts down cleanly, and errors are one line."""

import asyncio
import contextlib
import gzip
import json
import re
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from elasticrec import AsyncClient, Client
from elasticrec.errors import SampleError, UnavailableError
from support.harness import elasticrec, instance_of, serving, succeed, write_job
from support.request_threads import metrics_of
from support.store import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a published model."""
    directory = tmp_path_factory.mktemp("serve")
    write_job(directory, format="slots", kind="lr", samples=500)
    succeed("train", "job.yaml", cwd=directory)
    succeed("publish", "tiny", cwd=directory)
    return directory


def post(url: str, body: bytes, headers: dict[str, str] | None = None) -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"Content-Type": "text/plain", **(headers or {})})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_limits_of_the_job_are_limits_of_the_server(directory: Path) -> None:
    limits = ["--set", "serve.max_instances=10", "--set", "serve.max_body_bytes=4096"]
    with serving("models/tiny", *limits, cwd=directory) as server:
        assert post(server.predict_url, b"1 0 5:0\n" * 10)[0] == 200
        assert post(server.predict_url, b"1 0 5:0\n" * 11)[0] == 413
        assert post(server.predict_url, b"1 0 " + b"5:0 " * 2000)[0] == 413
    memory = ["--set", "serve.max_body_bytes=100000", "--set", "serve.max_pending_bytes=400000"]
    with serving("models/tiny", *memory, cwd=directory) as server, contextlib.ExitStack() as stack:
        line = b"1 0 " + b"5:0 " * 24_000
        for body, coding in ((line, "identity"), (gzip.compress(line, 0), "gzip"), (gzip.compress(line), "gzip")):
            assert post(server.predict_url, body, {"Content-Encoding": coding})[0] == 200

        def pending() -> float:
            return metrics_of(server.url)["pending_bytes"]

        host, _, port = server.address.rpartition(":")
        head = b"POST /v1/models/tiny:predict HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n"
        head += b"Content-Length: %d\r\n\r\n" % len(line)
        for _ in range(4):
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(head + line[:-1])
        wait_until(lambda: pending() == 4 * (len(line) - 1), lambda: str(pending()))
        assert post(server.predict_url, gzip.compress(line), {"Content-Encoding": "gzip"})[0] == 429
        assert post(server.predict_url, b"1 0 5:0\n")[0] == 200
        stack.close()
        wait_until(lambda: pending() == 0, lambda: str(pending()))
        assert post(server.predict_url, line)[0] == 200


def test_one_large_request_equals_many_small_ones(directory: Path) -> None:
    """More samples than are scored at once."""
    lines = [b"1 0 %d:%d\n" % (sign * 7, sign % 8) for sign in range(3000)]
    with serving("models/tiny/1", cwd=directory) as server:
        together = post(server.predict_url, b"".join(lines))[1]
        apart = [post(server.predict_url, b"".join(lines[at : at + 500]))[1] for at in range(0, 3000, 500)]
    scores = together.partition("[")[2].rpartition("]")[0]
    assert scores == ",".join(text.partition("[")[2].rpartition("]")[0] for text in apart)
    assert scores.count("click") == 3000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_shuts_it_down_cleanly(directory: Path, number: signal.Signals) -> None:
    with serving("models/tiny", cwd=directory) as server:
        assert post(server.predict_url, b"1 0 5:0")[0] == 200
        server.process.send_signal(number)
        assert server.process.wait(60) == 0


def test_errors_are_one_line(directory: Path) -> None:
    def refusal(*arguments: str) -> str:
        result = elasticrec("serve", *arguments, cwd=directory)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        (line,) = result.stderr.splitlines()
        return str(line)

    assert refusal("models/other").startswith("error: models/other: no such model, expected")
    assert refusal() == "error: serve: expected a model such as models/demo, or --job, got neither"
    assert refusal("data").startswith("error: data: not a model, expected")
    twice = "two models are called `tiny`, expected distinct names (`serve.models[].name`)"
    assert refusal("models/tiny", "models") == f"error: serve: {twice}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refusal("models/tiny", "--port", str(port)) == f"error: 127.0.0.1:{port}: address already in use"


def test_a_server_process_that_does_not_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"^serve: the server ended with code 2 before it was ready$"):
        with serving("models/none", cwd=tmp_path):
            pass


def test_predict_prints_auc_and_log_loss(directory: Path) -> None:
    """A checkpoint, a version and a server give the same figures, with the AUC of the evaluation."""
    (part,) = (directory / "data/20260101/01").glob("*.txt")
    with serving("models/tiny", cwd=directory) as server:
        sources = (["--checkpoint", "tiny"], ["--model", "models/tiny"], ["--server", server.url])
        results = [elasticrec("predict", str(part), *source, cwd=directory) for source in sources]
        unlabelled = b"".join(b"- - " + line.split(b" ", 2)[2] + b"\n" for line in part.read_bytes().splitlines())
        (directory / "unlabelled.txt").write_bytes(unlabelled)
        silent = elasticrec("predict", "unlabelled.txt", "--server", server.url, cwd=directory)
    assert [result.returncode for result in (*results, silent)] == [0] * 4
    evaluated = succeed("eval", "tiny", cwd=directory).splitlines()[1].split()
    for result in results:
        auc, loss = map(float, re.findall(r"^click: AUC (\S+), log loss (\S+), samples 250\n$", result.stderr)[0])
        assert auc == pytest.approx(float(evaluated[5]), abs=2e-4)
        assert loss == pytest.approx(float(evaluated[4]), abs=1e-4)
    assert (silent.stdout, silent.stderr) == (results[2].stdout, "")


def test_clients_and_a_server(directory: Path) -> None:
    (part,) = (directory / "data/20260101/01").glob("*.txt")
    lines = part.read_bytes().splitlines(keepends=True)
    instances = [instance_of(line, "slots") for line in lines]

    async def ask(url: str) -> list[np.ndarray]:
        async with AsyncClient(url) as client:
            assert await client.is_ready() and (await client.metadata())["labels"] == ["click"]
            return await asyncio.gather(*(client.predict([instance]) for instance in instances[:100]))

    with serving("models/tiny", "--set", "serve.max_instances=300", cwd=directory) as server:
        with Client(server.url) as client:
            assert client.is_ready() and [model["name"] for model in client.models()] == ["tiny"]
            together = client.ask(instances, key="user 17", timeout_s=20)
            assert (together.model, together.version, together.labels) == ("tiny", 1, ("click",))
            assert together.scores.tolist() == client.predict_lines(b"".join(lines)).tolist()
            assert client.predict([]).shape == (0, 1)
            with pytest.raises(SampleError, match=r": 413: "):
                client.predict(instances * 2)
            with pytest.raises(SampleError, match=r": 400: instances\[0\]: "):
                client.predict([{"nothing": 1}])
        apart = asyncio.run(ask(server.url))
    np.testing.assert_allclose(np.concatenate(apart), together.scores[:100], atol=1e-6, rtol=0)


def test_a_server_explains_like_a_published_model(directory: Path) -> None:
    """The explanation equals that of the version's directory, with the times of the request in addition."""
    line = "1 0 5:0 18446744073709551615:1 7:1"
    by_model = json.loads(succeed("explain", line, "--model", "models/tiny", "--json", cwd=directory))
    with serving("models/tiny", cwd=directory) as server:
        arguments = ("explain", line, "--server", server.url)
        by_server = json.loads(succeed(*arguments, "--json", cwd=directory))
        shown = succeed(*arguments, cwd=directory)
        refused = elasticrec("explain", "not a line", "--server", server.url, cwd=directory)
        both = elasticrec(*arguments, "--model", "models/tiny", cwd=directory)
    timing = by_server.pop("timing_ms")
    assert set(timing) == {"queue", "parse", "lookup", "infer", "write"}
    assert by_server.pop("source").startswith("tiny version 1 at 127.0.0.1:") and by_model.pop("source")
    scores = [explained.pop("scores") for explained in (by_server, by_model)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    assert by_server == by_model
    assert "time: queue 0." in shown and "no row, reads as zero" in shown
    assert refused.returncode == 2 and "line 1: " in refused.stderr
    assert both.returncode == 2 and "expected one of --checkpoint, --model and --server" in both.stderr
