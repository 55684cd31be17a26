"""TLS and tokens for HTTP and gRPC: required for access from other machines."""

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import trustme
from tritonclient.utils import InferenceServerException

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.repository.repository import Repository
from elasticrec.serving.client import Client
from elasticrec.serving.process import ServerProcess
from support.harness import elasticrec, serving
from support.request_threads import score_of
from support.store import MODEL, publish

pytestmark = pytest.mark.slow

TOKEN = "s3cret-of-the-test"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a model, a certificate and a token."""
    directory = tmp_path_factory.mktemp("tls")
    (directory / "models" / MODEL).mkdir(parents=True)
    repository = Repository.open(directory / "models", MODEL)
    repository.offer(publish(repository).number)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "ca.pem"))
    trustme.CA().cert_pem.write_to_path(str(directory / "other-ca.pem"))
    own = authority.issue_cert("127.0.0.1", "localhost")
    own.private_key_pem.write_to_path(str(directory / "key.pem"))
    for number, part in enumerate(own.cert_chain_pems):
        part.write_to_path(str(directory / "cert.pem"), append=number > 0)
    (directory / "token").write_text(TOKEN)
    return directory


SECURE = ("serve.tls.cert=cert.pem", "serve.tls.key=key.pem", "serve.token=file:token")


def options(*settings: str) -> tuple[str, ...]:
    return tuple(part for setting in settings for part in ("--set", setting))


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    with serving(f"models/{MODEL}", *options(*SECURE), cwd=directory, log=directory / "serve.log") as server:
        assert server.url.startswith("https://")
        yield server
    assert TOKEN not in (directory / "serve.log").read_text()


def test_http_over_tls(directory: Path, server: ServerProcess) -> None:
    with Client(server.url, token=TOKEN, ca=directory / "ca.pem") as client:
        assert client.predict([{"0": 1}]).item() == score_of(1)
    with Client(server.url, MODEL, token="wrong", ca=directory / "ca.pem") as client:
        with pytest.raises(UnavailableError, match="401: authorization: expected `Bearer TOKEN`"):
            client.predict([{"0": 1}])
    with Client(server.url, MODEL, token=TOKEN, ca=directory / "other-ca.pem", retries=0) as client:
        with pytest.raises((UnavailableError, ConfigError), match="certificate"):
            client.predict([{"0": 1}])
    with Client(server.url.replace("https", "http"), MODEL, token=TOKEN, retries=0) as client:
        with pytest.raises(UnavailableError, match="expected https"):
            client.predict([{"0": 1}])


def test_grpc_over_tls(directory: Path, server: ServerProcess) -> None:
    def ask(token: str) -> float:
        with triton_grpc.InferenceServerClient(
            server.address.replace("127.0.0.1", "localhost"), ssl=True, root_certificates=str(directory / "ca.pem")
        ) as client:
            signs = triton_grpc.InferInput("0", [1], "UINT64")
            signs.set_data_from_numpy(np.array([1], np.uint64))
            answer = client.infer(MODEL, [signs], headers={"authorization": f"Bearer {token}"})
            return float(answer.as_numpy("click")[0])

    assert ask(TOKEN) == score_of(1)
    with pytest.raises(InferenceServerException, match="UNAUTHENTICATED"):
        ask("wrong")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_clients_of_both_versions_of_tls(directory: Path, server: ServerProcess, version: ssl.TLSVersion) -> None:
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as plain:
        with context.wrap_socket(plain, server_hostname=host) as inside:
            assert inside.selected_alpn_protocol() == "h2"


def test_unencrypted_brpc_is_not_answered(server: ServerProcess) -> None:
    host, _, port = server.address.rpartition(":")
    with socket.create_connection((host, int(port)), 60) as connection:
        connection.sendall(b"PRPC" + bytes(8))
        # A TLS alert, or nothing.
        assert not connection.recv(100).startswith(b"PRPC")


def test_other_machines_need_tls_and_a_token(directory: Path) -> None:
    def refusal(*settings: str) -> str:
        result = elasticrec("serve", f"models/{MODEL}", *options("serve.host=0.0.0.0", *settings), cwd=directory)
        assert result.returncode == 2, result.stderr
        return str(result.stderr)

    assert "expected a loopback address such as 127.0.0.1 (other hosts need `token` and `tls.cert`, or" in refusal()
    assert "(other hosts need `tls.cert`, or" in refusal("serve.token=file:token")
    assert "(other hosts need `token`, or" in refusal(*SECURE[:2])
    assert "no such file" in refusal("serve.tls.cert=none.pem", *SECURE[1:])
    with serving(f"models/{MODEL}", *options("serve.host=0.0.0.0", *SECURE), cwd=directory) as server:
        assert server.address.startswith("0.0.0.0:")
