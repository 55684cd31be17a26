"""The model that `bench serve` measures, and requests for it.

Wide & Deep, 26 slots, dim 9, 13 dense values, MLP 400-400-400, with any number of rows.
"""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.audit.part import partition_of
from elasticrec.bench.parse import write_demo
from elasticrec.config import Job, parse_job
from elasticrec.manifest import FileEntry
from elasticrec.publish.local import publish_run
from elasticrec.repository.repository import Repository
from elasticrec.repository.version import DENSE_FILE, GRAPH_FILE, Content, part_name
from elasticrec.run import Run
from elasticrec.training.loop import train_job

NAME = "bench"
SLOTS, DENSE = 26, 13
# Exponent of the Zipf distribution of the signs of a slot.
_SKEW = 1.05
_SEED = 7

Signs = npt.NDArray[np.uint64]
Batches = list[tuple[Signs, npt.NDArray[np.float32]]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurement."""

    rows: int
    repeats: int
    seconds: float


@dataclass(frozen=True)
class BenchModel:
    """A published model with many rows in a repository."""

    repository: Repository
    path: Path
    """The directory of the first version."""
    signs: Signs
    """All signs with a row, `[slots, rows per slot]`."""
    content: Content
    run: Run
    """The run that trained the network."""

    def publish(self, parent: int | None = None, changed: int = 0) -> int:
        """Publish a base with all rows or a delta with some, without making it current; return its number."""
        repository, random = self.repository, np.random.default_rng(_SEED)
        signs = self.signs.ravel() if parent is None else random.choice(self.signs.ravel(), changed, replace=False)
        graph, dense = ((self.path / name).read_bytes() for name in (GRAPH_FILE, DENSE_FILE))
        with repository.begin() if parent is None else repository.begin_delta(parent) as draft:
            files = draft.write_network(dense, graph)
            path = draft.directory / part_name(0)
            files[part_name(0)] = FileEntry(*_write_rows(path, self.content, np.sort(signs), is_base=parent is None))
            more = {} if parent is None else {"changed": len(signs), "removed": 0}
            content = Content(**vars(self.content) | {"rows": self.signs.size} | more)
            return repository.commit(draft, content, files).number

    def batches(self, instances: int, count: int) -> Batches:
        """Return signs `[instances, slots]` and dense values of requests; signs are as frequent as in click logs."""
        random = np.random.default_rng(_SEED + 1)
        weights = 1 / np.arange(1, self.signs.shape[1] + 1) ** _SKEW
        ends = np.cumsum(weights / weights.sum())
        made = []
        for _ in range(count):
            ranks = np.searchsorted(ends, random.random((instances, SLOTS))).clip(max=self.signs.shape[1] - 1)
            signs = self.signs[np.arange(SLOTS), ranks]
            made.append((signs, random.random((instances, DENSE), np.float32)))
        return made


def make_model(rows: int) -> BenchModel:
    """Train a network briefly and publish it with many rows, in the current directory."""
    write_criteo_rows(20_000)
    job = bench_job()
    with contextlib.redirect_stderr(io.StringIO()):
        summary = train_job(job, fresh=True)
    published = publish_run(summary.run)
    repository = Repository.open(Path("models"), NAME)
    manifest: dict[str, Any] = json.loads((published.path / "manifest.json").read_bytes())
    table, graph = manifest["table"], manifest["graph"]
    content = Content(
        run=manifest["run"],
        checkpoint=manifest["checkpoint"],
        features=manifest["features"],
        partitions=table["partitions"],
        columns=table["columns"],
        rows=rows,
        inputs=graph["inputs"],
        tensors=manifest["dense"]["tensors"],
        metrics=manifest["metrics"],
        data=manifest["data"],
    )
    signs = np.random.default_rng(_SEED).integers(0, 2**64 - 1, (SLOTS, rows // SLOTS), np.uint64)
    model = BenchModel(repository, published.path, signs, content, summary.run)
    repository.offer(model.publish())
    return model


def write_criteo_rows(count: int) -> None:
    """Generate Criteo rows in the directory `data`."""
    write_demo(Path("data"), count, "criteo", SLOTS)


def bench_job() -> Job:
    """Return a job that trains the model on `data`."""
    raw = {
        "name": NAME,
        "data": {"format": "criteo", "train": ["data"]},
        "model": {"kind": "wide_deep", "dim": 9, "hidden": [400, 400, 400]},
        "train": {"batch_size": 512, "print_every_s": 3600, "checkpoint": {"every_s": 3600}},
    }
    return parse_job(raw, base=Path.cwd(), source="bench")


def _write_rows(path: Path, content: Content, signs: Signs, *, is_base: bool) -> tuple[int, str]:
    columns = [(str(column["name"]), int(column["width"])) for column in content.columns]
    writer: Any = (_core.CubeWriter if is_base else _core.DeltaWriter)(
        str(path), columns, row_type="f32", num_partitions=content.partitions
    )
    partitions = partition_of(signs, content.partitions)
    random = np.random.default_rng(_SEED)
    width = sum(width for _, width in columns)
    for partition in range(content.partitions):
        some = np.ascontiguousarray(signs[partitions == partition])
        values = random.standard_normal((len(some), width), np.float32) * np.float32(0.01)
        writer.add(partition, some, values, *(() if is_base else (np.empty(0, np.uint64),)))
    size, digest = writer.finish()
    return int(size), str(digest)


@dataclass(frozen=True)
class Requests:
    """Request bodies of one protocol, and how to send them."""

    path: str
    bodies: list[bytes]
    content_type: str
    headers: dict[str, str]
    is_grpc: bool


def http_requests(batches: Batches) -> Requests:
    """Return requests with binary tensors of the Open Inference Protocol."""
    bodies = []
    for signs, dense in batches:
        inputs = [_tensor("signs", "UINT64", signs), _tensor("dense", "FP32", dense)]
        head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        bodies.append(head + signs.tobytes() + dense.tobytes())
    headers = {"Inference-Header-Content-Length": str(len(head))}
    return Requests(f"/v2/models/{NAME}/infer", bodies, "application/octet-stream", headers, False)


def _tensor(name: str, datatype: str, values: npt.NDArray[Any]) -> dict[str, Any]:
    parameters = {"binary_data_size": values.nbytes}
    return {"name": name, "shape": list(values.shape), "datatype": datatype, "parameters": parameters}


def grpc_requests(batches: Batches) -> Requests:
    """Return the same requests as `ModelInfer` messages."""
    bodies = []
    for signs, dense in batches:
        inputs: list[tuple[str, str, npt.NDArray[Any]]] = [("signs", "UINT64", signs), ("dense", "FP32", dense)]
        message = _field(1, NAME.encode())
        for name, datatype, values in inputs:
            shape = _field(3, b"".join(_varint(size) for size in values.shape))
            message += _field(5, _field(1, name.encode()) + _field(2, datatype.encode()) + shape)
        message += b"".join(_field(7, values.tobytes()) for _, _, values in inputs)
        bodies.append(message)
    path = "/inference.GRPCInferenceService/ModelInfer"
    return Requests(path, bodies, "application/grpc", {}, True)


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of a protobuf message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])
