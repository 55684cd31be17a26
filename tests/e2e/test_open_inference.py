"""The Open Inference Protocol with third-party clients: HTTP and gRPC, all forms of tensors, clear errors."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from elasticrec import _core
from elasticrec.serving.process import ServerProcess
from support.harness import instance_of, odd_lines, serving, succeed, write_job

pytestmark = pytest.mark.slow

NUM_SAMPLES = 300
TOLERANCE = 1e-6
TOKEN = "a-token-of-the-tests"
GUIDE = Path(__file__).parents[2] / "docs/guide/tensors.md"


@dataclass(frozen=True)
class ServedModel:
    """A served model, and samples with their scores by `elasticrec predict`."""

    server: ServerProcess
    format: str
    instances: list[dict[str, Any]]
    scores: np.ndarray

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the samples as tensors by name."""
        if self.format == "slots":
            tensors = {}
            for slot in map(str, range(8)):
                rows = [instance.get(slot, []) for instance in self.instances]
                tensors[slot] = np.array([sign for row in rows for sign in row], dtype=np.uint64)
                tensors[f"{slot}.lengths"] = np.array([len(row) for row in rows], dtype=np.int32)
            return tensors
        text = {
            f"C{at}": np.array([instance.get(f"C{at}", "") for instance in self.instances], dtype=object)
            for at in range(1, 27)
        }
        # A missing number reads as zero.
        dense = [[instance.get(f"I{at}", 0.0) for at in range(1, 14)] for instance in self.instances]
        return text | {"dense": np.array(dense, dtype=np.float32)}


def samples(directory: Path, format: str) -> list[bytes]:
    (part,) = (directory / "data/20260101/01").glob("*.txt")
    return odd_lines(part.read_bytes().splitlines(), format, NUM_SAMPLES)


@pytest.fixture(scope="module", params=["slots", "criteo"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    directory = tmp_path_factory.mktemp(request.param)
    write_job(directory, format=request.param, kind="wide_deep", samples=2000)
    succeed("train", "job.yaml", cwd=directory)
    succeed("publish", "tiny", cwd=directory)
    lines = samples(directory, request.param)
    (directory / "samples.txt").write_bytes(b"".join(lines))
    printed = succeed("predict", "samples.txt", "--model", "models/tiny", cwd=directory)
    scores = np.array([float(line) for line in printed.splitlines()])
    assert len(np.unique(scores.round(6))) > NUM_SAMPLES / 3
    with serving("models/tiny", cwd=directory) as server:
        yield ServedModel(server, request.param, [instance_of(line, request.param) for line in lines], scores)


of_slots = pytest.mark.parametrize("served", ["slots"], indirect=True)


def http_inputs(tensors: dict[str, np.ndarray], **options: Any) -> list[Any]:
    return inputs(tritonclient.http, tensors, **options)


def grpc_inputs(tensors: dict[str, np.ndarray]) -> list[Any]:
    return inputs(tritonclient.grpc, tensors)


def inputs(module: Any, tensors: dict[str, np.ndarray], **options: Any) -> list[Any]:
    made = []
    for name, values in tensors.items():
        made.append(module.InferInput(name, list(values.shape), np_to_triton_dtype(values.dtype)))
        made[-1].set_data_from_numpy(values, **options)
    return made


@pytest.fixture
def http(served: ServedModel) -> Iterator[Any]:
    with tritonclient.http.InferenceServerClient(served.server.address) as client:
        yield client


@pytest.fixture
def rpc(served: ServedModel) -> Iterator[Any]:
    with tritonclient.grpc.InferenceServerClient(served.server.address) as client:
        yield client


def check(answer: Any, served: ServedModel) -> None:
    scores = answer.as_numpy("click")
    assert scores.dtype == np.float32 and scores.shape == (NUM_SAMPLES,)
    np.testing.assert_allclose(scores, served.scores, atol=TOLERANCE, rtol=0)


def test_the_server_and_its_models_are_described(served: ServedModel, http: Any, rpc: Any) -> None:
    for client in (http, rpc):
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready("tiny") and client.is_model_ready("tiny", "1")
    assert not http.is_model_ready("other") and not http.is_model_ready("tiny", "2")
    assert http.get_server_metadata()["name"] == rpc.get_server_metadata(as_json=True)["name"] == "elasticrec"
    (model,) = http.get_model_repository_index()
    assert model == {"name": "tiny", "version": "1", "state": "READY"}
    (model,) = rpc.get_model_repository_index(as_json=True)["models"]
    assert model == {"name": "tiny", "version": "1", "state": "READY"}
    metadata = http.get_model_metadata("tiny")
    by_name = {tensor["name"]: (tensor["datatype"], tensor["shape"]) for tensor in metadata["inputs"]}
    if served.format == "slots":
        assert by_name["7"] == ("UINT64", [-1, -1]) and by_name["signs"] == ("UINT64", [-1, 8])
    else:
        assert by_name["C26"] == ("BYTES", [-1, -1]) and by_name["I1"] == ("FP32", [-1, 1])
        assert by_name["signs"] == ("UINT64", [-1, 26]) and by_name["dense"] == ("FP32", [-1, 13])
    assert metadata["outputs"] == [{"name": "click", "datatype": "FP32", "shape": [-1]}]
    described = rpc.get_model_metadata("tiny", "1")
    assert {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in described.inputs} == by_name
    assert list(described.versions) == ["1"]


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_scores_over_http_are_those_of_predict(
    served: ServedModel, http: Any, binary_in: bool, binary_out: bool
) -> None:
    outputs = [tritonclient.http.InferRequestedOutput("click", binary_data=binary_out)]
    tensors = served.tensors()
    answer = http.infer("tiny", http_inputs(tensors, binary_data=binary_in), outputs=outputs, request_id="77")
    check(answer, served)
    response = answer.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("77", "tiny", "1")
    assert ("data" in response["outputs"][0]) is not binary_out


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests_and_answers(served: ServedModel, http: Any, algorithm: str) -> None:
    answer = http.infer(
        "tiny",
        http_inputs(served.tensors()),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    check(answer, served)


def test_scores_over_grpc_are_those_of_predict(served: ServedModel, rpc: Any) -> None:
    tensors = served.tensors()
    answer = rpc.infer("tiny", grpc_inputs(tensors), request_id="77")
    check(answer, served)
    response = answer.get_response()
    assert (response.id, response.model_name, response.model_version) == ("77", "tiny", "1")
    outputs = [tritonclient.grpc.InferRequestedOutput("click")]
    check(rpc.infer("tiny", grpc_inputs(tensors), "1", outputs=outputs, compression_algorithm="gzip"), served)


@of_slots
def test_typed_contents_are_accepted(served: ServedModel) -> None:
    """Clients generated from the .proto send typed contents instead of raw ones."""
    messages = tritonclient.grpc.service_pb2
    request = messages.ModelInferRequest(model_name="tiny")
    for name, values in served.tensors().items():
        tensor = request.inputs.add(name=name, datatype=np_to_triton_dtype(values.dtype), shape=values.shape)
        contents = tensor.contents.int_contents if name.endswith(".lengths") else tensor.contents.uint64_contents
        contents.extend(values.tolist())
    with grpc.insecure_channel(served.server.address) as channel:
        stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer, call = stub.ModelInfer.with_call(request, metadata=[("elasticrec-timing", "1")], timeout=60)
    scores = np.frombuffer(answer.raw_output_contents[0], dtype=np.float32)
    np.testing.assert_allclose(scores, served.scores, atol=TOLERANCE, rtol=0)
    metadata = dict(call.initial_metadata())
    assert metadata["elasticrec-version"] == "1" and metadata["server-timing"].startswith("queue;dur=")


def test_asyncio_clients(served: ServedModel) -> None:
    async def ask(module: Any) -> Any:
        async with module.InferenceServerClient(served.server.address) as client:
            assert await client.is_server_ready()
            return await client.infer("tiny", inputs(module, served.tensors()))

    for module in (tritonclient.http.aio, tritonclient.grpc.aio):
        check(asyncio.run(ask(module)), served)


def test_one_tensor_of_signs_equals_a_tensor_per_slot(served: ServedModel, http: Any, rpc: Any) -> None:
    rng = np.random.default_rng(5)
    if served.format == "slots":
        known = [[sign for instance in served.instances for sign in instance.get(str(slot), [])] for slot in range(8)]
        signs = np.stack([rng.choice(np.array(signs, dtype=np.uint64), 20) for signs in known], axis=1)
        per_slot = {str(slot): np.ascontiguousarray(signs[:, slot]) for slot in range(8)}
        equal_inputs = [{"signs": signs}, {"signs": signs.view(np.int64)}, per_slot]
    else:
        text = [[f"{value:08x}" for value in row] for row in rng.integers(0, 50, (20, 26))]
        dense = {"dense": rng.random((20, 13), dtype=np.float32)}
        with urllib.request.urlopen(f"{served.server.url}/v1/models/tiny", timeout=60) as response:
            parser = _core.Parser(json.dumps(json.load(response)["features"]))
        hashed = [[parser.sign(f"C{at}", value.encode()) for at, value in enumerate(row, 1)] for row in text]
        hashes = {"signs": np.array(hashed, dtype=np.uint64)}
        per_slot = {f"C{at}": np.array([[row[at - 1]] for row in text], dtype=object) for at in range(1, 27)}
        equal_inputs = [dense | hashes, dense | per_slot]
    answers = [
        client.infer("tiny", made).as_numpy("click")
        for tensors in equal_inputs
        for client, made in ((http, http_inputs(tensors)), (rpc, grpc_inputs(tensors)))
    ]
    for answer in answers:
        np.testing.assert_array_equal(answer, answers[0])
    assert len(np.unique(answers[0])) > 1


Ask = Callable[..., str]


def refusals(http: Any, rpc: Any) -> tuple[Ask, Ask]:
    """Return functions that send invalid requests and return the error and its code."""

    def over_http(model: str, tensors: dict[str, np.ndarray], version: str = "", **options: Any) -> str:
        with pytest.raises(InferenceServerException) as refused:
            http.infer(model, http_inputs(tensors), version, **options)
        return f"{refused.value.status()} {refused.value.message()}"

    def over_grpc(model: str, tensors: dict[str, np.ndarray], version: str = "", **options: Any) -> str:
        with pytest.raises(InferenceServerException) as refused:
            rpc.infer(model, grpc_inputs(tensors), version, **options)
        return f"{refused.value.status()} {refused.value.message()}"

    return over_http, over_grpc


@of_slots
def test_invalid_requests_have_clear_errors(served: ServedModel, http: Any, rpc: Any) -> None:
    over_http, over_grpc = refusals(http, rpc)
    one = {"0": np.array([5], dtype=np.uint64)}
    two = np.array([5, 6], dtype=np.uint64)
    types = "UINT64, INT64, UINT32, INT32, BYTES"
    for tensors, message in [
        ({"zz": two}, "input `zz`: unknown, expected an input of the model's metadata"),
        (one | {"1": two}, "input `1`: shape: expected 1 rows as in `0`, got 2"),
        ({"0": two.reshape(1, 1, 2)}, "input `0`: shape: expected [B] or [B, K], got [1, 1, 2]"),
        ({"0": two.astype(np.float32)}, f"input `0`: datatype: expected one of {types}, got FP32"),
        ({"0": two.astype(np.float16)}, f"input `0`: datatype: expected one of {types}, FP32, FP64, got `FP16`"),
    ]:
        assert over_http("tiny", tensors) == f"400 {message}"
        assert over_grpc("tiny", tensors) == f"StatusCode.INVALID_ARGUMENT {message}"
    for model, version, message in [
        ("other", "", "unknown model `other`, expected one of `tiny`"),
        ("tiny", "7", "model `tiny`: no version 7, the current one is 1"),
    ]:
        assert over_http(model, one, version) == f"404 {message}"
        assert over_grpc(model, one, version) == f"StatusCode.NOT_FOUND {message}"
    unknown = "outputs: unknown output `likes`, expected one of `click`"
    assert over_http("tiny", one, outputs=[tritonclient.http.InferRequestedOutput("likes")]) == f"400 {unknown}"
    error = over_grpc("tiny", one, outputs=[tritonclient.grpc.InferRequestedOutput("likes")])
    assert error == f"StatusCode.INVALID_ARGUMENT {unknown}"
    many = {"0": np.ones(10_001, dtype=np.uint64)}
    assert over_http("tiny", many) == "413 expected at most 10000 instances in a request, got more"
    assert over_grpc("tiny", many) == "StatusCode.OUT_OF_RANGE expected at most 10000 instances in a request, got more"


@of_slots
def test_an_expired_deadline_is_an_error(served: ServedModel, rpc: Any) -> None:
    large = {"signs": np.arange(80_000, dtype=np.uint64).reshape(10_000, 8)}
    with pytest.raises(InferenceServerException) as late:
        rpc.infer("tiny", grpc_inputs(large), client_timeout=0.0001)
    assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert rpc.infer("tiny", grpc_inputs(large)).as_numpy("click").shape == (10_000,)


@of_slots
def test_streams_are_refused_as_unimplemented(served: ServedModel) -> None:
    messages = tritonclient.grpc.service_pb2
    with grpc.insecure_channel(served.server.address) as channel:
        stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.ModelStreamInfer(iter([messages.ModelInferRequest()]), timeout=60))
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "ModelStreamInfer, expected one of ServerLive" in refused.value.details()


def test_a_token_is_sent_as_metadata(tmp_path: Path) -> None:
    write_job(tmp_path, format="slots", kind="lr", samples=500, serve__token="${TEST_TOKEN}")
    succeed("train", "job.yaml", cwd=tmp_path, env={"TEST_TOKEN": TOKEN})
    succeed("publish", "tiny", cwd=tmp_path, env={"TEST_TOKEN": TOKEN})
    with serving("models/tiny", "--job", "job.yaml", cwd=tmp_path, env={"TEST_TOKEN": TOKEN}) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = tritonclient.grpc.service_pb2_grpc.GRPCInferenceServiceStub(channel)
            request = tritonclient.grpc.service_pb2.ModelMetadataRequest(name="tiny")
            for metadata in ([], [("authorization", "Bearer wrong")]):
                with pytest.raises(grpc.RpcError) as refused:
                    stub.ModelMetadata(request, metadata=metadata, timeout=60)
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            answer = stub.ModelMetadata(request, metadata=[("authorization", f"Bearer {TOKEN}")], timeout=60)
            assert answer.name == "tiny"
            # Probes need no token.
            live = stub.ServerLive(tritonclient.grpc.service_pb2.ServerLiveRequest(), timeout=60)
            assert live.live
            check_health = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check_health(b"", timeout=60) == b"\x08\x01"


@of_slots
@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL))
def test_the_examples_of_the_guide_run(served: ServedModel, block: str) -> None:
    code = block.replace("127.0.0.1:8500", served.server.address).replace('"demo"', '"tiny"')
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["scores"].dtype == np.float32 and np.isfinite(names["scores"]).all()
    names["client"].close()


@of_slots
def test_the_json_of_the_guide_is_answered(served: ServedModel) -> None:
    (body,) = re.findall(r"/infer -d '(.*?)'", GUIDE.read_text(), re.DOTALL)
    request = urllib.request.Request(f"{served.server.url}/v2/models/tiny/infer", body.encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        answer = json.load(response)
    (shown,) = re.findall(r"```json\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    shown = json.loads(shown)
    assert answer.keys() == shown.keys() and answer["model_version"] == shown["model_version"]
    assert answer["outputs"][0].keys() == shown["outputs"][0].keys()
    assert answer["outputs"][0]["shape"] == shown["outputs"][0]["shape"] == [len(shown["outputs"][0]["data"])]
