"""Cache the ONNX graph of a network: exporting takes seconds, and versions with the same structure share it."""

import hashlib
import importlib.metadata
import inspect
import json
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from elasticrec.config import Job, structure_keys
from elasticrec.durable import write_atomically
from elasticrec.publish import export
from elasticrec.publish.export import export_graph, input_names
from elasticrec.repository.version import DENSE_FILE, GRAPH_FILE, OUTPUT
from elasticrec.training.dense import FlatParameters
from elasticrec.training.network import Scorer

# Largest difference between scores of torch and of ONNX Runtime for the same weights.
_TOLERANCE = 1e-5


def cached_graph(job: Job, scorer: Scorer, dense: FlatParameters, directory: Path) -> bytes:
    """Return the graph of a job's network: from the cache in `directory`, or exported and added to it."""
    path = directory / f"{fingerprint(job, scorer, dense)[:32]}.onnx"
    if path.is_file():
        graph = path.read_bytes()
        # The fingerprint does not cover files that a custom model imports, so compare scores as well.
        if matches_torch(graph, scorer, dense, label_columns(job)):
            return graph
    graph = export_graph(scorer, dense.tensors, label_columns(job))
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.onnx"):
        old.unlink()
    write_atomically(path, graph)
    return graph


def label_columns(job: Job) -> tuple[int, ...] | None:
    """Return the columns of the served scores, or None for all of them in order."""
    outputs = job.publish.outputs
    if outputs is None or outputs == job.data.labels:
        return None
    return tuple(job.data.labels.index(label) for label in outputs)


def fingerprint(job: Job, scorer: Scorer, dense: FlatParameters) -> str:
    """Return the SHA-256 of everything that determines the graph: job structure, model code and exporter."""
    source = job.model_source()
    facts = {
        "structure": structure_keys(job),
        "negative_rate": scorer.negative_rate,
        "labels": label_columns(job),
        "tensors": [tensor.to_dict() for tensor in dense.tensors],
        "code": [_source(kind) for kind in type(scorer.model).__mro__ if not kind.__module__.startswith("torch")],
        "own": None if source is None else hashlib.sha256(source).hexdigest(),
        "exporter": [Path(export.__file__).read_text("utf-8"), inspect.getsource(Scorer)],
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "onnx", "onnxscript")},
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return f"{kind.__module__}.{kind.__qualname__}"


def matches_torch(graph: bytes, scorer: Scorer, dense: FlatParameters, columns: tuple[int, ...] | None) -> bool:
    """Return whether the graph gives the scores of torch with these weights, or torch's scores are not finite."""
    shape = scorer.model.shape
    width = sum(column.width for column in scorer.model.columns)
    noise = np.random.default_rng(1)
    inputs = {"pooled": noise.standard_normal((5, shape.num_slots, width), np.float32)}
    inputs["dense"] = noise.standard_normal((5, shape.num_dense), np.float32)
    was_training = scorer.training
    scorer.eval()
    try:
        with torch.inference_mode():
            expected = scorer(torch.from_numpy(inputs["pooled"]), torch.from_numpy(inputs["dense"])).numpy()
    finally:
        scorer.train(was_training)
    expected = expected if columns is None else expected[:, list(columns)]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / GRAPH_FILE).write_bytes(graph)
        (Path(name) / DENSE_FILE).write_bytes(dense.values.numpy().tobytes())
        try:
            session = onnxruntime.InferenceSession(Path(name) / GRAPH_FILE, providers=["CPUExecutionProvider"])
            (scores,) = session.run([OUTPUT], {name: inputs[name] for name in input_names(shape)})
        except Exception:
            # ONNX Runtime raises errors of many types for a damaged file.
            return False
    if scores.shape != expected.shape:
        return False
    return bool(np.allclose(scores, expected, rtol=0, atol=_TOLERANCE) or not np.isfinite(expected).all())
