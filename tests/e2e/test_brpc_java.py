"""A third-party client: brpc-java calls Paddle Serving's and Cube's services on `elasticrec serve`."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.serving.process import ServerProcess
from support.harness import TIMEOUT_S, odd_lines, serving, succeed, write_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("java") and shutil.which("mvn")), reason="needs java and mvn"),
]

PROJECT = Path(__file__).parents[1] / "java/brpc"
NUM_SAMPLES = 300
TOLERANCE = 1e-6
TOKEN = "s3cret"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the command of the client, which is built outside of the repository."""
    output = tmp_path_factory.mktemp("brpc-java")
    command = ["mvn", "--batch-mode", "--quiet", "--file", str(PROJECT / "pom.xml"), f"-Doutput.directory={output}"]
    built = subprocess.run([*command, "package"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if built.returncode != 0 and ("Could not transfer" in built.stdout or "Could not resolve" in built.stdout):
        pytest.skip(f"Maven Central does not answer: {built.stdout[:500]}")
    assert built.returncode == 0, built.stdout + built.stderr
    path = f"{output}/classes{os.pathsep}{output}/dependency/*"
    # cglib, which generates brpc-java's proxies, defines classes in a way that Java 17 restricts.
    return ["java", "--add-opens", "java.base/java.lang=ALL-UNNAMED", "-Xmx256m", "-cp", path, "elasticrec.Main"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served")
    write_job(directory, format="slots", kind="wide_deep", samples=2000)
    succeed("train", "job.yaml", cwd=directory)
    succeed("publish", "tiny", cwd=directory)
    (part,) = (directory / "data/20260101/01").glob("*.txt")
    # A request without any sign has no tensors, and so no rows.
    lines = [line for line in odd_lines(part.read_bytes().splitlines(), "slots", 2 * NUM_SAMPLES) if b":" in line]
    (directory / "samples.txt").write_bytes(b"".join(lines[:NUM_SAMPLES]))
    return directory


def run(client: list[str], server: ServerProcess, directory: Path, *arguments: str) -> list[list[str]]:
    """Return the words of each line that the client prints."""
    command = [*client, server.address, *arguments]
    with open(directory / "samples.txt") as samples:
        result = subprocess.run(command, stdin=samples, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return [line.split(" ") for line in result.stdout.splitlines()]


def check(lines: list[list[str]], directory: Path, signs: np.ndarray) -> None:
    """Check that the scores equal those of `predict`, and the rows those of the version."""
    text = succeed("predict", "samples.txt", "--model", "models/tiny", cwd=directory)
    expected = [float(line) for line in text.splitlines()]
    scores = [float(words[1]) for words in lines if words[0] == "score"]
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE, rtol=0)
    assert ["version", "1"] in lines
    view = _core.CubeView([str(path) for path in sorted((directory / "models/tiny/1/cube").iterdir())])
    rows, is_there = view.lookup(signs)
    assert 0 < is_there.sum() < len(signs)
    found = [words[1:] for words in lines if words[0] == "row"]
    assert len(found) == len(signs)
    for (status, *values), row, there in zip(found, rows, is_there, strict=True):
        # Java prints the largest u32 as -1.
        assert status == ("0" if there else "-1")
        assert np.array_equal(np.array(values, np.float32), row if there else [])


def signs_of(directory: Path) -> np.ndarray:
    """Return signs with and without a row."""
    view = _core.CubeView([str(path) for path in sorted((directory / "models/tiny/1/cube").iterdir())])
    known, _ = next(iter(view.items()))
    return np.concatenate([known[:20], np.array([2**64 - 1, 2**63 + 1], np.uint64)])


@pytest.mark.parametrize("compression", ["NONE", "GZIP", "ZLIB"])
def test_scores_and_rows_with_many_threads(client: list[str], directory: Path, compression: str) -> None:
    signs = signs_of(directory)
    with serving("models/tiny", cwd=directory) as server:
        lines = run(client, server, directory, "8", "7", compression, "-", *map(str, signs))
    check(lines, directory, signs)
    # The client keeps the text of the error, not its code.
    assert lines[-1][0] == "error" and "unknown method `train`, expected `inference` or `debug`" in " ".join(lines[-1])


def test_the_token_is_sent_as_brpc_sends_it(client: list[str], directory: Path) -> None:
    signs = signs_of(directory)
    settings = ["--set", "serve.token=${TEST_TOKEN}"]
    with serving("models/tiny", *settings, cwd=directory, env={"TEST_TOKEN": TOKEN}) as server:
        lines = run(client, server, directory, "2", "50", "NONE", TOKEN, *map(str, signs))
        check(lines, directory, signs)
        command = [*client, server.address, "1", "50", "NONE", "wrong", "1"]
        refused = subprocess.run(command, input="1 0 5:0\n", capture_output=True, text=True, timeout=300, check=False)
    assert refused.returncode != 0
    assert "authentication data: expected the token of this server" in refused.stderr
