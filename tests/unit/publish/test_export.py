"""The exported graph: it scores like torch, and holds neither weights nor paths of this machine."""

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
from elasticrec.publish.export import export_graph, input_names
from elasticrec.repository.version import DENSE_FILE
from elasticrec.training.dense import FlatParameters
from elasticrec.training.network import Scorer
from support.small import MakeJob

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


def test_the_graph_holds_no_weights_and_no_local_paths(make_job: MakeJob) -> None:
    scorer, flat = make(make_job, ZOO["wide_deep"](Shape(4, 2, 1), Options(DIM, (64, 64))))
    content = export_graph(scorer, flat.tensors)
    assert len(content) < 4 * len(flat.values)
    graph = onnx.load_model_from_string(content)
    references = {}
    for initializer in graph.graph.initializer:
        assert not initializer.raw_data or np.prod(initializer.dims) <= 8
        if initializer.data_location == onnx.TensorProto.EXTERNAL:
            assert not initializer.raw_data
            assert not initializer.float_data
            references[initializer.name.removeprefix("model.")] = {
                entry.key: entry.value for entry in initializer.external_data
            }
    assert references == {
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
    """A model with buffers and products of tensors, like those that users write."""

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


def test_buffers_are_exported_with_the_weights(make_job: MakeJob, tmp_path: Path) -> None:
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


def test_a_failed_export_is_one_line(make_job: MakeJob, capfd: pytest.CaptureFixture[str]) -> None:
    scorer, flat = make(make_job, Branching(Shape(3, 0, 1), Options(DIM, ())))
    with pytest.raises(ModelError) as caught:
        export_graph(scorer, flat.tensors)
    message = str(caught.value)
    assert message.startswith("model: cannot be exported to ONNX: ")
    assert "\n" not in message
    assert len(message) > len("model: cannot be exported to ONNX: ") + 10
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_an_unused_parameter_is_named(make_job: MakeJob) -> None:
    scorer, flat = make(make_job, Forgetful(Shape(3, 0, 1), Options(DIM, ())))
    with pytest.raises(ModelError, match=r"^model: `norm\.bias` is not in the exported graph; does forward use it\?$"):
        export_graph(scorer, flat.tensors)


@torch.library.custom_op("elasticrec_tests::twist", mutates_args=())
def twist(x: Tensor) -> Tensor:
    return 2 * x


@twist.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Twisting(Normed):
    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
        twisted: Tensor = twist(super().forward(columns, dense_BD))
        return twisted


class Factoring(Normed):
    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
        return super().forward(columns, dense_BD) + torch.linalg.qr(columns["second"])[0].sum((1, 2))[:, None]


@pytest.mark.parametrize(("kind", "operator"), [(Twisting, "elasticrec_tests.twist"), (Factoring, "aten.linalg_qr")])
def test_an_operator_that_onnx_does_not_have_is_named(make_job: MakeJob, kind: type[Model], operator: str) -> None:
    scorer, flat = make(make_job, kind(Shape(3, 0, 1), Options(DIM, ())))
    with pytest.raises(ModelError) as caught:
        export_graph(scorer, flat.tensors)
    assert str(caught.value) == f"model: cannot be exported to ONNX: operator `{operator}` is not supported by ONNX"


def test_a_branch_on_values_is_named_by_its_line(make_job: MakeJob) -> None:
    scorer, flat = make(make_job, Branching(Shape(3, 0, 1), Options(DIM, ())))
    with pytest.raises(
        ModelError, match=rf"ONNX: {re.escape(__file__)}:\d+: `forward` branches on tensor values"
    ) as caught:
        export_graph(scorer, flat.tensors)
    line = int(str(caught.value).split(f"{__file__}:")[1].split(":")[0])
    assert "if logits.sum() > 0" in Path(__file__).read_text().splitlines()[line - 1]


@pytest.mark.parametrize("kind", sorted(ZOO))
def test_selected_labels_keep_their_scores(make_job: MakeJob, tmp_path: Path, kind: str) -> None:
    sequences = (Sequence(3, 2, 0),) if kind == "din" else ()
    model = ZOO[kind](Shape(5, 1, 3, sequences), Options(DIM, (6, 5)))
    scorer, flat = make(make_job, model)
    # a negative rate scales the other labels by the click
    scorer.negative_rate = 0.3
    path = write(tmp_path / "1", export_graph(scorer, flat.tensors, (2, 0)), flat)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch_size in BATCH_SIZES:
        tensors = inputs(model, batch_size)
        with torch.inference_mode():
            expected = scorer(tensors["pooled"], tensors["dense"])[:, [2, 0]]
        (scores,) = session.run(["scores"], {name: tensor.numpy() for name, tensor in tensors.items()})
        np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)
        assert scores.shape == (batch_size, 2)


class Tasks(Model):
    """A user's model of several labels over a sequence, with attention and a mask."""

    def __init__(self, shape: Shape, options: Options) -> None:
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        self.attention = nn.MultiheadAttention(options.dim, 1, batch_first=True)
        self.gru = nn.Linear(options.dim, options.dim)
        self.towers = nn.ModuleList([nn.Linear(2 * options.dim, 1) for _ in range(shape.num_labels)])

    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
        deep = columns["deep"]
        (sequence,) = self.shape.sequences
        history = deep[:, sequence.first : sequence.first + sequence.length]
        query = deep[:, :1]
        mask = torch.cat([torch.zeros(deep.shape[0], 1, dtype=torch.bool), (history == 0).all(2)[:, 1:]], 1)
        attended, _ = self.attention(query, history, history, key_padding_mask=mask)
        both = torch.cat([attended[:, 0], torch.tanh(self.gru(query[:, 0]))], 1)
        return torch.cat([tower(both) for tower in self.towers], 1)


class Counting(Normed):
    def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
        return super().forward(columns, dense_BD) + torch.zeros(len(columns["first"]), 1)


def test_a_graph_with_a_fixed_batch_size_is_rejected(make_job: MakeJob) -> None:
    scorer, flat = make(make_job, Counting(Shape(3, 0, 1), Options(DIM, ())))
    with pytest.raises(ModelError, match=r"`forward` fixes the number of samples; use `x\.shape\[0\]`, not `len\(x\)`"):
        export_graph(scorer, flat.tensors)


def test_a_custom_model_of_several_labels_over_a_sequence(make_job: MakeJob, tmp_path: Path) -> None:
    shape = Shape(6, 0, 2, (Sequence(2, 4, 0),))
    assert shape.sequences[0].length == 4
    scorer, flat = make(make_job, Tasks(shape, Options(4, ())))
    scorer.eval()
    path = write(tmp_path / "1", export_graph(scorer, flat.tensors), flat)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch_size in BATCH_SIZES:
        pooled = inputs(scorer.model, batch_size)["pooled"]
        pooled[:, 4:] = 0
        with torch.inference_mode():
            expected = scorer(pooled, torch.zeros(batch_size, 0))
        (scores,) = session.run(["scores"], {"pooled": pooled.numpy()})
        np.testing.assert_allclose(scores, expected.numpy(), atol=1e-5)
