"""The network as an ONNX graph whose weights lie outside it, in the flat vector of a version.

The graph depends on the structure alone: versions of one structure share its bytes and differ in `dense.bin`.
"""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator

import onnx
import torch

from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.models import Shape
from elasticrec.repository.version import DENSE_FILE, OUTPUT
from elasticrec.training.dense import FlatParameters, FlatTensor
from elasticrec.training.network import Scorer, build_model

# How the exporter names an operator, and the line of the user's code that an error came from.
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)'")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def input_names(shape: Shape) -> list[str]:
    """Inputs of the graph: `dense` is there only if the data has dense values."""
    return ["pooled", "dense"] if shape.num_dense else ["pooled"]


def export_graph(scorer: Scorer, tensors: list[FlatTensor], columns: tuple[int, ...] | None = None) -> bytes:
    """The graph as bytes; its initializers point into `dense.bin`. `columns` are those of the scores that it gives."""
    shape = scorer.model.shape
    width = sum(column.width for column in scorer.model.columns)
    module = scorer if shape.num_dense and columns is None else _Exported(scorer, columns)
    # 2 samples: a batch of 1 would be taken for a constant
    inputs = [torch.zeros(2, shape.num_slots, width)]
    if shape.num_dense:
        inputs.append(torch.zeros(2, shape.num_dense))
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    scorer.eval()
    try:
        with _quiet():
            program = torch.onnx.export(
                module,
                tuple(inputs),
                dynamo=True,
                input_names=input_names(shape),
                output_names=[OUTPUT],
                dynamic_shapes=tuple({0: batch} for _ in inputs),
                optimize=False,
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        raise ModelError(f"model: cannot be exported to ONNX: {_in_words(error)}") from error
    assert program is not None
    graph: onnx.ModelProto = program.model_proto
    _check_batch(graph)
    _point_outside(graph, {tensor.name: tensor for tensor in tensors})
    # the producer's notes hold paths of this machine
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    del graph.graph.metadata_props[:]
    del graph.metadata_props[:]
    content: bytes = graph.SerializeToString(deterministic=True)
    return content


def check_exports(job: Job) -> None:
    """Refuse a job whose model cannot be built or published, before hours of training."""
    model = build_model(job)
    export_graph(Scorer(model), FlatParameters(model, job).tensors)


class _Exported(torch.nn.Module):
    """The network as it is asked: without an input that has no values, and with the scores that are wanted."""

    def __init__(self, scorer: Scorer, columns: tuple[int, ...] | None) -> None:
        super().__init__()
        self.scorer = scorer
        self.columns = columns

    def forward(self, pooled: torch.Tensor, dense: torch.Tensor | None = None) -> torch.Tensor:
        if dense is None:
            dense = pooled.new_zeros(pooled.shape[0], 0)
        scores: torch.Tensor = self.scorer(pooled, dense)
        if self.columns is None:
            return scores
        return torch.stack([scores[:, column] for column in self.columns], 1)


def _check_batch(graph: onnx.ModelProto) -> None:
    """Refuse a graph for one size of batch, which the exporter makes where `forward` turns a size into a number."""
    for value in (*graph.graph.input, *graph.graph.output):
        if not value.type.tensor_type.shape.dim[0].dim_param:
            raise ModelError(
                "model: cannot be exported to ONNX: `forward` fixes the number of samples; "
                "use `x.shape[0]`, not `len(x)` or `int(x.shape[0])`"
            )


def _point_outside(graph: onnx.ModelProto, tensors: dict[str, FlatTensor]) -> None:
    """Replace the values of every parameter by its place in the flat vector."""
    found = set()
    for initializer in graph.graph.initializer:
        name = initializer.name.split("model.", 1)[-1]
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tuple(initializer.dims) != tensor.shape or initializer.data_type != onnx.TensorProto.FLOAT:
            raise ModelError(f"model: `{name}` was changed by the export, expected shape {list(tensor.shape)}")
        found.add(name)
        initializer.ClearField("raw_data")
        initializer.ClearField("float_data")
        initializer.data_location = onnx.TensorProto.EXTERNAL
        del initializer.external_data[:]
        count = 1
        for dimension in tensor.shape:
            count *= dimension
        for key, value in (("location", DENSE_FILE), ("offset", 4 * tensor.offset), ("length", 4 * count)):
            entry = initializer.external_data.add()
            entry.key, entry.value = key, str(value)
    if missing := set(tensors) - found:
        raise ModelError(f"model: `{min(missing)}` is not in the exported graph; does forward use it?")


def _in_words(error: BaseException) -> str:
    """What the exporter stumbled over, with the operator's name or the line of `forward` if it tells."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    if match := _OPERATOR.search(text):
        return f"operator `{match[1]}` has no counterpart there"
    frames = _FRAME.findall(text)
    where = f"{frames[-1][0]}:{frames[-1][1]}: " if frames else ""
    if text.startswith("Could not guard on data-dependent"):
        return f"{where}`forward` goes another way for other values; use `torch.where` instead of `if`"
    return where + (text.splitlines()[0] if text else type(error).__name__)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter talks on every channel there is; its errors are raised all the same."""
    words = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
        warnings.simplefilter("ignore")
        previous = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(previous)
