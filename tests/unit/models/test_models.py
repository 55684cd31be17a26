"""The models against naive loops over their formulas."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from elasticrec.models import ZOO, Model, Options, Sequence, Shape
from elasticrec.training.embedding import split_columns

Array = npt.NDArray[np.float64]

DIM = 3
HIDDEN = (5, 4)
CROSS_LAYERS = 2
OPTIONS = Options(DIM, HIDDEN, CROSS_LAYERS, experts=3, expert_hidden=(4, 3), attention_hidden=(5,))
SHAPES = [Shape(num_slots=4, num_dense=2, num_labels=1), Shape(4, 0, 1), Shape(2, 3, 3), Shape(1, 0, 2)]
# two plain slots and a sequence of length 3; two sequences with one target, in the middle and at the end
SEQUENCES = [
    Shape(5, 2, 1, (Sequence(first=2, length=3, target=1),)),
    Shape(8, 0, 2, (Sequence(1, 2, 3), Sequence(5, 3, 3))),
]


def naive_mlp(weights: dict[str, Array], inputs: Array, name: str = "deep") -> Array:
    """Compute linear layers with max(0, x) between them, neuron by neuron."""
    layers = sorted({int(key.removeprefix(f"{name}.").split(".")[0]) for key in weights if key.startswith(f"{name}.")})
    values = inputs
    for layer in layers:
        matrix, bias = weights[f"{name}.{layer}.weight"], weights[f"{name}.{layer}.bias"]
        sums = []
        for neuron in range(len(bias)):
            total = bias[neuron]
            for weight, value in zip(matrix[neuron], values, strict=True):
                total += weight * value
            sums.append(total if layer == layers[-1] else max(total, 0.0))
        values = np.array(sums)
    return values


def naive_dnn(weights: dict[str, Array], rows: Array, dense: Array, shape: Shape) -> Array:
    return naive_mlp(weights, np.array([*[value for slot in rows for value in slot], *dense]))


def naive_wide_deep(weights: dict[str, Array], rows: Array, dense: Array, shape: Shape) -> Array:
    logits = naive_mlp(weights, np.array([*[value for slot in rows for value in slot[shape.num_labels :]], *dense]))
    for label in range(shape.num_labels):
        for slot in rows:
            logits[label] += slot[label]
        if shape.num_dense:
            logits[label] += weights["wide.bias"][label]
            for at, value in enumerate(dense):
                logits[label] += weights["wide.weight"][label, at] * value
    return logits


def naive_linear(weights: dict[str, Array], rows: Array, dense: Array, shape: Shape) -> Array:
    logits = weights["linear.bias"].copy()
    for label in range(shape.num_labels):
        for slot in rows:
            logits[label] += slot[label]
        for at, value in enumerate(dense):
            logits[label] += weights["linear.dense.weight"][label, at] * value
    return logits


def naive_fm(weights: dict[str, Array], rows: Array, dense: Array, shape: Shape) -> Array:
    logits = naive_linear(weights, rows, dense, shape)
    for label in range(shape.num_labels):
        first = shape.num_labels + label * DIM
        for i in range(len(rows)):
            for j in range(i + 1, len(rows)):
                for at in range(first, first + DIM):
                    logits[label] += rows[i][at] * rows[j][at]
    return logits


def naive_deepfm(weights: dict[str, Array], rows: Array, dense: Array, shape: Shape) -> Array:
    inputs = np.array([*[value for slot in rows for value in slot[shape.num_labels :]], *dense])
    return naive_fm(weights, rows, dense, shape) + naive_mlp(weights, inputs)


def naive_dcn_v2(weights: dict[str, Array], rows: Array, dense: Array, shape: Shape) -> Array:
    start = np.array([*[value for slot in rows for value in slot], *dense])
    x = start.copy()
    for layer in range(CROSS_LAYERS):
        matrix, bias = weights[f"cross.{layer}.weight"], weights[f"cross.{layer}.bias"]
        crossed = []
        for i in range(len(x)):
            total = bias[i]
            for j in range(len(x)):
                total += matrix[i, j] * x[j]
            crossed.append(start[i] * total + x[i])
        x = np.array(crossed)
    logits = naive_mlp(weights, start)
    for label in range(shape.num_labels):
        logits[label] += weights["out.bias"][label] + sum(weights["out.weight"][label, i] * x[i] for i in range(len(x)))
    return logits


def naive_mmoe(weights: dict[str, Array], rows: Array, dense: Array, shape: Shape) -> Array:
    x = np.array([*[value for slot in rows for value in slot], *dense])
    experts = [[max(value, 0.0) for value in naive_mlp(weights, x, f"experts.{i}")] for i in range(OPTIONS.experts)]
    logits = []
    for label in range(shape.num_labels):
        powers = []
        for i in range(OPTIONS.experts):
            powers.append(np.exp(sum(weights[f"gates.{label}.weight"][i, at] * x[at] for at in range(len(x)))))
        mixed = np.zeros(OPTIONS.expert_hidden[-1])
        for i in range(OPTIONS.experts):
            for at in range(len(mixed)):
                mixed[at] += powers[i] / sum(powers) * experts[i][at]
        logits.append(naive_mlp(weights, mixed, f"towers.{label}")[0])
    return np.array(logits)


def naive_din(weights: dict[str, Array], rows: Array, dense: Array, shape: Shape) -> Array:
    inputs: list[float] = []
    sequences = {sequence.first: (number, sequence) for number, sequence in enumerate(shape.sequences)}
    cell = 0
    while cell < len(rows):
        if cell not in sequences:
            inputs.extend(rows[cell])
            cell += 1
            continue
        number, sequence = sequences[cell]
        assert sequence.target is not None
        target, attended = rows[sequence.target], np.zeros(DIM)
        for e in rows[cell : cell + sequence.length]:
            activation = np.array([*e, *target, *(e - target), *(e * target)])
            attended += naive_mlp(weights, activation, f"attention.{number}")[0] * e
        inputs.extend(attended)
        cell += sequence.length
    return naive_mlp(weights, np.array([*inputs, *dense]))


NAIVE = {
    "lr": naive_linear,
    "fm": naive_fm,
    "dnn": naive_dnn,
    "wide_deep": naive_wide_deep,
    "deepfm": naive_deepfm,
    "dcn_v2": naive_dcn_v2,
    "mmoe": naive_mmoe,
    "din": naive_din,
}


def build(kind: str, shape: Shape) -> Model:
    torch.manual_seed(1)
    return ZOO[kind](shape, OPTIONS)


@pytest.mark.parametrize("shape", [*SHAPES, *SEQUENCES], ids=str)
@pytest.mark.parametrize("kind", sorted(ZOO))
def test_forward_equals_the_formula(kind: str, shape: Shape) -> None:
    model = build(kind, shape)
    width = sum(column.width for column in model.columns)
    pooled, dense = torch.randn(6, shape.num_slots, width), torch.randn(6, shape.num_dense)
    logits = model(split_columns(pooled, model.columns), dense)
    assert logits.shape == (6, shape.num_labels)
    weights = {name: tensor.numpy().astype(np.float64) for name, tensor in model.state_dict().items()}
    for row in range(6):
        expected = NAIVE[kind](weights, pooled[row].double().numpy(), dense[row].double().numpy(), shape)
        np.testing.assert_allclose(logits[row].detach().numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("kind", sorted(ZOO))
def test_every_parameter_and_column_gets_a_gradient(kind: str) -> None:
    shape = SEQUENCES[0] if kind == "din" else SHAPES[2]
    model = build(kind, shape)
    pooled = torch.randn(16, shape.num_slots, sum(column.width for column in model.columns), requires_grad=True)
    torch.autograd.backward(model(split_columns(pooled, model.columns), torch.randn(16, shape.num_dense)).sum())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    assert pooled.grad is not None
    assert (pooled.grad.abs().sum((0, 1)) > 0).all()


def test_empty_positions_of_a_sequence_do_not_change_din() -> None:
    model = build("din", SEQUENCES[0])
    pooled, dense = torch.randn(4, 5, DIM), torch.randn(4, 2)
    pooled[:, 3:] = 0
    longer = build("din", Shape(9, 2, 1, (Sequence(2, 7, 1),)))
    padded = torch.cat([pooled, torch.zeros(4, 4, DIM)], 1)
    assert torch.equal(model({"deep": pooled}, dense), longer({"deep": padded}, dense))


def test_the_columns_of_a_model() -> None:
    shape = Shape(num_slots=4, num_dense=0, num_labels=2)
    assert [(column.name, column.width, column.init) for column in build("dnn", shape).columns] == [
        ("deep", DIM, "uniform")
    ]
    assert [(column.name, column.width, column.init) for column in build("wide_deep", shape).columns] == [
        ("wide", 2, "zero"),
        ("deep", DIM, "uniform"),
    ]


def test_pooled_rows_are_split_into_named_columns() -> None:
    columns = build("wide_deep", Shape(2, 0, 1)).columns
    pooled = torch.arange(2 * 2 * 4.0).view(2, 2, 4)
    parts = split_columns(pooled, columns)
    assert torch.equal(parts["wide"], pooled[:, :, :1])
    assert torch.equal(parts["deep"], pooled[:, :, 1:])
    assert parts["deep"].data_ptr() == pooled[:, :, 1:].data_ptr()
