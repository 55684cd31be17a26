"""Clients of Paddle Serving, ElasticCTR and Cube get the scores and rows of a model from `elasticrec serve`."""

import base64
import json
import struct
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest

from elasticrec import _core
from elasticrec.serving.process import ServerProcess
from support.baidu import (
    DICT,
    GENERAL_MODEL,
    Connection,
    field,
    of,
    packed,
    paddle_json,
    paddle_request,
    paddle_scores,
    post,
    slots_of,
)
from support.harness import odd_lines, serving, succeed, write_job

pytestmark = pytest.mark.slow

NUM_SAMPLES = 200
TOLERANCE = 1e-6


class ServedModel(NamedTuple):
    """A served model, and samples with their scores by `predict`."""

    server: ServerProcess
    directory: Path
    lines: list[bytes]
    scores: np.ndarray


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("services")
    write_job(directory, format="slots", kind="wide_deep", samples=2000)
    succeed("train", "job.yaml", cwd=directory)
    succeed("publish", "tiny", cwd=directory)
    (part,) = (directory / "data/20260101/01").glob("*.txt")
    lines = odd_lines(part.read_bytes().splitlines(), "slots", NUM_SAMPLES)
    (directory / "samples.txt").write_bytes(b"".join(lines))
    text = succeed("predict", "samples.txt", "--model", "models/tiny", cwd=directory)
    scores = np.array([float(line) for line in text.splitlines()])
    assert len(np.unique(scores.round(6))) > NUM_SAMPLES / 3, "equal scores would prove nothing"
    with serving("models/tiny", cwd=directory) as server:
        yield ServedModel(server, directory, lines, scores)


def assert_scores(got: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(np.array(got), expected, atol=TOLERANCE, rtol=0)


def test_paddle_over_http(served: ServedModel) -> None:
    url = f"{served.server.url}/GeneralModelService/inference"
    status, body = post(url, paddle_json(served.lines, 7))
    answer = json.loads(body)
    assert (status, answer["err_no"], answer["err_msg"], answer["log_id"]) == (200, 0, "", 7)
    (tensor,) = answer["outputs"][0]["tensor"]
    assert (tensor["name"], tensor["shape"]) == ("click", [NUM_SAMPLES, 1])
    assert answer["outputs"][0]["engine_name"] == "tiny/1"
    assert_scores(tensor["float_data"], served.scores)
    status, body = post(url, paddle_request(served.lines, 7, ["click"]), "application/proto")
    assert status == 200
    assert_scores(paddle_scores(body, 7)["click"], served.scores)
    status, body = post(url, {"tensor": [{"name": "none", "shape": [1, 0]}], "log_id": 8})
    expected = {"outputs": [], "log_id": 8, "err_no": -5000, "err_msg": "tensor[0]: unknown slot `none`"}
    assert (status, json.loads(body)) == (400, expected)


def test_paddle_over_grpc(served: ServedModel) -> None:
    with grpc.insecure_channel(served.server.address) as channel:
        for method in ("inference", "debug"):
            call = channel.unary_unary(f"/{GENERAL_MODEL}/{method}")
            response = call(paddle_request(served.lines, 9), timeout=60)
            assert_scores(paddle_scores(response, 9)["click"], served.scores)
        refused = call(paddle_request(served.lines, 9, ["prob"]), timeout=60)
        assert of(refused, 5) == [2**64 - 5000]
        assert of(refused, 6) == [b"fetch_var_names: unknown output `prob`, expected one of `click`"]
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(f"/{GENERAL_MODEL}/train")(b"", timeout=60)
        assert error.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_paddle_over_brpc_with_calls_in_flight(served: ServedModel) -> None:
    with Connection(served.server.address) as connection:
        parts = [served.lines[at : at + 7] for at in range(0, NUM_SAMPLES, 7)]
        for number, part in enumerate(parts):
            connection.send(GENERAL_MODEL, "inference", number, paddle_request(part, number + 1))
        answers = {answer.id: answer for answer in (connection.read() for _ in parts)}
        scores = [
            score for id, answer in sorted(answers.items()) for score in paddle_scores(answer.message, id + 1)["click"]
        ]
        assert_scores(scores, served.scores)
        unknown = connection.call(GENERAL_MODEL, "train", b"")
        assert (unknown.code, unknown.id) == (1002, 1)
        assert connection.call("Unknown", "x", b"").code == 1001
        assert connection.call("DictService", "seek", b"\xff").code == 1003


def test_elasticctr(served: ServedModel) -> None:
    instances = []
    for line in served.lines:
        slots = [{"slot_name": name, "feasigns": signs} for name, (signs, _) in slots_of([line]).items()]
        instances.append({"slots": slots})
    url = f"{served.server.url}/ElasticCTRPredictionService/inference"
    status, body = post(url, {"instances": instances})
    answer = json.loads(body)
    assert (status, answer["err_code"], answer["err_msg"]) == (200, 0, "")
    assert_scores([prediction["prob1"] for prediction in answer["predictions"]], served.scores)
    assert_scores([prediction["prob0"] for prediction in answer["predictions"]], 1 - served.scores)
    status, body = post(url, {"instances": [{"slots": [{"slot_name": "none"}]}]})
    expected = {"predictions": [], "err_code": -5000, "err_msg": "instances[0]: unknown slot `none`"}
    assert (status, json.loads(body)) == (400, expected)


def test_rows_in_the_format_of_cube(served: ServedModel) -> None:
    distinct = {sign for signs, _ in slots_of(served.lines).values() for sign in signs}
    signs = np.array(sorted(distinct), np.uint64)
    view = _core.CubeView([str(path) for path in sorted((served.directory / "models/tiny/1/cube").iterdir())])
    rows, is_there = view.lookup(signs)
    assert 0 < is_there.sum() < len(signs)
    expected = [(0, row.tobytes()) if there else (2**32 - 1, b"") for row, there in zip(rows, is_there, strict=True)]
    status, body = post(f"{served.server.url}/DictService/seek", {"keys": signs.tolist(), "version_required": True})
    answer = json.loads(body)
    values = [(value["status"], base64.b64decode(value["value"])) for value in answer["values"]]
    assert (status, answer["version"], values) == (200, "1", expected)
    with Connection(served.server.address) as connection:
        # proto2 does not pack the keys.
        unpacked = b"".join(field(1, int(sign)) for sign in signs) + field(2, 1)
        for message in (unpacked, packed(1, signs.tolist()) + field(2, 1)):
            found = connection.call(DICT, "seek", message)
            assert (found.code, of(found.message, 2)) == (0, [b"1"])
            assert [(of(value, 1)[0], of(value, 2)[0]) for value in of(found.message, 1)] == expected


def test_answers_are_counted(served: ServedModel) -> None:
    with Connection(served.server.address) as connection:
        assert connection.call(GENERAL_MODEL, "inference", paddle_request(served.lines[:1], 1)).code == 0
    with urllib.request.urlopen(f"{served.server.url}/metrics", timeout=60) as response:
        metrics = response.read().decode()
    assert 'elasticrec_serve_requests_total{protocol="brpc",code="0"}' in metrics


def test_strings_and_dense_columns(tmp_path: Path) -> None:
    """Criteo rows: a tensor of text per category, and one tensor of all numbers."""
    write_job(tmp_path, format="criteo", kind="dnn", samples=1000)
    succeed("train", "job.yaml", cwd=tmp_path)
    succeed("publish", "tiny", cwd=tmp_path)
    (part,) = (tmp_path / "data/20260101/01").glob("*.txt")
    rows = [line.split("\t") for line in part.read_text().splitlines()]
    # A tensor cannot have missing numbers.
    rows = [[row[0], *(number or "0" for number in row[1:14]), *row[14:]] for row in rows[:NUM_SAMPLES]]
    (tmp_path / "samples.txt").write_text("".join("\t".join(row) + "\n" for row in rows))
    text = succeed("predict", "samples.txt", "--model", "models/tiny", cwd=tmp_path)
    expected = np.array([float(line) for line in text.splitlines()])
    tensors: list[dict[str, Any]] = [
        {"data": [row[13 + at] for row in rows], "elem_type": 20, "alias_name": f"C{at}", "shape": [len(rows), 1]}
        for at in range(1, 27)
    ]
    numbers = [float(number) for row in rows for number in row[1:14]]
    content = base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
    dense: dict[str, Any] = {"elem_type": 1, "alias_name": "dense_input", "shape": [len(rows), 13]}
    with serving("models/tiny", cwd=tmp_path) as server:
        for values in ({"float_data": numbers}, {"tensor_content": content}):
            status, body = post(f"{server.url}/GeneralModelService/inference", {"tensor": [*tensors, dense | values]})
            assert status == 200, body
            assert_scores(json.loads(body)["outputs"][0]["tensor"][0]["float_data"], expected)


def test_every_protocol_requires_the_token(served: ServedModel) -> None:
    env = {"TEST_TOKEN": "s3cret"}
    settings = ["--set", "serve.token=${TEST_TOKEN}"]
    message = paddle_request(served.lines[:1], 1)
    with serving("models/tiny", *settings, cwd=served.directory, env=env) as server:
        assert post(f"{server.url}/GeneralModelService/inference", message, "application/proto")[0] == 401
        with Connection(server.address) as connection:
            assert connection.call(GENERAL_MODEL, "inference", message).code == 1004
        with Connection(server.address, token="s3cret") as connection:
            assert connection.call(GENERAL_MODEL, "inference", message).code == 0
        with grpc.insecure_channel(server.address) as channel:
            call = channel.unary_unary(f"/{GENERAL_MODEL}/inference")
            with pytest.raises(grpc.RpcError) as error:
                call(message, timeout=60)
            assert error.value.code() == grpc.StatusCode.UNAUTHENTICATED
            paddle_scores(call(message, timeout=60, metadata=[("authorization", "Bearer s3cret")]), 1)
