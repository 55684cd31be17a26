"""Checkpoint to version: the graph, the flat weights, the cube, and the manifest last."""

import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from elasticrec.durable import write_synced
from elasticrec.manifest import FileEntry, write_manifest
from elasticrec.publish.export import DENSE_FILE, OUTPUT, export_graph, input_names
from elasticrec.publish.repository import KIND, Repository
from elasticrec.run import Run
from elasticrec.training.predict import CheckpointModel, load_checkpoint

_GRAPH = "graph.onnx"
_CUBE = "cube/part-00000"


@dataclass(frozen=True)
class Published:
    """A version that was written and offered."""

    model: str
    version: int
    path: Path
    rows: int
    num_bytes: int


def publish_run(run: Run, *, best: bool = False) -> Published:
    """Publish the newest or the best checkpoint of a run and make it the current version."""
    loaded = load_checkpoint(run, best=best)
    job = loaded.job
    repository = Repository(Path(job.publish.repository) / job.publish.model)
    # before anything is written: what cannot be exported leaves no trace
    graph = export_graph(loaded.scorer, loaded.state.dense.tensors)
    with repository.locked():
        version, path = repository.begin()
        try:
            files = _write_files(path, loaded, graph)
            write_manifest(path, KIND, _body(loaded, run, version), files)
        except BaseException:
            # a disk that was full should not stay so
            shutil.rmtree(path, ignore_errors=True)
            raise
        repository.offer(version)
    num_bytes = sum(file.num_bytes for file in files.values())
    return Published(repository.name, version, path, len(loaded.state.embedding.table), num_bytes)


def _write_files(path: Path, loaded: CheckpointModel, graph: bytes) -> dict[str, FileEntry]:
    state = loaded.state
    return {
        _GRAPH: FileEntry(*write_synced(path / _GRAPH, graph)),
        DENSE_FILE: FileEntry(*write_synced(path / DENSE_FILE, state.dense.values.numpy().tobytes())),
        _CUBE: FileEntry(*state.embedding.table.write_cube(str(path / _CUBE))),
    }


def _body(loaded: CheckpointModel, run: Run, version: int) -> dict[str, object]:
    job, model, checkpoint = loaded.job, loaded.scorer.model, loaded.checkpoint
    return {
        "model": job.publish.model,
        "version": version,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": run.name,
        "checkpoint": checkpoint.name,
        "base": None,
        "features": job.features(),
        "table": {
            "partitions": job.sparse.partitions,
            "columns": [{"name": column.name, "width": column.width} for column in model.columns],
            "rows": len(loaded.state.embedding.table),
            "row_type": "f32",
        },
        "graph": {"file": _GRAPH, "inputs": input_names(model.shape), "outputs": [OUTPUT]},
        "dense": {
            "file": DENSE_FILE,
            "tensors": [tensor.to_dict() for tensor in loaded.state.dense.tensors],
        },
        "metrics": checkpoint.manifest["metrics"],
        "data": {"samples": checkpoint.progress.samples, "epoch": checkpoint.progress.epoch, "until": None},
    }
