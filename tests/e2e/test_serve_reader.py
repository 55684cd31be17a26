"""Requests in a user's own format, read by processes that run the reader of the version."""

import json
import os
import random
import shutil
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.config.document import dump
from elasticrec.serving.client import Client
from elasticrec.serving.process import ServerProcess
from support.harness import elasticrec, serving, succeed
from support.store import wait_until

pytestmark = pytest.mark.slow

READER = """
import os, time

class Pipes:
    def parse(self, line):
        if line.startswith("#"):
            return None
        if line == "hang":
            time.sleep(3600)
        if line == "spin":
            while True:
                pass
        if line == "die":
            os._exit(3)
        if line == "print":
            print("printed by the reader")
            line = "0|u1|1||1"
        click, user, item, tags, price = line.split("SEPARATOR")
        return {"click": float(click), "user": user, "item": int(item), "tags": tags.split(), "price": float(price)}
"""
# Long enough for a slow machine; only a failing test waits this long.
LONG_S = 60


def lines(count: int, seed: int, separator: str = "|") -> list[str]:
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        user, item = chance.randint(0, 50), chance.randint(0, 30)
        tags = " ".join(f"t{chance.randint(0, 9)}" for _ in range(chance.randint(0, 3)))
        click = int(chance.random() < (0.6 if user % 3 == 0 else 0.1))
        made.append(separator.join((str(click), f"u{user}", str(item), tags, f"{chance.random() * 9:.2f}")))
    return made


def train(directory: Path, name: str, separator: str) -> None:
    """Train and publish a version; delete the reader's file afterwards."""
    (directory / f"{name}.txt").write_text("\n".join(lines(1500, 1, separator)) + "\n")
    (directory / "pipes.py").write_text(READER.replace("SEPARATOR", separator))
    job = {
        "name": name,
        "data": {
            "train": f"{name}.txt",
            "reader": "pipes.py:Pipes",
            "slots": ["user", "item", "tags"],
            "dense": ["price"],
        },
        "model": {"kind": "deepfm", "dim": 4, "hidden": [16]},
        "dense": {"optimizer": {"learning_rate": 0.01}},
        "train": {"threads": 1, "batch_size": 64, "epochs": 2},
        "publish": {"model": "tiny"},
    }
    (directory / "job.yaml").write_text(dump(job))
    succeed("train", "job.yaml", cwd=directory)
    succeed("publish", name, cwd=directory)
    (directory / "pipes.py").unlink()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a published model, 300 samples, and their scores by its checkpoint."""
    directory = tmp_path_factory.mktemp("reader")
    train(directory, "first", "|")
    (directory / "samples.txt").write_text("# a header\r\n" + "\r\n".join(lines(300, 2)) + "\r\n")
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path) -> np.ndarray:
    text = succeed("predict", "samples.txt", "--checkpoint", "first", cwd=directory)
    scores = np.array([[float(value)] for value in text.split()])
    assert scores.shape == (300, 1) and len(np.unique(scores.round(6))) > 100
    return scores


def post(server: ServerProcess, body: str, **headers: str) -> tuple[int, Any, Any]:
    request = urllib.request.Request(server.predict_url, body.encode(), {"Content-Type": "text/plain", **headers})
    try:
        with urllib.request.urlopen(request, timeout=LONG_S) as response:
            return response.status, json.loads(response.read()), response.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())["error"], error.headers


def readers_of(server: ServerProcess) -> list[int]:
    """Return the reader processes of a server."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(server.process.pid)], capture_output=True, text=True
    )
    return [int(line.split()[0]) for line in found.stdout.splitlines() if "elasticrec.serving.reader" in line]


def counted(server: ServerProcess, name: str) -> int:
    """Return a metric of the server's readers."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=LONG_S) as response:
        figures = response.read().decode().splitlines()
    start = f'{name}{{model="tiny",variant=""}} '
    (value,) = (line.removeprefix(start) for line in figures if line.startswith(start))
    return int(value)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_lines_get_the_scores_of_the_checkpoint(directory: Path, expected: np.ndarray) -> None:
    text = (directory / "samples.txt").read_text()
    result = elasticrec("predict", "samples.txt", "--model", "models/tiny", "--run-reader", cwd=directory)
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith("click: AUC 0.")
    in_process = np.array([[float(value)] for value in result.stdout.split()])
    np.testing.assert_allclose(in_process, expected, atol=1e-5, rtol=0)
    with serving("models/tiny", "--readers", "2", cwd=directory) as server, Client(server.url) as client:
        np.testing.assert_allclose(client.predict_lines(text.encode()), expected, atol=1e-5, rtol=0)
        asked = succeed("predict", "samples.txt", "--server", server.url, cwd=directory)
        np.testing.assert_allclose([[float(value)] for value in asked.split()], expected, atol=1e-5, rtol=0)
        status, answer, headers = post(server, "0|u1|1||1\n", **{"elasticrec-timing": "1"})
        assert (status, len(answer["predictions"])) == (200, 1)
        stages = {one.split(";")[0]: float(one.split("dur=")[1]) for one in headers["server-timing"].split(", ")}
        assert stages["parse"] >= stages["reader"] > 0
        assert post(server, "")[1]["predictions"] == [] == post(server, "# nothing\n")[1]["predictions"]
        assert counted(server, "elasticrec_serve_readers") == 2


def test_refused_lines_are_named(directory: Path, tmp_path: Path) -> None:
    limits = ["--set", "serve.max_instances=10"]
    with serving("models/tiny", "--readers", "1", *limits, cwd=directory, log=tmp_path / "log") as server:
        status, message, _ = post(server, "0|u1|1||1\n0|u1|one||1\n")
        assert status == 400
        assert message.startswith("line 2: reader.py:") and "ValueError: invalid literal for int()" in message, message
        assert post(server, "0|u1|1||1\n" * 10)[0] == 200
        assert post(server, "0|u1|1||1\n" * 11)[:2] == (413, "expected at most 10 lines in a request, got more")
        assert post(server, "print\n")[0] == 200
        assert len(readers_of(server)) == 1


def test_code_of_a_model_runs_only_with_permission(directory: Path, tmp_path: Path) -> None:
    with serving("models/tiny", cwd=directory) as server, Client(server.url) as client:
        status, message, _ = post(server, "0|u1|1||1\n")
        assert (status, readers_of(server)) == (400, [])
        assert message == (
            "lines of this model need its own reader, but this server runs no reader processes (`serve.readers`); "
            "send named slots (`application/json`) instead"
        )
        assert client.predict([{"user": "u1", "item": 1, "price": 1}]).shape == (1, 1)
    result = elasticrec("predict", "samples.txt", "--model", "models/tiny", cwd=directory)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: models/tiny/1: lines of this model need the reader `reader.py:Pipes` in its directory; "
        "allow it with --run-reader\n"
    )


def has_come_back(server: ServerProcess, num_lost: int) -> bool:
    """Return whether the server has noticed the lost readers and has two running again."""
    lost, alive = (counted(server, f"elasticrec_serve_{name}") for name in ("reader_losses_total", "readers"))
    return (lost, alive) == (num_lost, 2)


def test_a_killed_reader_causes_no_wrong_answer(directory: Path, expected: np.ndarray) -> None:
    samples = lines(300, 2)
    stopping = threading.Event()
    outcomes: list[tuple[int, Any, int]] = []

    def ask(server: ServerProcess, first: int) -> None:
        at = first
        while not stopping.is_set():
            status, answer, _ = post(server, samples[at % 300])
            outcomes.append((at % 300, answer, status))
            at += 7

    with serving("models/tiny", "--readers", "2", cwd=directory) as server:
        threads = [threading.Thread(target=ask, args=(server, first)) for first in range(4)]
        for thread in threads:
            thread.start()
        try:
            for num_killed in range(1, 4):
                num_before = len(outcomes)
                os.kill(readers_of(server)[0], signal.SIGKILL)
                wait_until(partial(has_come_back, server, num_killed))
                wait_until(lambda num=num_before: len(outcomes) > num + 50)  # type: ignore[misc]
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
    good = [(at, answer["predictions"][0]["click"]) for at, answer, status in outcomes if status == 200]
    # Each request was retried on the other reader.
    assert len(good) == len(outcomes)
    np.testing.assert_allclose([score for _, score in good], expected[[at for at, _ in good], 0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("line", ["hang", "spin"])
def test_a_reader_that_hangs_fails_its_request_in_time(directory: Path, line: str) -> None:
    settings = ["--readers", "2", "--set", "serve.reader_timeout_ms=700"]
    with serving("models/tiny", *settings, cwd=directory) as server:
        before = set(readers_of(server))
        outcome: list[Any] = []
        thread = threading.Thread(target=lambda: outcome.append(post(server, line)))
        thread.start()
        num_answered = 0
        while thread.is_alive():
            assert post(server, "0|u1|1||1")[0] == 200
            num_answered += 1
        thread.join()
        assert num_answered > 3
        message = "reader: no answer within 700 ms (`serve.reader_timeout_ms`); the reader process was ended"
        assert outcome[0][:2] == (500, message)
        wait_until(lambda: len(readers_of(server)) == 2 and set(readers_of(server)) != before)
        # The timeout of a request also applies in a reader.
        assert post(server, line, **{"elasticrec-timeout-ms": "50"})[0] == 504


def test_a_line_that_kills_readers_is_reported_once_and_they_restart(directory: Path, tmp_path: Path) -> None:
    with serving("models/tiny", "--readers", "2", cwd=directory, log=tmp_path / "log") as server:
        for _ in range(3):
            wait_until(lambda: post(server, "0|u1|1||1")[0] == 200)
            status, message, _ = post(server, "die")
            assert status in (500, 503) and message.startswith("reader: "), message
        wait_until(lambda: post(server, "0|u1|1||1")[0] == 200)
        assert post(server, "print")[0] == 200
    log = (tmp_path / "log").read_text()
    assert 1 <= log.count("tiny: a reader process ended (code 3), restarting it") <= 3, log
    assert log.count("printed by the reader\n") == 1


def test_readers_end_with_their_server(directory: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with serving("models/tiny", "--readers", "2", cwd=directory) as server:
            readers = readers_of(server)
            assert len(readers) == 2
            # Also a reader that is busy in the user's code.
            threading.Thread(target=_try, args=(server, "spin"), daemon=True).start()
            server.process.send_signal(number)
            server.process.wait(LONG_S)
            wait_until(lambda: all(is_gone(pid) for pid in readers))  # noqa: B023


def _try(server: ServerProcess, line: str) -> None:
    try:
        post(server, line)
    except OSError:
        pass


def test_an_unusable_reader_is_one_error_line(directory: Path, tmp_path: Path) -> None:
    version = tmp_path / "tiny"
    subprocess.run(["cp", "-r", directory / "models/tiny/1", version], check=True)
    (version / "reader.py").write_bytes(b"import no_such_module")
    result = elasticrec("serve", str(version), "--readers", "1", "--port", "0", cwd=tmp_path)
    message = f"error: {version}/reader.py: sha-256 differs from the manifest, the file is damaged"
    assert (result.returncode, result.stderr.splitlines()[-1]) == (2, message)


def test_a_new_version_brings_its_own_reader(directory: Path, tmp_path: Path) -> None:
    # The other tests expect a model with one version.
    directory = shutil.copytree(directory, tmp_path / "own")
    old, new = lines(300, 2), lines(300, 2, ";")
    with serving("models/tiny", "--readers", "2", "--set", "serve.poll_s=0.1", cwd=directory) as server:
        before = readers_of(server)
        status, answer, _ = post(server, "\n".join(old))
        assert (status, answer["version"]) == (200, 1)
        train(directory, "second", ";")

        def is_new() -> bool:
            # Each version reads its own lines and refuses those of the other.
            status, answer, _ = post(server, "\n".join(new))
            assert (status == 200 and answer["version"] == 2) or (status == 400 and "not enough values" in answer), (
                answer
            )
            return status == 200

        wait_until(is_new)
        wait_until(lambda: all(is_gone(pid) for pid in before) and len(readers_of(server)) == 2)
        status, message, _ = post(server, "\n".join(old))
        assert status == 400 and message.startswith("line 1: reader.py:"), message
        served = [one["click"] for one in post(server, "\n".join(new))[1]["predictions"]]
    (directory / "new.txt").write_text("\n".join(new))
    text = succeed("predict", "new.txt", "--checkpoint", "second", cwd=directory)
    np.testing.assert_allclose(served, [float(value) for value in text.split()], atol=1e-5, rtol=0)
