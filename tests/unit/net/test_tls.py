"""Traffic to other machines needs a token and TLS; TLS of the coordinator."""

import datetime
import json
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticrec import _core
from elasticrec.config import Job, parse_job
from elasticrec.coordinator.api import CoordinatorServer, ServerOptions
from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.coordinator.settings import Settings
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net import environment
from elasticrec.net.coordinator import CoordinatorClient, Term
from elasticrec.net.security import Security, local_security
from elasticrec.roles.member import ListenAddress
from elasticrec.run import Run
from support.certificates import Files, write_certificates
from support.eavesdrop import Eavesdropper
from support.fake_roles import ask_twice, plan_of


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_certificates(tmp_path_factory.mktemp("tls"))


def security_of(files: Files, token: str | None = "secret") -> Security:
    return Security(token, cert=files.cert, key=files.key)


def ask(tmp_path: Path, server: Security, client: Security, *, scheme: str = "https", **more: Any) -> int:
    """Return the term of a coordinator with security `server`, as a client with security `client` receives it."""
    settings = Settings(job="j", num_partitions=4, servers=1, plan=plan_of(tmp_path))
    with closing(Coordinator(Run(tmp_path / "run"), settings)) as coordinator:
        with CoordinatorServer(coordinator, ServerOptions(security=server)) as serving:
            url = f"{scheme}://{serving.url.partition('://')[2]}"
            with CoordinatorClient(
                url, security=client, **{"deadline_s": 60.0, "attempt_s": 60.0, **more}
            ) as connected:
                return int(connected.status()["term"])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_needs_no_security(host: str) -> None:
    Security().check_listen("ps", host)
    Security("secret").check_send("ps", host, encrypted=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org", "127.0.0.1.example.org"])
def test_other_machines_need_a_token_and_tls(files: Files, host: str) -> None:
    safe = security_of(files)
    safe.check_listen("ps", host)
    Security(insecure=True).check_listen("ps", host)
    for security, missing in (
        (replace(safe, token=None), "a token"),
        (replace(safe, token=""), "a token"),
        (replace(safe, cert=None, key=None), "TLS"),
        (Security(), "a token and TLS"),
    ):
        expected = (
            f"^ps: host: {host} is reachable from other machines: expected {missing}, `insecure: true`, or 127.0.0.1$"
        )
        with pytest.raises(ConfigError, match=expected):
            security.check_listen("ps", host)
        with pytest.raises(ConfigError, match=f"^coordinator: host: {host} is reachable from other machines"):
            ServerOptions(host, security=security).check()


def test_no_token_in_clear_text_to_other_machines() -> None:
    url = "http://10.0.0.1:7"
    expected = "^coordinator at 10.0.0.1:7: the token would go to another machine in clear text: expected TLS, or `ins"
    with pytest.raises(ConfigError, match=expected):
        CoordinatorClient(url, security=Security("secret"))
    for allowed in (Security("secret", insecure=True), Security()):
        CoordinatorClient(url, security=allowed).close()
    CoordinatorClient("https://10.0.0.1:7", security=Security("secret")).close()


def test_a_token_is_not_printed_and_must_fit_a_header() -> None:
    assert "secret" not in repr(Security("secret"))
    for token in ("a b", "a\nb", "é", "x" * 1025):
        with pytest.raises(ConfigError, match=r"^token: expected at most 1024 visible ASCII") as raised:
            Security(token)
        assert token not in str(raised.value)


def test_unusable_tls_files_are_refused(tmp_path: Path, files: Files) -> None:
    with pytest.raises(ConfigError, match=r"^tls: expected a certificate and its key, got one of them$"):
        Security(cert=files.cert)
    with pytest.raises(ConfigError, match=r"^tls: .*/none: no such file$"):
        Security(ca=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"^tls: .*: not a file$"):
        Security(ca=tmp_path)
    with pytest.raises(ConfigError, match=r"cert.pem: expected a private key in PEM, got none$"):
        ServerOptions(security=Security(cert=files.cert, key=files.cert)).check()
    other = write_certificates(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"^tls: .*key.pem: does not match the certificate in .*cert.pem$"):
        ServerOptions(security=Security(cert=files.cert, key=other.key)).check()
    with pytest.raises(ConfigError, match=r"^tls: .*key.pem: cannot be used: expected certificates in PEM$"):
        CoordinatorClient("https://127.0.0.1:7", security=Security(ca=files.key))


def test_a_coordinator_with_tls(tmp_path: Path, files: Files) -> None:
    assert ask(tmp_path, security_of(files), Security("secret", ca=files.ca)) == 1
    with pytest.raises(ConfigError, match=r"missing or wrong token$"):
        ask(tmp_path, security_of(files), Security("guess", ca=files.ca))


@pytest.mark.parametrize("has_answered", [False, True])
def test_rejected_certificates_are_reported(
    tmp_path: Path, files: Files, has_answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is immediate; a coordinator that has answered before is retried until the deadline."""
    past = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    other = write_certificates(tmp_path / "other")
    expired = write_certificates(tmp_path / "expired", not_after=past)
    elsewhere = write_certificates(tmp_path / "elsewhere", "ps-1.example.org")
    term = Term()
    more: dict[str, Any] = {"term": term, **ask_twice(monkeypatch)} if has_answered else {}
    assert term.accept(1)
    for server, ca, problem in (
        (files, other.ca, "is not signed by an authority of the `ca` file"),
        (files, None, "is not signed by an authority of the `ca` file"),
        (expired, expired.ca, "has expired"),
        (elsewhere, elsewhere.ca, "is for another host: expected `127.0.0.1`"),
    ):
        kind = UnavailableError if has_answered else ConfigError
        ending = r" \(2 attempts in 119 s\)" if has_answered else ""
        with pytest.raises(kind, match=rf"^coordinator at 127.0.0.1:\d+: its certificate {problem}{ending}$"):
            ask(tmp_path, security_of(server), Security("secret", ca=ca), **more)


def test_tls_on_one_side_only(tmp_path: Path, files: Files) -> None:
    with pytest.raises(ConfigError, match=r"\d: it speaks TLS: expected https://, got http://$"):
        ask(tmp_path, security_of(files), Security("secret"), scheme="http")
    with pytest.raises(ConfigError, match=r"\d: expected TLS, got something else: TLS is off at the other end$"):
        ask(tmp_path, Security("secret"), Security("secret", ca=files.ca))
    with pytest.raises(ConfigError, match=r"\d: expected https:// with a `ca` file, got http://$"):
        ask(tmp_path, Security("secret"), Security("secret", ca=files.ca), scheme="http")


def job_of(tmp_path: Path, **ps: Any) -> Job:
    raw = {"name": "n", "data": {"format": "criteo", "train": "."}, "train": {"ps": ps}}
    return parse_job(raw, base=tmp_path)


def test_options_of_a_role_override_its_job(tmp_path: Path, files: Files) -> None:
    named = {"cert": str(files.cert), "key": str(files.key), "ca": str(files.ca)}
    job = job_of(tmp_path, tls=named, insecure=True)
    all_files: dict[str, Path | None] = {"cert": None, "key": None, "ca": None}
    assert Security.of(job, "t", all_files) == Security("t", files.cert, files.key, files.ca, insecure=True)
    assert Security.of(job, "", {"ca": None}) == Security(None, ca=files.ca, insecure=True)
    other = write_certificates(tmp_path / "other")
    given = Security.of(job_of(tmp_path, tls=named), "", all_files | {"ca": other.ca})
    assert given == Security(None, files.cert, files.key, other.ca)
    # a trainer needs no certificate and may run on a machine without one
    missing = job_of(tmp_path, tls=named | {"cert": "none.pem", "key": "none.key"})
    assert Security.of(missing, "", {"ca": None}) == Security(ca=files.ca)


@pytest.mark.parametrize("key", ["cert", "key"])
def test_a_job_with_a_certificate_but_no_key(tmp_path: Path, key: str) -> None:
    missing = "key" if key == "cert" else "cert"
    with pytest.raises(ConfigError, match=rf"train.ps.tls: `{missing}`: expected a certificate and its key"):
        job_of(tmp_path, tls={key: "a.pem"})


def test_roles_get_only_the_variables_of_their_launcher(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PORT": "7", "HOST": "0.0.0.0", "INSECURE": "1", "INDEX": "3", "OTHER": "kept"}.items():
        monkeypatch.setenv(f"ELASTICREC_{name}", value)
    job = job_of(Path("/"))
    assert local_security(job, "t") == Security("t")
    for name, value in files.environment().items():
        monkeypatch.setenv(name, value)
    assert local_security(job, "t") == Security("t", files.cert, files.key, files.ca)
    variables = environment.with_role_variables({environment.TOKEN: "t", environment.TLS_CERT: None})
    ours = {name: value for name, value in variables.items() if name.startswith("ELASTICREC_")}
    assert ours == {"ELASTICREC_OTHER": "kept", "ELASTICREC_TOKEN": "t"}
    monkeypatch.delenv(environment.TLS_CA)
    with pytest.raises(ConfigError, match=r"^tls: expected a certificate, its key and the `ca` that signed it"):
        local_security(job, "t")


def test_the_advertised_address_of_a_server() -> None:
    loopback, everywhere = ListenAddress(), ListenAddress("0.0.0.0", advertise="ps-1.example.org")
    loopback.check(Security())
    everywhere.check(Security(insecure=True))
    assert loopback.address == "127.0.0.1:0" and loopback.announced_address("127.0.0.1:7") == "127.0.0.1:7"
    assert everywhere.address == "0.0.0.0:0" and everywhere.announced_address("0.0.0.0:7") == "ps-1.example.org:7"
    assert ListenAddress("::1", 7).address == "[::1]:7"
    assert ListenAddress("::", advertise="fe80::1").announced_address("[::]:7") == "[fe80::1]:7"
    for host in ("0.0.0.0", "::"):
        with pytest.raises(
            ConfigError,
            match=rf"^ps: host: {host} is not an address that other processes can connect to: .* as `--advertise`$",
        ):
            ListenAddress(host).check(Security(insecure=True))
    with pytest.raises(ConfigError, match=r"^ps: advertise: expected a host name or an address, got `a b`$"):
        replace(everywhere, advertise="a b").check(Security(insecure=True))


@pytest.mark.parametrize("has_tls", [False, True])
def test_an_eavesdropper_gets_no_token_with_tls(tmp_path: Path, files: Files, has_tls: bool) -> None:
    settings = Settings(job="j", num_partitions=4, servers=1, plan=plan_of(tmp_path))
    server, client = (security_of(files), Security("secret", ca=files.ca)) if has_tls else (Security("secret"),) * 2
    with closing(Coordinator(Run(tmp_path / "run"), settings)) as coordinator:
        with CoordinatorServer(coordinator, ServerOptions(security=server)) as serving:
            base, _, port = serving.url.rpartition(":")
            with Eavesdropper(int(port)) as eavesdropper:
                url = f"{base}:{eavesdropper.port}"
                with CoordinatorClient(url, security=client, deadline_s=60.0, attempt_s=60.0) as connected:
                    assert connected.status()["term"] == 1
    assert (b"Bearer secret" in eavesdropper.heard) is not has_tls and len(eavesdropper.heard) > 500


def test_a_server_on_a_port_in_use() -> None:
    """The error is a `ConfigError`, not an error of the checkpoint that the server loads."""
    table = {
        "name": "main",
        "seed": 7,
        "partitions": 8,
        "columns": [{"name": "deep", "width": 2, "init_scale": 0.5}],
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    }
    dense = {"kind": "sgd", "learning_rate": 0.1}
    spec = {"table": table, "num_dense": 0, "dense": dense, "num_sums": 0, "owned": {"start": 0, "end": 8}}
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        expected = rf"^ps: 127.0.0.1:{port}: cannot listen: the port is in use$"
        with pytest.raises(ConfigError, match=expected):
            ListenAddress(port=port).check(Security())
        with pytest.raises(ConfigError, match=expected):
            _core.PsServer(
                json.dumps(spec),
                address=f"127.0.0.1:{port}",
                run="r",
                token="",
                incarnation=1,
                epoch=1,
                threads=1,
                files=[],
                dense=None,
            )
