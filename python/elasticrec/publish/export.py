"""Export the network as an ONNX graph whose weights are external, in the flat vector of a version.

The graph depends on the structure alone: versions with the same structure share its bytes and differ in `dense.bin`.
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
from elasticrec.models import Model, Shape
from elasticrec.publish.content import Network
from elasticrec.repository.version import DENSE_FILE, OUTPUT
from elasticrec.training.dense import FlatParameters, FlatTensor
from elasticrec.training.network import Scorer, build_model

# Patterns of the exporter's messages: an unsupported operator, and a line of the user's code.
_OPERATOR = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)'")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')


def input_names(shape: Shape) -> list[str]:
    """Return the names of the graph's inputs; `dense` exists only if the data has dense values."""
    return ["pooled", "dense"] if shape.num_dense else ["pooled"]


def describe_network(model: Model, tensors: list[FlatTensor]) -> Network:
    """Describe a network for a manifest; `tensors` is the layout of its flat weights."""
    return Network(
        columns=[{"name": column.name, "width": column.width} for column in model.columns],
        inputs=input_names(model.shape),
        tensors=[tensor.to_dict() for tensor in tensors],
    )


def export_graph(scorer: Scorer, tensors: list[FlatTensor], columns: tuple[int, ...] | None = None) -> bytes:
    """Return the graph as bytes; its initializers point into `dense.bin`. `columns` selects its scores."""
    shape = scorer.model.shape
    width = sum(column.width for column in scorer.model.columns)
    module = scorer if shape.num_dense and columns is None else _ServedNetwork(scorer, columns)
    # Two samples, because the exporter treats a batch of 1 as a constant.
    inputs = [torch.zeros(2, shape.num_slots, width)]
    if shape.num_dense:
        inputs.append(torch.zeros(2, shape.num_dense))
    batch = torch.export.Dim("batch", min=1, max=1 << 20)
    scorer.eval()
    try:
        with _silence_exporter():
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
        raise ModelError(f"model: cannot be exported to ONNX: {_export_reason(error)}") from error
    assert program is not None
    graph: onnx.ModelProto = program.model_proto
    _check_batch(graph)
    _externalize_weights(graph, {tensor.name: tensor for tensor in tensors})
    # The exporter's metadata contains paths of this machine.
    for node in graph.graph.node:
        del node.metadata_props[:]
        node.doc_string = ""
    del graph.graph.metadata_props[:]
    del graph.metadata_props[:]
    content: bytes = graph.SerializeToString(deterministic=True)
    return content


def check_exports(job: Job) -> None:
    """Raise an error if the job's model cannot be built or exported, before hours of training."""
    model = build_model(job)
    export_graph(Scorer(model), FlatParameters(model, job).tensors)


class _ServedNetwork(torch.nn.Module):
    """The network as it is served: without unused inputs, and with the selected scores only."""

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
    """Reject a graph with a fixed batch size, which results if `forward` turns the size into a Python number."""
    for value in (*graph.graph.input, *graph.graph.output):
        if not value.type.tensor_type.shape.dim[0].dim_param:
            raise ModelError(
                "model: cannot be exported to ONNX: `forward` fixes the number of samples; "
                "use `x.shape[0]`, not `len(x)` or `int(x.shape[0])`"
            )


def _externalize_weights(graph: onnx.ModelProto, tensors: dict[str, FlatTensor]) -> None:
    """Replace the values of every parameter by a reference into the flat vector."""
    found = set()
    for initializer in graph.graph.initializer:
        name = initializer.name.split("model.", 1)[-1]
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if tuple(initializer.dims) != tensor.shape or initializer.data_type != onnx.TensorProto.FLOAT:
            raise ModelError(
                f"model: `{name}`: the export changed its shape or type, expected f32 {list(tensor.shape)}"
            )
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


def _export_reason(error: BaseException) -> str:
    """Return why the export failed, with the operator or the line of `forward` if known."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    if match := _OPERATOR.search(text):
        return f"operator `{match[1]}` is not supported by ONNX"
    frames = _FRAME.findall(text)
    where = f"{frames[-1][0]}:{frames[-1][1]}: " if frames else ""
    if text.startswith("Could not guard on data-dependent"):
        return f"{where}`forward` branches on tensor values; use `torch.where` instead of `if`"
    return where + (text.splitlines()[0] if text else type(error).__name__)


@contextlib.contextmanager
def _silence_exporter() -> Iterator[None]:
    """Silence the exporter's output, warnings and log; errors are still raised."""
    output = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        warnings.simplefilter("ignore")
        previous = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(previous)
