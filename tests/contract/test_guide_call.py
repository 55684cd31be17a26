"""Each example of the guide "call it from your service" runs against a server with a model `demo`."""

import json
import re
import runpy
import shutil
import socket
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from support.harness import TIMEOUT_S, serving, succeed, write_job
from support.store import wait_until

pytestmark = pytest.mark.slow

GUIDES = Path(__file__).parents[2] / "docs/guide"
BLOCK = re.compile(r"```(\w+)(?: (\S+))?\n(.*?)```", re.DOTALL)
SHOWN_URL = "http://127.0.0.1:8500"


def blocks(guide: str, kind: str, name: str = "") -> list[str]:
    found = BLOCK.findall((GUIDES / guide).read_text())
    return [text for of_kind, of_name, text in found if (of_kind, of_name) == (kind, name)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a published model."""
    directory = tmp_path_factory.mktemp("call")
    job = write_job(directory, format="slots", kind="lr", samples=500)
    job.write_text(job.read_text().replace("name: tiny", "name: demo"))
    succeed("train", "job.yaml", cwd=directory)
    succeed("publish", "demo", cwd=directory)
    (directory / "part-00000.txt").write_bytes(b"1 0 5:0\n" * 200)
    return directory


@pytest.fixture(scope="module")
def url(directory: Path) -> Iterator[str]:
    """Return the URL of a server with this model."""
    with serving("models/demo", cwd=directory) as server:
        yield server.url


def test_the_python_blocks_run(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks run in order, as in one session."""
    names: dict[str, Any] = {}
    texts = blocks("call.md", "python")
    assert len(texts) == 3
    for text in texts:
        exec(text.replace(SHOWN_URL, url), names)
    names["client"].close()
    shown = capsys.readouterr().out
    assert "('click',) demo 1 None" in shown and ": 400: instances[0]: " in shown


def test_the_asyncio_handler(url: str, tmp_path: Path) -> None:
    (text,) = blocks("call.md", "python", "app.py")
    (tmp_path / "app.py").write_text(text.replace(SHOWN_URL, url))
    app = runpy.run_path(str(tmp_path / "app.py"))["app"]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            wait_until(lambda: server.started)
            request = urllib.request.Request(
                f"http://127.0.0.1:{listening.getsockname()[1]}/rank/17",
                b"[5, 6, 7]",
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                answer = json.load(response)
        finally:
            server.should_exit = True
            thread.join()
    assert answer["version"] == 1 and sorted(answer["items"]) == [5, 6, 7]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
@pytest.mark.parametrize(("guide", "count"), [("call.md", 1), ("predict.md", 6)])
def test_the_curl_commands_are_answered(url: str, directory: Path, guide: str, count: int) -> None:
    """The server answers each command without an error."""
    commands = [
        command
        for text in blocks(guide, "sh")
        # Needs a server with readers: see tests/e2e/test_serve_reader.py.
        if "--readers" not in text
        for command in text.replace("\\\n", " ").splitlines()
        if "curl " in command
    ]
    assert len(commands) == count
    for command in commands:
        result = subprocess.run(
            ["sh", "-c", command.replace(SHOWN_URL, url).replace("curl -s", "curl -sS --fail-with-body")],
            cwd=directory,
            env={"URL": url, "PATH": "/usr/local/bin:/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        if ":predict" in command:
            (shown, *_) = (json.loads(text) for text in blocks(guide, "json"))
            answer = json.loads(result.stdout)
            assert answer.keys() == shown.keys()
            assert answer["predictions"][0].keys() == shown["predictions"][0].keys()


@pytest.mark.skipif(shutil.which("javac") is None, reason="no Java")
def test_the_java_example_runs(url: str, tmp_path: Path) -> None:
    (text,) = blocks("call.md", "java", "Predict.java")
    (tmp_path / "Predict.java").write_text(text.replace(SHOWN_URL, url))
    subprocess.run(["javac", "-Xlint:all", "-Werror", "Predict.java"], cwd=tmp_path, check=True)
    result = subprocess.run(["java", "Predict"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["predictions"][0].keys() == {"click"}
