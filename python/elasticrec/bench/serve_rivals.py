"""Other model servers with the network and the rows of `bench serve`, each in its own virtual environment.

They use the files in `benchmarks/serve/`, which only a clone has.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import venv
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from elasticrec import _core
from elasticrec.bench.processes import free_ports, request, require_clone
from elasticrec.bench.serve_model import (
    DENSE,
    NAME,
    SLOTS,
    Batches,
    BenchModel,
    Requests,
    Sizes,
    grpc_requests,
    http_requests,
)
from elasticrec.errors import UnavailableError
from elasticrec.repository.version import part_name
from elasticrec.serving.process import server_process
from elasticrec.training.predict import load_checkpoint

Result = dict[str, Any]
Say = Callable[[str], None]
Scores = npt.NDArray[np.float32]

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "serve"
_CONNECTIONS = (8, 64, 256)
_NUM_BODIES = 4096
# Instances whose scores are compared, and the largest difference allowed.
_COMPARED, _TOLERANCE = 16, 1e-4
_WARM_UP_S = 0.5
# The longest trial of a shape.
_TRIAL_S = 2.0
_START_TIMEOUT_S = 180.0
_POLL_S = 0.05
# Printed by `benchmarks/serve/model.py` in every process that has loaded the model.
_LOADED = "model loaded"


def bytes_requests(batches: Batches) -> Requests:
    """Return requests with the bytes of all signs, then of all dense values."""
    bodies = [signs.tobytes() + dense.tobytes() for signs, dense in batches]
    return Requests("/predict", bodies, "application/octet-stream", {}, False)


def json_requests(batches: Batches) -> Requests:
    """Return requests with tensors of the Open Inference Protocol as JSON."""
    bodies = []
    for signs, dense in batches:
        inputs = [
            {"name": name, "shape": list(values.shape), "datatype": datatype, "data": values.ravel().tolist()}
            for name, datatype, values in (("signs", "UINT64", signs), ("dense", "FP32", dense))
        ]
        bodies.append(json.dumps({"inputs": inputs}).encode())
    return Requests(f"/v2/models/{NAME}/infer", bodies, "application/json", {}, False)


@dataclass(frozen=True)
class Rival:
    """A model server, and the shapes to try."""

    name: str
    script: str
    packages: tuple[str, ...]
    """The first package gives the version."""
    shapes: tuple[tuple[int, int], ...]
    """Number of processes, and requests that are scored together."""
    protocols: dict[str, Callable[[Batches], Requests]]
    has_loading_parent: bool = False
    """Whether the process that starts the others loads the model too."""
    is_extended: bool = False
    """Whether our script adds a feature that the server lacks; such rivals are reported separately."""


_ALONE, _TOGETHER = ((1, 1), (2, 1)), ((1, 64), (2, 64))
_ALL_SHAPES = _ALONE + _TOGETHER
_FASTAPI = ("fastapi", "uvicorn[standard]")

RIVALS = (
    # FastAPI has no batching: `fastapi_joined` uses thirty lines of our script that join concurrent requests.
    Rival("fastapi", "fastapi_torch.py", _FASTAPI, _ALONE, {"bytes": bytes_requests}),
    Rival("fastapi_joined", "fastapi_torch.py", _FASTAPI, _TOGETHER, {"bytes": bytes_requests}, is_extended=True),
    Rival("litserve", "litserve_torch.py", ("litserve",), _ALL_SHAPES, {"bytes": bytes_requests}),
    # Its workers do not start with a newer uvloop.
    Rival(
        "mlserver",
        "mlserver_torch.py",
        ("mlserver", "uvloop<0.22"),
        _ALL_SHAPES,
        {"json": json_requests, "grpc": grpc_requests},
    ),
    Rival(
        "kserve",
        "kserve_torch.py",
        ("kserve",),
        # KServe has no batching.
        _ALONE,
        {"binary": http_requests, "json": json_requests, "grpc": grpc_requests},
        has_loading_parent=True,
    ),
)


@dataclass(frozen=True)
class Shape:
    """One way to run a rival and to send requests to it."""

    workers: int
    batch: int
    protocol: str

    def __str__(self) -> str:
        joined = f"up to {self.batch} requests together" if self.batch > 1 else "each request alone"
        return f"{self.protocol}, {self.workers} process{'es' if self.workers > 1 else ''}, {joined}"


def export_model(model: BenchModel, directory: Path) -> None:
    """Export the network and the rows in formats that other servers can load."""
    directory.mkdir(parents=True, exist_ok=True)
    scorer = load_checkpoint(model.run).scorer.eval()
    width = sum(column.width for column in scorer.model.columns)
    shapes = torch.zeros(2, SLOTS, width), torch.zeros(2, DENSE)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit")
        torch.jit.trace(scorer, shapes).save(str(directory / "network.pt"))  # type: ignore[no-untyped-call]
    signs = np.sort(model.signs.ravel())
    repository = model.repository
    number = model.publish()
    repository.offer(number)
    cube = Path(repository.location, repository.version(number).name, part_name(0))
    rows, found = _core.read_cube([str(cube)], signs.tolist())
    assert found == len(signs), (found, len(signs))
    np.save(directory / "signs.npy", signs)
    np.save(directory / "rows.npy", rows)


def run(model: BenchModel, sizes: Sizes, say: Say) -> Result:
    """Compare the request rate of our server with that of each rival at its best; a request has one instance."""
    require_clone(SCRIPTS)
    exported = Path("exported").absolute()
    export_model(model, exported)
    batches = model.batches(1, _NUM_BODIES)
    rivals: dict[str, Result] = {}
    failed: dict[str, str] = {}
    with server_process(f"models/{NAME}") as server:
        ours = Target(server.address, http_requests(batches))
        expected = ours.scores()
        for rival in RIVALS:
            directory = Path("rivals", rival.name).absolute()
            try:
                bench = RivalBench(rival, directory, exported, batches, expected, say)
                bench.install()
                rivals[rival.name] = bench.measure(ours, sizes)
            except UnavailableError as error:
                say(f"{rival.name}: skipped: {error}")
                failed[rival.name] = str(error)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
    result: Result = {"rivals": rivals, "rivals_left_out": failed}
    for key, is_extended in (("python_server", False), ("extended_python_server", True)):
        names = [rival.name for rival in RIVALS if rival.name in rivals and rival.is_extended == is_extended]
        if names:
            result[key] = min(names, key=lambda name: float(rivals[name]["ratio"]))
            result[f"{key}_ratio"] = rivals[result[key]]["ratio"]
    return result


@dataclass(frozen=True)
class Target:
    """A running server and the requests for it."""

    address: str
    requests: Requests

    def rate(self, seconds: float) -> tuple[float, int]:
        """Return requests per second of a closed loop, and the best number of connections."""
        self._send(_CONNECTIONS[0], min(seconds, _WARM_UP_S))
        return max((self._send(connections, seconds), connections) for connections in _CONNECTIONS)

    def _send(self, connections: int, seconds: float) -> float:
        report = _core.run_traffic(
            self.address,
            self.requests.path,
            self.requests.bodies,
            connections=connections,
            seconds=seconds,
            content_type=self.requests.content_type,
            headers=self.requests.headers,
            grpc=self.requests.is_grpc,
        )
        if report.failed:
            raise UnavailableError(f"{report.failed} requests failed: {report.failures}")
        return report.requests_per_s

    def scores(self) -> Scores:
        """Return the scores of the first requests, over HTTP."""
        return np.concatenate([self._ask(body) for body in self.requests.bodies[:_COMPARED]])

    def _ask(self, body: bytes) -> Scores:
        headers = {"Content-Type": self.requests.content_type, **self.requests.headers}
        response = request(self.address, self.requests.path, body, headers)
        answer, about = response.content, response.headers
        length = about.get("Inference-Header-Content-Length")
        if length is not None:
            return np.frombuffer(answer[int(length) :], np.float32)
        if "json" in about.get("Content-Type", ""):
            return np.array(json.loads(answer)["outputs"][0]["data"], np.float32).ravel()
        return np.frombuffer(answer, np.float32)


@dataclass(frozen=True)
class RivalBench:
    """The environment, processes and figures of one rival."""

    rival: Rival
    directory: Path
    exported: Path
    batches: Batches
    expected: Scores
    say: Say

    @property
    def python(self) -> Path:
        """Return the interpreter of its environment."""
        return self.directory / "env" / "bin" / "python"

    def install(self) -> None:
        """Install its packages from the index; torch comes from the current environment."""
        self.say(f"{self.rival.name}: installing {' '.join(self.rival.packages)}")
        venv.create(self.directory / "env", symlinks=True)
        self.call(
            [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", *self.rival.packages]
        )
        (packages,) = (self.directory / "env" / "lib").glob("python*/site-packages")
        # This path follows the environment's own packages, so that only missing packages come from it.
        (packages / "torch-of-the-benchmark.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    def measure(self, ours: Target, sizes: Sizes) -> Result:
        """Find the rival's best shape, then measure that and our server in turn."""
        rates = self._try_shapes(min(sizes.seconds, _TRIAL_S))
        shape = max(rates, key=lambda shape: rates[shape])
        pairs, connections = [], 0
        with self._start_processes(shape.workers, shape.batch) as addresses:
            theirs = self._target(addresses, shape.protocol)
            for repeat in range(sizes.repeats):
                self.say(f"{self.rival.name}: {shape}: {repeat + 1}/{sizes.repeats}")
                rate, connections = theirs.rate(sizes.seconds)
                pairs.append((ours.rate(sizes.seconds)[0], rate))
        return {
            "version": self._version(),
            "shape": str(shape),
            "connections": connections,
            "requests_per_s": round(statistics.median(rate for _, rate in pairs), 1),
            "our_requests_per_s": round(statistics.median(rate for rate, _ in pairs), 1),
            "shapes": {str(tried): round(rate, 1) for tried, rate in rates.items()},
            "ratio": round(statistics.median(mine / theirs for mine, theirs in pairs), 2),
        }

    def _try_shapes(self, seconds: float) -> dict[Shape, float]:
        """Return requests per second of every shape that works."""
        rates: dict[Shape, float] = {}
        problem = "no shape"
        for workers, batch in self.rival.shapes:
            try:
                with self._start_processes(workers, batch) as addresses:
                    for protocol in self.rival.protocols:
                        shape = Shape(workers, batch, protocol)
                        rates[shape], connections = self._target(addresses, protocol).rate(seconds)
                        self.say(
                            f"{self.rival.name}: {shape}: {rates[shape]:,.0f} requests/s, {connections} connections"
                        )
            except UnavailableError as error:
                problem = str(error)
                self.say(f"{self.rival.name}: {workers} processes, {batch} together: {problem}")
        if not rates:
            raise UnavailableError(problem)
        return rates

    def _target(self, addresses: dict[bool, str], protocol: str) -> Target:
        """Return a target after checking its scores over HTTP; over gRPC the same model answers."""
        requests = self.rival.protocols[protocol](self.batches)
        target = Target(addresses[requests.is_grpc], requests)
        if not requests.is_grpc:
            off = float(np.abs(target.scores() - self.expected).max())
            if not off <= _TOLERANCE:
                raise UnavailableError(
                    f"{protocol}: scores: expected ours within {_TOLERANCE:g}, got a difference of {off:.2g}"
                )
        return target

    @contextlib.contextmanager
    def _start_processes(self, workers: int, batch: int) -> Iterator[dict[bool, str]]:
        """Start its processes and yield the addresses of HTTP (False) and gRPC (True)."""
        ports = free_ports(2)
        command = [str(self.python), str(SCRIPTS / self.rival.script), str(self.exported)]
        for name, value in zip(("port", "grpc-port", "workers", "batch"), (*ports, workers, batch), strict=True):
            command += [f"--{name}", str(value)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        addresses = {False: f"127.0.0.1:{ports[0]}", True: f"127.0.0.1:{ports[1]}"}
        log = self.directory / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.directory, env=environment, stdout=out, stderr=out, start_new_session=True
            )
            try:
                expected = workers + (self.rival.has_loading_parent and workers > 1)
                self._wait_until_loaded(process, addresses[False], log, expected)
                yield addresses
            finally:
                # Kill the whole process group: some servers leave children behind.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait_until_loaded(self, process: "subprocess.Popen[bytes]", address: str, log: Path, num_loads: int) -> None:
        """Wait until every process has loaded the model and one answers."""
        make = next(make for make in self.rival.protocols.values() if make is not grpc_requests)
        target = Target(address, make(self.batches[:1]))
        end = time.monotonic() + _START_TIMEOUT_S
        problem = "did not load the model"
        while time.monotonic() < end:
            if process.poll() is not None:
                raise UnavailableError(f"exited with code {process.returncode}: {_last_line(log.read_text())}")
            if log.read_text(errors="replace").count(_LOADED) >= num_loads:
                try:
                    target.scores()
                    return
                except UnavailableError as error:
                    problem = str(error)
            time.sleep(_POLL_S)
        raise UnavailableError(f"did not answer within {_START_TIMEOUT_S:.0f} s: {problem}")

    def _version(self) -> str:
        code = f"import importlib.metadata as metadata; print(metadata.version('{self.rival.packages[0]}'))"
        return self.call([str(self.python), "-c", code]).strip()

    def call(self, command: list[str]) -> str:
        """Run a command and return its output."""
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(f"{' '.join(command[1:4])}: {_last_line(done.stderr)}")
        return done.stdout


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text."""
    lines = [
        f"1 instance per request: {rival['our_requests_per_s']:,.0f} requests/s, {name} {rival['version']} "
        f"{rival['requests_per_s']:,.0f} ({rival['shape']}): {rival['ratio']:.1f} times"
        for name, rival in result.get("rivals", {}).items()
    ]
    lines += [f"{name} was skipped: {why}" for name, why in result.get("rivals_left_out", {}).items()]
    if "python_server_ratio" in result:
        lines.append(
            f"{result['python_server_ratio']:.1f} times the best server without changes, {result['python_server']}"
        )
    if "extended_python_server_ratio" in result:
        lines.append(
            f"{result['extended_python_server_ratio']:.1f} times {result['extended_python_server']}, "
            "with code that its users must write themselves"
        )
    return lines
