"""The exported graph: the scores of torch in ONNX Runtime, and nothing of the weights or this machine inside."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from elasticrec.errors import ModelError
from elasticrec.models import ZOO, Column, Inputs, Model, Options, Sequence, Shape
from elasticrec.publish.export import DENSE_FILE, export_graph, input_names
from elasticrec.training.dense import FlatParameters
from elasticrec.training.network import Scorer
from small import MakeJob

DIM = 3
BATCH_SIZES = (1, 2, 7, 300)


def make(make_job: MakeJob, model: Model, seed: int = 1) -> tuple[Scorer, FlatParameters]:
    flat = FlatParameters(model, make_job())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return Scorer(model), flat


def inputs(model: Model, batch_size: int) -> dict[str, Tensor]:
    torch.manual_seed(batch_size)
    width = sum(column.width for column in model.columns)
    tensors = {"pooled": torch.randn(batch_size, model.shape.num_slots, width)}
    if model.shape.num_dense:
        tensors["dense"] = torch.randn(batch_size, model.shape.num_dense)
    return tensors


def write(directory: Path, graph: bytes, flat: FlatParameters) -> Path:
    directory.mkdir()
    (directory / DENSE_FILE).write_bytes(flat.values.numpy().tobytes())
    (directory / "graph.onnx").write_bytes(graph)
    return directory / "graph.onnx"


def check_scores(path: Path, scorer: Scorer) -> None:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_inputs()] == input_names(scorer.model.shape)
    for batch_size in BATCH_SIZES:
        tensors = inputs(scorer.model, batch_size)
        with torch.inference_mode():
            expected = scorer(tensors["pooled"], tensors.get("dense", torch.zeros(batch_size, 0)))
        (scores,) = session.run(["scores"], {name: tensor.numpy() for name, tensor in tensors.items()})
        np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)
        assert scores.shape == (batch_size, scorer.model.shape.num_labels)
        assert batch_size < 7 or scores.std() > 0.01


SHAPES = {"dense": Shape(4, 2, 1), "sparse": Shape(4, 0, 1), "labels": Shape(3, 1, 2)}
SEQUENCES = {
    "sequence": Shape(6, 0, 1, (Sequence(2, 3, 0),)),
    "sequences": Shape(8, 1, 2, (Sequence(1, 2, 3), Sequence(5, 3, 3))),
}
CASES = {
    f"{kind}-{name}": (kind, shape)
    for kind in sorted(ZOO)
    for name, shape in (SEQUENCES if kind == "din" else SHAPES).items()
}


@pytest.mark.parametrize(("kind", "shape"), CASES.values(), ids=CASES)
def test_scores_equal_those_of_torch(make_job: MakeJob, tmp_path: Path, kind: str, shape: Shape) -> None:
    scorer, flat = make(make_job, ZOO[kind](shape, Options(DIM, (6, 5))))
    graph = export_graph(scorer, flat.tensors)
    path = write(tmp_path / "1", graph, flat)
    check_scores(path, scorer)

    other, other_flat = make(make_job, ZOO[kind](shape, Options(DIM, (6, 5))), seed=2)
    assert not np.array_equal(other_flat.values, flat.values)
    assert export_graph(other, other_flat.tensors) == graph
    # the same graph serves the other weights
    check_scores(write(tmp_path / "2", graph, other_flat), other)


def test_the_graph_holds_no_weights_and_nothing_of_this_machine(make_job: MakeJob) -> None:
    scorer, flat = make(make_job, ZOO["wide_deep"](Shape(4, 2, 1), Options(DIM, (64, 64))))
    content = export_graph(scorer, flat.tensors)
    assert len(content) < 4 * len(flat.values)
    graph = onnx.load_model_from_string(content)
    places = {}
    for initializer in graph.graph.initializer:
        assert not initializer.raw_data or np.prod(initializer.dims) <= 8
        if initializer.data_location == onnx.TensorProto.EXTERNAL:
            assert not initializer.raw_data
            assert not initializer.float_data
            places[initializer.name.removeprefix("model.")] = {
                entry.key: entry.value for entry in initializer.external_data
            }
    assert places == {
        tensor.name: {
            "location": DENSE_FILE,
            "offset": str(4 * tensor.offset),
            "length": str(4 * int(np.prod(tensor.shape))),
        }
        for tensor in flat.tensors
    }
    text = content.decode("latin-1")
    for word in ("site-packages", "elasticrec/", ".py", str(Path.home()), str(Path.cwd()), "/tmp"):
        assert word not in text, word
    assert not re.search(r"/[a-z]+/[a-z]+/[a-z]+", text)


class Normed(Model):
    """With buffers, a product and a branch of tensors: what users write."""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (Column("first", 1, init="zero"), Column("second", options.dim))
        self.norm = nn.BatchNorm1d(shape.num_slots * options.dim)
        self.out = nn.Linear(shape.num_slots * options.dim, shape.num_labels)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
        second = columns["second"]
        pairs = second.sum(1).square() - second.square().sum(1)
        logits: Tensor = self.out(self.norm(second.flatten(1))) + self.scale * pairs.sum(1, keepdim=True)
        return logits + columns["first"].sum(1)


def test_buffers_go_with_the_weights(make_job: MakeJob, tmp_path: Path) -> None:
    scorer, flat = make(make_job, Normed(Shape(3, 0, 1), Options(DIM, ())))
    scorer.train()
    for step in range(3):
        scorer(3 * inputs(scorer.model, 20 + step)["pooled"] + 1, torch.zeros(20 + step, 0))
    scorer.eval()
    graph = export_graph(scorer, flat.tensors)
    check_scores(write(tmp_path / "1", graph, flat), scorer)


class Branching(Normed):
    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
        logits = super().forward(columns, dense_BD)
        return logits if logits.sum() > 0 else -logits


class Forgetful(Normed):
    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
        logits: Tensor = self.out(columns["second"].flatten(1)) * self.scale
        return logits


def test_what_cannot_be_exported_is_said_in_one_line(make_job: MakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    scorer, flat = make(make_job, Branching(Shape(3, 0, 1), Options(DIM, ())))
    with pytest.raises(ModelError) as caught:
        export_graph(scorer, flat.tensors)
    message = str(caught.value)
    assert message.startswith("model: cannot be exported to ONNX: ")
    assert "\n" not in message
    assert len(message) > len("model: cannot be exported to ONNX: ") + 10
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_a_parameter_without_use_is_named(make_job: MakeJob) -> None:
    scorer, flat = make(make_job, Forgetful(Shape(3, 0, 1), Options(DIM, ())))
    with pytest.raises(ModelError, match=r"^model: `norm\.bias` is not in the exported graph; does forward use it\?$"):
        export_graph(scorer, flat.tensors)
