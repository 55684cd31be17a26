"""`elasticrec demo`: run the whole loop on generated data with the commands that a user would type."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import typer

from elasticrec import _core
from elasticrec.errors import ElasticRecError
from elasticrec.serving.client import Client
from elasticrec.serving.process import ServerProcess, server_process

# This file marks a directory made by a demo, which the next demo may replace.
_MARK = ".elasticrec-demo"
_SAMPLES_SHOWN = 5
_TRAFFIC_SECONDS = 2.0
_CONNECTIONS = 8


def run_demo(directory: Path, samples: int) -> None:
    """Generate data, train, publish, serve and send requests; print each step and its result."""
    _clear(directory)
    _title("1. data: click logs with known click probabilities")
    _elasticrec(directory, "data", "demo", "data", "--samples", str(samples))
    truth = json.loads((directory / "data/truth.json").read_text())
    best = truth["hours"][-1]["best_auc"]

    _title("2. training: Wide & Deep on all hours but the last, evaluated on the last")
    _elasticrec(directory, "train", "data/job.yaml")
    reached = _last_eval_auc(directory / "runs/demo/metrics.jsonl")
    typer.echo(f"AUC reached {reached:.4f}; the best possible on that hour is {best:.4f}")

    _title("3. publish: network, rows and manifest as one version")
    _elasticrec(directory, "publish", "demo")

    _title("4. serving: Rust from the socket to the score")
    typer.echo("$ elasticrec serve models/demo --port 0")
    with server_process("models/demo", cwd=directory, say=typer.echo) as server:
        _ask(directory, server)


def _ask(directory: Path, server: ServerProcess) -> None:
    url = server.url
    hours = sorted((directory / "data").glob("*/*/part-*.txt"))
    with open(hours[-1], "rb") as file:
        lines = [next(file) for _ in range(64)]
    (directory / "samples.txt").write_bytes(b"".join(lines[:_SAMPLES_SHOWN]))

    _title("5. requests: the same samples scored by the trainer and by the server")
    trainer = _elasticrec(directory, "predict", "samples.txt", "--checkpoint", "demo", quiet=True).split()
    served = _elasticrec(directory, "predict", "samples.txt", "--server", url, quiet=True).split()
    typer.echo(f"{'click':>8}{'trainer':>14}{'server':>14}{'difference':>14}")
    for line, ours, theirs in zip(lines, trainer, served, strict=False):
        click = line.split()[1].decode()
        typer.echo(f"{click:>8}{float(ours):>14.7f}{float(theirs):>14.7f}{abs(float(ours) - float(theirs)):>14.1e}")
    instance = _instance(lines[0])
    typer.echo(f"$ curl {server.predict_url} -H 'Content-Type: application/json' \\")
    body = json.dumps({"instances": [instance]})
    typer.echo(f"    -d '{body[:88]}…'")
    with Client(url) as client:
        (score,) = client.predict([instance])[0]
    typer.echo(f"  → click {score:.7f}")

    _title(f"6. speed: {_CONNECTIONS} connections, one sample per request, {_TRAFFIC_SECONDS:.0f} seconds")
    report = _core.run_traffic(
        server.address,
        server.predict_path,
        lines,
        connections=_CONNECTIONS,
        seconds=_TRAFFIC_SECONDS,
    )
    typer.echo(
        f"{report.requests_per_s:,.0f} requests/s, {report.failed} failed, half within {report.p50_us / 1000:.2f} ms, "
        f"99 % within {report.p99_us / 1000:.2f} ms"
    )


def _elasticrec(directory: Path, *arguments: str, quiet: bool = False) -> str:
    """Run a command as a user would; with `quiet`, return its output instead of printing it."""
    typer.echo(f"$ elasticrec {' '.join(arguments)}")
    sys.stdout.flush()
    result = subprocess.run(
        _command(arguments),
        cwd=directory,
        env=_environment(),
        stdout=subprocess.PIPE if quiet else None,
        stderr=subprocess.PIPE if quiet else None,
        text=True,
        check=False,
    )
    if result.returncode:
        typer.echo(result.stderr or "", err=True, nl=False)
        raise ElasticRecError(f"demo: `elasticrec {' '.join(arguments)}` failed, see above")
    return result.stdout or ""


def _command(arguments: list[str] | tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", "elasticrec.cli", *arguments]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONUNBUFFERED": "1"}


def _clear(directory: Path) -> None:
    """Delete an earlier demo; refuse a directory that contains anything else."""
    directory.mkdir(parents=True, exist_ok=True)
    unexpected = {path.name for path in directory.iterdir()} - {_MARK, "data", "runs", "models", "samples.txt"}
    if not (directory / _MARK).exists():
        unexpected |= {path.name for path in directory.iterdir()}
    if unexpected:
        raise ElasticRecError(
            f"{directory}: expected an empty directory or an earlier demo, got `{min(unexpected)}` in it"
        )
    (directory / _MARK).touch()
    for path in directory.iterdir():
        if path.name == _MARK:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _last_eval_auc(metrics: Path) -> float:
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float(next(record["eval"][0]["auc"] for record in reversed(records) if record.get("eval")))


def _instance(line: bytes) -> dict[str, list[int]]:
    """Return a line of slot text as named slots."""
    instance: dict[str, list[int]] = {}
    for field in line.split()[2:]:
        sign, slot = field.decode().split(":")
        instance.setdefault(slot, []).append(int(sign))
    return instance


def _title(text: str) -> None:
    typer.secho(f"\n{text}", bold=True)
