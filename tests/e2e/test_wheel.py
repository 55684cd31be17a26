"""The wheel in an environment without Rust and without torch: client, serving and cube work from it."""

import json
import os
import shutil
import subprocess
import urllib.request
import venv
import zipfile
from pathlib import Path

import pytest

from support.harness import succeed, write_job

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_wheel_serves_without_rust_and_torch(tmp_path: Path) -> None:
    subprocess.run(["make", "--silent", "wheel"], cwd=ROOT, check=True, timeout=1500)
    (wheel,) = (ROOT / "dist").glob("elasticrec-*.whl")
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        (extension,) = (file for file in archive.infolist() if file.filename.endswith(".so"))
    assert extension.file_size < 20_000_000, "the extension is not stripped"
    venv.create(tmp_path / "env", with_pip=True)
    binaries = tmp_path / "env/bin"
    # No Rust on the path: the wheel must be complete.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("CARGO", "RUST", "VIRTUAL_ENV"))}
    environment = clean | {"PATH": str(binaries)}
    assert shutil.which("cargo", path=environment["PATH"]) is None
    pip = [binaries / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel]
    subprocess.run(pip, env=environment, check=True, timeout=1500)

    write_job(tmp_path, format="slots", kind="wide_deep", samples=1000)
    succeed("train", "job.yaml", cwd=tmp_path)
    succeed("publish", "tiny", cwd=tmp_path)
    (part,) = (tmp_path / "data/20260101/01").glob("*.txt")
    expected = succeed("predict", str(part), "--model", "models/tiny", cwd=tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(binaries / "elasticrec"), *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    assert run("--version").stdout.startswith("elasticrec ")
    assert run("check", "job.yaml").returncode == 0
    assert run("predict", str(part), "--model", "models/tiny").stdout == expected
    without_torch = run("train", "job.yaml")
    assert without_torch.returncode == 2
    assert "elasticrec[train]" in without_torch.stderr and "Traceback" not in without_torch.stderr
    server = subprocess.Popen(
        [str(binaries / "elasticrec"), "serve", "models/tiny", "--port", "0"],
        cwd=tmp_path,
        env=environment | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        url = next(line.split(" on ")[1].strip() for line in server.stdout if " on http" in line)
        request = urllib.request.Request(url, part.read_bytes(), {"Content-Type": "text/plain"})
        with urllib.request.urlopen(request, timeout=60) as response:
            predictions = json.load(response)["predictions"]
        scores = [float(line) for line in expected.splitlines()]
        assert [prediction["click"] for prediction in predictions] == pytest.approx(scores, abs=1e-7)
    finally:
        server.terminate()
        server.communicate(timeout=60)
    assert server.returncode == 0
