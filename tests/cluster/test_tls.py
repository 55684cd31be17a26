"""TLS on every role, configured by environment variables: training works, and unknown peers are refused."""

from pathlib import Path
from typing import Any

import pytest

from elasticrec import _core
from elasticrec.roles.start import read_start
from elasticrec.roles.train import newest_checkpoint
from elasticrec.run import Run
from support.by_hand import TOKEN, Roles, make_run
from support.certificates import Files, write_certificates
from support.eavesdrop import Eavesdropper
from support.harness import elasticrec


def tls_settings(files: Files) -> dict[str, Any]:
    return {name.removeprefix("ELASTICREC_"): value for name, value in files.environment().items()}


def samples_of(run: Run) -> list[int]:
    """Return the samples applied to each partition, from the last checkpoint."""
    start = read_start(run.path)
    everything = range(start.num_partitions)
    parts = newest_checkpoint(run).parts(everything)
    return _core.read_dense_parts(start.shard_spec(everything), [part["dense"] for part in parts])[3]


@pytest.mark.slow
def test_a_training_with_tls_on_every_role(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    tls = tls_settings(write_certificates(tmp_path / "tls"))
    with Eavesdropper() as listening, Roles(run) as roles:
        url = roles.coordinator(HOST="127.0.0.1", **tls)
        assert url.startswith("https://127.0.0.1:")
        listening.target = int(url.rpartition(":")[2])
        tls["COORDINATOR"] = f"https://127.0.0.1:{listening.port}"
        for _ in range(2):
            roles.start("ps", HOST="127.0.0.1", **tls)
        roles.start("trainer", **tls)
        ended = [(role.name, *role.finish()) for role in roles.started]
    assert [code for _, code, _ in ended] == [0, 0, 0, 0], ended
    assert samples_of(run) == [2000] * 16
    assert len(listening.heard) > 1000
    for secret in (TOKEN.encode(), b"Bearer", b"incarnation"):
        assert secret not in listening.heard
    assert not any(TOKEN in output for _, _, output in ended)


@pytest.mark.slow
def test_a_trainer_refuses_a_server_of_another_authority(tmp_path: Path) -> None:
    """The trainer gives up after the lease time of a server, with one error line; nothing is trained."""
    run = make_run(tmp_path, train__servers=1, train__ps={"lease_s": 1, "heartbeat_s": 0.3})
    ours, other = (tls_settings(write_certificates(tmp_path / name)) for name in ("ours", "other"))
    with Roles(run) as roles:
        tls = ours | {"COORDINATOR": roles.coordinator(**ours)}
        # The server trusts the coordinator, but no peer trusts the authority of its own certificate.
        server = roles.start("ps", **tls | {"TLS_CERT": other["TLS_CERT"], "TLS_KEY": other["TLS_KEY"]})
        address = server.wait_for(r"partitions 0 to 15, on (\S+)")
        trainer = roles.start("trainer", **tls)
        foreign = [roles.start(name, **tls | {"TLS_CA": other["TLS_CA"]}) for name in ("trainer", "ps")]
        code, output = trainer.finish()
        assert code == 2
        problem = f"ps shard 0 at {address}: its certificate is not signed by an authority of the `ca` file"
        assert output.splitlines() == [f"trainer 0: unit 0: {problem}", f"error: {problem}"]
        for role in foreign:
            code, output = role.finish()
            assert (code, output.count("\n")) == (2, 1) and "its certificate is not signed by an authority" in output
    assert not any(run.checkpoints.iterdir())


@pytest.mark.slow
def test_all_roles_on_this_machine_with_tls(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__servers=1)
    files = write_certificates(tmp_path / "tls")
    keys = [f"train.ps.tls.{name}={getattr(files, name)}" for name in ("cert", "key", "ca")]
    # Environment variables of single roles do not apply to roles that the launcher starts.
    result = elasticrec(
        "train",
        "job.yaml",
        *[part for key in keys for part in ("--set", key)],
        cwd=tmp_path,
        env={"ELASTICREC_HOST": "0.0.0.0", "ELASTICREC_PORT": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "trained runs/tiny: 2,000 samples" in result.stdout
    assert " on https://127.0.0.1:" in (run.path / "logs/coordinator.log").read_text()
