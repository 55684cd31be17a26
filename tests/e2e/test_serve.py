"""`elasticrec serve` as a process: its settings reach the server, it ends in order, and it says what is wrong."""

import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from elasticrec.errors import UnavailableError
from harness import elasticrec, serving, succeed, write_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a published model."""
    directory = tmp_path_factory.mktemp("serve")
    write_job(directory, format="slots", kind="lr", samples=500)
    succeed("train", "job.yaml", cwd=directory)
    succeed("publish", "tiny", cwd=directory)
    return directory


def post(url: str, body: bytes) -> tuple[int, str]:
    request = urllib.request.Request(url, body, {"Content-Type": "text/plain"})
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


def test_many_samples_in_one_request_are_those_of_many_requests(directory: Path) -> None:
    """More than go through the network at once."""
    lines = [b"1 0 %d:%d\n" % (sign * 7, sign % 8) for sign in range(3000)]
    with serving("models/tiny/1", cwd=directory) as server:
        together = post(server.predict_url, b"".join(lines))[1]
        apart = [post(server.predict_url, b"".join(lines[at : at + 500]))[1] for at in range(0, 3000, 500)]
    scores = together.partition("[")[2].rpartition("]")[0]
    assert scores == ",".join(text.partition("[")[2].rpartition("]")[0] for text in apart)
    assert scores.count("click") == 3000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order(directory: Path, number: signal.Signals) -> None:
    with serving("models/tiny", cwd=directory) as server:
        assert post(server.predict_url, b"1 0 5:0")[0] == 200
        server.process.send_signal(number)
        assert server.process.wait(60) == 0


def test_what_is_wrong_is_one_line(directory: Path) -> None:
    def refusal(*arguments: str) -> str:
        result = elasticrec("serve", *arguments, cwd=directory)
        assert result.returncode == 2 and "Traceback" not in result.stderr
        (line,) = result.stderr.splitlines()
        return str(line)

    assert refusal("models/other").startswith("error: models/other: no such model, expected")
    assert refusal() == "error: serve: expected a model such as models/demo, or --job, got neither"
    assert refusal("data").startswith("error: data: not a model, expected")
    twice = "two models are called `tiny`, expected names that differ: `serve.models[].name`"
    assert refusal("models/tiny", "models") == f"error: serve: {twice}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refusal("models/tiny", "--port", str(port)) == f"error: 127.0.0.1:{port}: address already in use"


def test_a_server_process_that_does_not_start_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"^serve: the server ended with code 2 before it served$"):
        with serving("models/none", cwd=tmp_path):
            pass
