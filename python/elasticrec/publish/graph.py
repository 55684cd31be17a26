"""The graph of a structure, exported once: that takes seconds, and all versions of a structure have the same."""

import hashlib
import importlib.metadata
import inspect
import json
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from elasticrec.config import Job, structure
from elasticrec.durable import write_atomically
from elasticrec.publish import export
from elasticrec.publish.export import export_graph, input_names
from elasticrec.repository.version import DENSE_FILE, GRAPH_FILE, OUTPUT
from elasticrec.training.dense import FlatParameters
from elasticrec.training.network import Scorer

# What is made of the same values by torch and by ONNX Runtime.
_TOLERANCE = 1e-5


def graph_of(job: Job, scorer: Scorer, dense: FlatParameters, directory: Path) -> bytes:
    """The graph of a job's network, out of `directory` if one of this structure lies there, else exported into it."""
    path = directory / f"{fingerprint(job, scorer, dense)[:32]}.onnx"
    if path.is_file():
        graph = path.read_bytes()
        # a model of the user's own may have changed in a file that it imports
        if agrees(graph, scorer, dense, label_columns(job)):
            return graph
    graph = export_graph(scorer, dense.tensors, label_columns(job))
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.onnx"):
        old.unlink()
    write_atomically(path, graph)
    return graph


def label_columns(job: Job) -> tuple[int, ...] | None:
    """Columns of the scores that are served; None for all, in their order."""
    outputs = job.publish.outputs
    if outputs is None or outputs == job.data.labels:
        return None
    return tuple(job.data.labels.index(label) for label in outputs)


def fingerprint(job: Job, scorer: Scorer, dense: FlatParameters) -> str:
    """SHA-256 of all that decides the graph: the job's structure, the code of the model, and who exports."""
    source = job.model_source()
    facts = {
        "structure": structure(job),
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


def agrees(graph: bytes, scorer: Scorer, dense: FlatParameters, columns: tuple[int, ...] | None) -> bool:
    """Whether a graph with these weights gives the scores of torch; also if torch has none that are numbers."""
    shape = scorer.model.shape
    width = sum(column.width for column in scorer.model.columns)
    noise = np.random.default_rng(1)
    inputs = {"pooled": noise.standard_normal((5, shape.num_slots, width), np.float32)}
    inputs["dense"] = noise.standard_normal((5, shape.num_dense), np.float32)
    was_training = scorer.training
    scorer.eval()
    try:
        with torch.inference_mode():
            wanted = scorer(torch.from_numpy(inputs["pooled"]), torch.from_numpy(inputs["dense"])).numpy()
    finally:
        scorer.train(was_training)
    wanted = wanted if columns is None else wanted[:, list(columns)]
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / GRAPH_FILE).write_bytes(graph)
        (Path(name) / DENSE_FILE).write_bytes(dense.values.numpy().tobytes())
        try:
            session = onnxruntime.InferenceSession(Path(name) / GRAPH_FILE, providers=["CPUExecutionProvider"])
            (scores,) = session.run([OUTPUT], {name: inputs[name] for name in input_names(shape)})
        except Exception:
            # of a damaged file ONNX Runtime raises errors of many kinds
            return False
    if scores.shape != wanted.shape:
        return False
    return bool(np.allclose(scores, wanted, rtol=0, atol=_TOLERANCE) or not np.isfinite(wanted).all())
