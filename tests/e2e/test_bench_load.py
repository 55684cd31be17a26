"""`bench load` on a real server: its figures are consistent, and its errors are one line."""

import gzip
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrec import _core
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.serving.process import ServerProcess
from support.harness import elasticrec, serving, succeed, write_job

pytestmark = pytest.mark.slow

LINES = b"".join(b"1 0 %d:%d\n" % (sign * 7, sign % 8) for sign in range(100))
TOKEN = {"ELASTICREC_TEST_TOKEN": "secret"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a published model and files of lines."""
    directory = tmp_path_factory.mktemp("load")
    write_job(directory, format="slots", kind="lr", samples=500)
    succeed("train", "job.yaml", cwd=directory)
    succeed("publish", "tiny", cwd=directory)
    (directory / "lines.txt").write_bytes(LINES)
    (directory / "lines.txt.gz").write_bytes(gzip.compress(LINES))
    (directory / "slots.jsonl").write_text("".join(json.dumps({"0": [sign], "3": 5}) + "\n" for sign in range(9)))
    (directory / "empty.txt").write_text("\n \n")
    (directory / "bad.txt").write_text("not a sample\n")
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    """Start a server that requires a token."""
    token = ["--set", "serve.token=${ELASTICREC_TEST_TOKEN}"]
    with serving("models/tiny", *token, cwd=directory, env=TOKEN) as server:
        yield server


def bench(directory: Path, url: str, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    token = ["--token", "${ELASTICREC_TEST_TOKEN}"]
    output = succeed("bench", "load", url, *arguments, *token, "--seconds", "1", "--json", cwd=directory, env=TOKEN)
    *lines, last = output.splitlines()
    return lines, json.loads(last)


def test_requests_without_a_rate(directory: Path, server: ServerProcess) -> None:
    lines, result = bench(directory, server.url, "lines.txt.gz", "--instances", "7", "--connections", "3")
    assert result["answered"] > 10 and result["failed"] == 0 and result["offered"] == result["answered"]
    assert result["instances_per_s"] == pytest.approx(7 * result["requests_per_s"], rel=0.001)
    assert 0 < result["p50_us"] <= result["p90_us"] <= result["p99_us"] <= result["p999_us"] <= result["max_us"]
    assert (result["model"], result["rate"], result["unsent"], result["late"]) == ("tiny", None, 0, 0)
    assert len(lines) == 2 and "0 failed" in lines[0] and "p99.9" in lines[1]


@pytest.mark.parametrize("more", [[], ["--poisson"]])
def test_requests_at_a_rate_with_named_slots(directory: Path, server: ServerProcess, more: list[str]) -> None:
    _, result = bench(directory, server.url, "slots.jsonl", "--format", "json", "--rate", "100", *more)
    assert result["failed"] == 0 and result["poisson"] == bool(more)
    assert result["offered"] == result["answered"] + result["unsent"]
    # The number of Poisson arrivals has a variance equal to its mean.
    assert result["offered"] == 100 if not more else 40 < result["offered"] < 160


def test_errors_are_one_line(directory: Path, server: ServerProcess) -> None:
    def refusal(url: str, *arguments: str) -> str:
        result = elasticrec("bench", "load", url, *arguments, "--seconds", "1", cwd=directory, env=TOKEN)
        assert result.returncode == 2 and "Traceback" not in result.stderr and not result.stdout
        (line,) = result.stderr.splitlines()
        return str(line)

    token = ["--token", "${ELASTICREC_TEST_TOKEN}"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        unused = f"127.0.0.1:{taken.getsockname()[1]}"
        assert refusal(f"http://{unused}", "lines.txt").startswith(f"error: {unused}: did not answer")
    assert refusal(server.url, "lines.txt").startswith(f"error: {server.address}: 401: ")
    assert refusal(server.url, "empty.txt", *token) == "error: empty.txt: expected lines, got none"
    assert refusal(server.url, "none.txt", *token).startswith("error: none.txt: ")
    assert f"error: {server.address}: 400: " in refusal(server.url, "bad.txt", *token)
    expected = "error: lines.txt:1: expected a JSON object of named slots, got b'1 0 0:0'"
    assert refusal(server.url, "lines.txt", "--format", "json", *token) == expected
    assert refusal(server.url, "lines.txt", "--format", "yaml") == (
        "error: bench: --format: expected text or json, got `yaml`"
    )
    assert refusal(server.url, "lines.txt", "--poisson") == "error: bench: --poisson needs --rate"
    assert "--connections" in refusal(server.url, "lines.txt", "--connections", "0")
    assert "--rate" in refusal(server.url, "lines.txt", "--rate", "0")
    assert refusal("https://127.0.0.1:1", "lines.txt").endswith("got https://: `bench load` does not support TLS")
    assert "404" in refusal(server.url, "lines.txt", "--name", "other", *token)


def test_failures_are_counted_by_kind(server: ServerProcess) -> None:
    report = _core.run_traffic(server.address, server.predict_path, [b"1 0 5:0"], connections=2, seconds=0.3)
    assert report.answered == 0 and report.failures == {"status 401": report.failed}
    headers = {"authorization": "Bearer secret"}
    report = _core.run_traffic(
        server.address, server.predict_path, [b"1 0 5:0"], connections=2, seconds=0.3, headers=headers
    )
    assert report.answered > 0 and not report.failures


def test_an_exception_in_the_progress_callback_ends_the_run(server: ServerProcess) -> None:
    def progress(seconds: float, answered: int, failed: int) -> None:
        assert seconds > 0 and answered == 0 and failed > 0
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _core.run_traffic(
            server.address, server.predict_path, [b"x"], connections=1, seconds=600, rate=50, progress=progress
        )


def test_invalid_numbers_are_refused(server: ServerProcess) -> None:
    with pytest.raises(ConfigError, match=r"^bench: bodies: expected at least 1, got 0$"):
        _core.run_traffic(server.address, "/", [], connections=1, seconds=1)
    with pytest.raises(ConfigError, match=r"^bench: seconds: expected a number of seconds, got -1$"):
        _core.run_traffic(server.address, "/", [b""], connections=1, seconds=-1)
    with pytest.raises(ConfigError, match=r"^bench: rate: expected more than 0"):
        _core.run_traffic(server.address, "/", [b""], connections=1, seconds=1, rate=0)
    with pytest.raises(UnavailableError, match=r"^bench: 127\.0\.0\.1:1: "):
        _core.run_traffic("127.0.0.1:1", "/", [b""], connections=1, seconds=1)
