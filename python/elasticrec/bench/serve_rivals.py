"""Other model servers with the network and the rows of `bench serve`, each in a virtual environment of its own.

They are files of `benchmarks/serve/`, which only a clone has.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
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
from elasticrec.bench.serve_model import DENSE, NAME, SLOTS, Batches, Requests, Served, Sizes, over_grpc, over_http
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.repository.version import part_name
from elasticrec.serving.process import server_process
from elasticrec.training.predict import load_checkpoint

Result = dict[str, Any]
Say = Callable[[str], None]
Scores = npt.NDArray[np.float32]

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "serve"
_CONNECTIONS = (8, 64, 256)
_NUM_BODIES = 4096
# Instances whose scores are compared, and how near they have to be.
_COMPARED, _TOLERANCE = 16, 1e-4
_WARM_UP_S = 0.5
# Seconds at most of looking for the best shape, each time.
_TRIAL_S = 2.0
_START_PATIENCE_S = 180.0
_POLL_S = 0.05
# What `benchmarks/serve/model.py` says in every process that has loaded it.
_LOADED = "model loaded"


def over_bytes(batches: Batches) -> Requests:
    """All signs, then all dense values, and nothing else."""
    bodies = [signs.tobytes() + dense.tobytes() for signs, dense in batches]
    return Requests("/predict", bodies, "application/octet-stream", {}, False)


def over_json(batches: Batches) -> Requests:
    """Tensors of the Open Inference Protocol as JSON."""
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
    """A server, and the shapes that it is tried in."""

    name: str
    script: str
    packages: tuple[str, ...]
    """The first one names its version."""
    shapes: tuple[tuple[int, int], ...]
    """Processes that score, and requests that are scored together."""
    faces: dict[str, Callable[[Batches], Requests]]
    has_loading_parent: bool = False
    """Whether the process that starts several others loads the model too."""
    is_extended: bool = False
    """Whether it does what the server does not bring itself: measured too, and named apart."""


_ALONE, _TOGETHER = ((1, 1), (2, 1)), ((1, 64), (2, 64))
_ALL_SHAPES = _ALONE + _TOGETHER
_FASTAPI = ("fastapi", "uvicorn[standard]")

RIVALS = (
    # has no batches of its own either: thirty lines of its file join what one turn of the loop has
    Rival("fastapi", "fastapi_torch.py", _FASTAPI, _ALONE, {"bytes": over_bytes}),
    Rival("fastapi_joined", "fastapi_torch.py", _FASTAPI, _TOGETHER, {"bytes": over_bytes}, is_extended=True),
    Rival("litserve", "litserve_torch.py", ("litserve",), _ALL_SHAPES, {"bytes": over_bytes}),
    # its workers do not start with a newer uvloop
    Rival(
        "mlserver",
        "mlserver_torch.py",
        ("mlserver", "uvloop<0.22"),
        _ALL_SHAPES,
        {"json": over_json, "grpc": over_grpc},
    ),
    Rival(
        "kserve",
        "kserve_torch.py",
        ("kserve",),
        # has no batches of its own
        _ALONE,
        {"binary": over_http, "json": over_json, "grpc": over_grpc},
        has_loading_parent=True,
    ),
)


@dataclass(frozen=True)
class Shape:
    """One way to run a rival and to ask it."""

    workers: int
    batch: int
    face: str

    def __str__(self) -> str:
        joined = f"up to {self.batch} requests together" if self.batch > 1 else "each request alone"
        return f"{self.face}, {self.workers} process{'es' if self.workers > 1 else ''}, {joined}"


def check_clone() -> None:
    """Refuse an installed package, before anything is made."""
    if not SCRIPTS.is_dir():
        raise ConfigError("bench: --rivals: expected a clone with `benchmarks/`, this is an installed package")


def export_model(served: Served, directory: Path) -> None:
    """The network and the rows for those who do not know ElasticREC, of a new base that is offered."""
    directory.mkdir(parents=True, exist_ok=True)
    scorer = load_checkpoint(served.run).scorer.eval()
    width = sum(column.width for column in scorer.model.columns)
    shapes = torch.zeros(2, SLOTS, width), torch.zeros(2, DENSE)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.trace(scorer, shapes).save(str(directory / "network.pt"))  # type: ignore[no-untyped-call]
    signs = np.sort(served.signs.ravel())
    repository = served.repository
    number = served.publish()
    repository.offer(number)
    cube = Path(repository.location, repository.version(number).name, part_name(0))
    rows, found = _core.read_cube([str(cube)], signs.tolist())
    assert found == len(signs), (found, len(signs))
    np.save(directory / "signs.npy", signs)
    np.save(directory / "rows.npy", rows)


def run(served: Served, sizes: Sizes, say: Say) -> Result:
    """Requests of one instance a second, of our server and of each rival at its best, in turns."""
    check_clone()
    exported = Path("exported").absolute()
    export_model(served, exported)
    batches = served.batches(1, _NUM_BODIES)
    rivals: dict[str, Result] = {}
    failed: dict[str, str] = {}
    with server_process(f"models/{NAME}") as server:
        ours = Target(server.address, over_http(batches))
        wanted = ours.scores()
        for rival in RIVALS:
            place = Path("rivals", rival.name).absolute()
            try:
                bench = RivalBench(rival, place, exported, batches, wanted, say)
                bench.install()
                rivals[rival.name] = bench.measure(ours, sizes)
            except UnavailableError as error:
                say(f"{rival.name}: left out: {error}")
                failed[rival.name] = str(error)
            finally:
                shutil.rmtree(place, ignore_errors=True)
    result: Result = {"rivals": rivals, "rivals_left_out": failed}
    for key, is_extended in (("python_server", False), ("extended_python_server", True)):
        names = [rival.name for rival in RIVALS if rival.name in rivals and rival.is_extended == is_extended]
        if names:
            result[key] = min(names, key=lambda name: float(rivals[name]["ratio"]))
            result[f"{key}_ratio"] = rivals[result[key]]["ratio"]
    return result


@dataclass(frozen=True)
class Target:
    """A server that is asked, and how."""

    address: str
    requests: Requests

    def rate(self, seconds: float) -> tuple[float, int]:
        """Requests a second of a closed loop, with the number of connections at which it does most."""
        self._load(_CONNECTIONS[0], min(seconds, _WARM_UP_S))
        return max((self._load(connections, seconds), connections) for connections in _CONNECTIONS)

    def _load(self, connections: int, seconds: float) -> float:
        report = _core.load_test(
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
        """Those of the first requests; of HTTP only."""
        return np.concatenate([self._ask(body) for body in self.requests.bodies[:_COMPARED]])

    def _ask(self, body: bytes) -> Scores:
        headers = {"Content-Type": self.requests.content_type, **self.requests.headers}
        request = urllib.request.Request(f"http://{self.address}{self.requests.path}", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                answer, about = response.read(), response.headers
        except OSError as error:
            raise UnavailableError(f"{self.requests.path}: {error}") from None
        length = about.get("Inference-Header-Content-Length")
        if length is not None:
            return np.frombuffer(answer[int(length) :], np.float32)
        if "json" in about.get("Content-Type", ""):
            return np.array(json.loads(answer)["outputs"][0]["data"], np.float32).ravel()
        return np.frombuffer(answer, np.float32)


@dataclass(frozen=True)
class RivalBench:
    """One rival: its environment, its processes, its figures."""

    rival: Rival
    place: Path
    exported: Path
    batches: Batches
    wanted: Scores
    say: Say

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.place / "env" / "bin" / "python"

    def install(self) -> None:
        """Its packages from the index, torch from the environment that runs this."""
        self.say(f"{self.rival.name}: installing {' '.join(self.rival.packages)}")
        venv.create(self.place / "env", symlinks=True)
        self.call(
            [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", *self.rival.packages]
        )
        (packages,) = (self.place / "env" / "lib").glob("python*/site-packages")
        # behind the packages of its own, so that only what it does not bring comes from there
        (packages / "torch-of-the-benchmark.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")

    def measure(self, ours: Target, sizes: Sizes) -> Result:
        """Its best shape, then that and our server in turns."""
        rates = self._try(min(sizes.seconds, _TRIAL_S))
        shape = max(rates, key=lambda shape: rates[shape])
        pairs, connections = [], 0
        with self._running(shape.workers, shape.batch) as addresses:
            theirs = self._target(addresses, shape.face)
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

    def _try(self, seconds: float) -> dict[Shape, float]:
        """Requests a second in every shape that works."""
        rates: dict[Shape, float] = {}
        problem = "no shape"
        for workers, batch in self.rival.shapes:
            try:
                with self._running(workers, batch) as addresses:
                    for face in self.rival.faces:
                        shape = Shape(workers, batch, face)
                        rates[shape], connections = self._target(addresses, face).rate(seconds)
                        self.say(f"{self.rival.name}: {shape}: {rates[shape]:,.0f} requests/s at {connections}")
            except UnavailableError as error:
                problem = str(error)
                self.say(f"{self.rival.name}: {workers} processes, {batch} together: {problem}")
        if not rates:
            raise UnavailableError(problem)
        return rates

    def _target(self, addresses: dict[bool, str], face: str) -> Target:
        """Checked: it has to give our scores. Over gRPC the answers are those of the same model, checked over HTTP."""
        requests = self.rival.faces[face](self.batches)
        target = Target(addresses[requests.is_grpc], requests)
        if not requests.is_grpc:
            off = float(np.abs(target.scores() - self.wanted).max())
            if not off <= _TOLERANCE:
                raise UnavailableError(f"{face}: scores: expected ours to {_TOLERANCE:g}, got {off:.2g} beside them")
        return target

    @contextlib.contextmanager
    def _running(self, workers: int, batch: int) -> Iterator[dict[bool, str]]:
        """Its processes, answering; the addresses of HTTP and of gRPC by whether it is that."""
        ports = _free_ports(2)
        command = [str(self.python), str(SCRIPTS / self.rival.script), str(self.exported)]
        for name, value in zip(("port", "grpc-port", "workers", "batch"), (*ports, workers, batch), strict=True):
            command += [f"--{name}", str(value)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        addresses = {False: f"127.0.0.1:{ports[0]}", True: f"127.0.0.1:{ports[1]}"}
        log = self.place / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, cwd=self.place, env=environment, stdout=out, stderr=out, start_new_session=True
            )
            try:
                expected = workers + (self.rival.has_loading_parent and workers > 1)
                self._wait(process, addresses[False], log, expected)
                yield addresses
            finally:
                # all of them: some leave children behind when they are asked to end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait(self, process: "subprocess.Popen[bytes]", address: str, log: Path, num_loads: int) -> None:
        """Until every process has the model and one answers."""
        face = next(face for face in self.rival.faces.values() if face is not over_grpc)
        target = Target(address, face(self.batches[:1]))
        end = time.monotonic() + _START_PATIENCE_S
        problem = "did not load the model"
        while time.monotonic() < end:
            if process.poll() is not None:
                raise UnavailableError(f"it ended with code {process.returncode}: {_last_line(log.read_text())}")
            if log.read_text(errors="replace").count(_LOADED) >= num_loads:
                try:
                    target.scores()
                    return
                except UnavailableError as error:
                    problem = str(error)
            time.sleep(_POLL_S)
        raise UnavailableError(f"it did not answer in {_START_PATIENCE_S:.0f} s: {problem}")

    def _version(self) -> str:
        code = f"import importlib.metadata as metadata; print(metadata.version('{self.rival.packages[0]}'))"
        return self.call([str(self.python), "-c", code]).strip()

    def call(self, command: list[str]) -> str:
        """What a command prints."""
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UnavailableError(f"{' '.join(command[1:4])}: {_last_line(done.stderr)}")
        return done.stdout


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"


def describe(result: Result) -> list[str]:
    """The figures for people."""
    lines = [
        f"1 instance a request: {rival['our_requests_per_s']:,.0f} requests/s, {name} {rival['version']} "
        f"{rival['requests_per_s']:,.0f} ({rival['shape']}): {rival['ratio']:.1f} times"
        for name, rival in result.get("rivals", {}).items()
    ]
    lines += [f"{name} was left out: {why}" for name, why in result.get("rivals_left_out", {}).items()]
    if "python_server_ratio" in result:
        lines.append(
            f"{result['python_server_ratio']:.1f} times the best server as it comes, {result['python_server']}"
        )
    if "extended_python_server_ratio" in result:
        lines.append(
            f"{result['extended_python_server_ratio']:.1f} times {result['extended_python_server']}, "
            "with what its users have to write themselves"
        )
    return lines
