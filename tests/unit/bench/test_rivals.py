"""Rivals of `bench serve` load our model, are checked and stopped; the packages of real rivals are not installed."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.bench import serve_rivals
from elasticrec.bench.serve_model import NAME, BenchModel, Sizes, http_requests, make_model
from elasticrec.bench.serve_rivals import Rival, Target, bytes_requests
from elasticrec.cli import main
from elasticrec.serving.process import server_process

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "serve"

# A rival in the standard library, without packages.
PLAIN = """
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from model import Model, arguments, split

options = arguments(None)
model = Model(options.directory)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(options.directory, "child").write_text(str(child.pid))

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 4096

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        scores = model.predict(*split(body)) + OFFSET
        self.send_response(200)
        self.send_header("Content-Length", str(scores.nbytes))
        self.end_headers()
        self.wfile.write(scores.tobytes())

    def log_message(self, *_):
        pass

ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def bench_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BenchModel]:
    with contextlib.chdir(tmp_path_factory.mktemp("bench")):
        yield make_model(2600)


@pytest.mark.slow
def test_the_exported_model_scores_like_our_server(bench_model: BenchModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    import model

    exported = Path("exported").absolute()
    serve_rivals.export_model(bench_model, exported)
    theirs = model.Model(exported)
    batches = bench_model.batches(1, 16)
    # Signs without a row, the largest sign, and a negative value.
    batches[0][0][0, :2] = (1, 2**64 - 1)
    batches[1][1][0, 0] = -2.5
    with server_process(f"models/{NAME}") as server:
        expected = Target(server.address, http_requests(batches)).scores()
    scores = [theirs.predict(*model.split(body)) for body in bytes_requests(batches).bodies]
    np.testing.assert_allclose(np.concatenate(scores), expected, rtol=0, atol=1e-5)
    assert len(np.unique(expected)) == len(batches)
    together = theirs.predict(*(np.concatenate(parts) for parts in zip(*batches, strict=True)))
    np.testing.assert_allclose(together, expected, rtol=0, atol=1e-5)
    sys.modules.pop("model")


@pytest.mark.slow
def test_rivals_are_measured_in_turn_or_skipped_with_the_reason(
    bench_model: BenchModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").symlink_to(SCRIPTS / "model.py")
    for name, offset in (("plain", "0"), ("inaccurate", "1")):
        (tmp_path / f"{name}.py").write_text(PLAIN.replace("OFFSET", offset))
    (tmp_path / "broken.py").write_text("raise SystemExit('no model today')\n")
    names = ("broken", "inaccurate", "plain")
    rivals = tuple(Rival(name, f"{name}.py", (name,), ((1, 1),), {"bytes": bytes_requests}) for name in names)
    rivals += (Rival("helped", "plain.py", ("helped",), ((1, 1),), {"bytes": bytes_requests}, is_extended=True),)
    monkeypatch.setattr(serve_rivals, "SCRIPTS", tmp_path)
    monkeypatch.setattr(serve_rivals, "RIVALS", rivals)
    calls: list[list[str]] = []

    def call(_: Any, command: list[str]) -> str:
        calls.append(command)
        return "1.0\n"

    monkeypatch.setattr(serve_rivals.RivalBench, "call", call)
    result = serve_rivals.run(bench_model, Sizes(2600, 3, 0.2), lambda _: None)
    assert [command[-1] for command in calls if "install" in command] == [*names, "helped"]
    assert result["rivals"].keys() == {"plain", "helped"}, result
    plain = result["rivals"]["plain"]
    assert plain["version"] == "1.0" and plain["requests_per_s"] > 0 and plain["ratio"] > 0
    assert list(plain["shapes"]) == [plain["shape"]] == ["bytes, 1 process, each request alone"]
    assert (result["python_server"], result["python_server_ratio"]) == ("plain", plain["ratio"])
    # A rival with features added by our script is reported separately.
    helped = result["rivals"]["helped"]["ratio"]
    assert (result["extended_python_server"], result["extended_python_server_ratio"]) == ("helped", helped)
    assert result["rivals_left_out"]["broken"] == "exited with code 1: no model today"
    assert result["rivals_left_out"]["inaccurate"].startswith("bytes: scores: expected ours within 0.0001, got a diff")
    lines = serve_rivals.describe(result)
    assert "plain 1.0" in lines[0] and lines[2].startswith("broken was skipped: ") and len(lines) == 6
    # Child processes of a rival are stopped, and its environment is removed.
    child = int(Path("exported", "child").read_text())
    assert not _is_alive(child)
    assert not list(Path("rivals").iterdir())


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    # A killed process is a zombie until its parent waits for it.
    return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_rivals_need_a_clone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_rivals, "SCRIPTS", tmp_path / "none")
    assert main(["bench", "serve", "--rivals"]) == 2
    assert "bench: --rivals: expected a clone" in capsys.readouterr().err


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--part", "luck"]) == 2
    expected = "error: bench: --part: expected engine, joining, latency, swap, rivals, got `luck`\n"
    assert capsys.readouterr().err == expected
