"""User mistakes with roles: one clear line, exit code 2, and an unchanged run."""

import hashlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from elasticrec.roles.start import read_start
from elasticrec.run import Run
from support.by_hand import TIMEOUT_S, TOKEN, Roles, make_run
from support.harness import elasticrec
from support.store import free_port


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("bad"))


@pytest.fixture
def roles(run: Run) -> Iterator[Roles]:
    with Roles(run) as started:
        yield started


def files_of(run: Run) -> dict[str, str]:
    """Return the checksums of a run's files, except those that a start of the coordinator changes."""
    return {
        str(path.relative_to(run.path)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.path.rglob("*"))
        if path.is_file() and not re.match(r"term-|lock$", path.name)
    }


def error_of(result: tuple[int, str]) -> str:
    """Return the only line of output of a role that failed, without its prefix."""
    code, output = result
    assert code == 2 and output.count("\n") == 1 and output.startswith("error: "), output
    assert TOKEN not in output
    return output.removeprefix("error: ").rstrip("\n")


@pytest.mark.slow
def test_a_port_in_use(roles: Roles) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        started = roles.start("coordinator", PORT=port), roles.start("ps", PORT=port, COORDINATOR="http://127.0.0.1:1")
        for role in started:
            message = f"{role.name}: 127.0.0.1:{port}: cannot listen: the port is in use"
            assert error_of(role.finish()) == message


@pytest.mark.slow
def test_a_coordinator_that_is_not_there(roles: Roles) -> None:
    port = free_port()
    for role in [roles.start(name, COORDINATOR=f"http://127.0.0.1:{port}", WAIT=1) for name in ("ps", "trainer")]:
        message = rf"coordinator at 127.0.0.1:{port} did not answer: .*connection refused \(\d+ attempts in 1 s\)"
        assert re.fullmatch(message, error_of(role.finish()), re.IGNORECASE)


@pytest.mark.slow
def test_insecure_and_invalid_settings_are_refused(roles: Roles, tmp_path: Path) -> None:
    coordinator = "http://127.0.0.1:1"
    reachable = "host: 0.0.0.0 is reachable from other machines: expected TLS, `insecure: true`, or 127.0.0.1"
    in_clear = "the token would go to another machine in clear text: expected TLS, or `insecure: true`"
    expected = {
        roles.start("coordinator", HOST="0.0.0.0"): f"coordinator: {reachable}",
        roles.start("ps", HOST="0.0.0.0", COORDINATOR=coordinator): f"ps: {reachable}",
        roles.start("trainer", COORDINATOR="http://192.0.2.1:7"): f"coordinator at 192.0.2.1:7: {in_clear}",
        roles.start(
            "ps", HOST="0.0.0.0", INSECURE=1, COORDINATOR=coordinator
        ): "ps: host: 0.0.0.0 is not an address that other processes can connect to: "
        "expected the name or address of this machine as `--advertise`",
        roles.start("trainer", COORDINATOR=coordinator, RUN=tmp_path): f"{tmp_path}: not a run directory: "
        "expected `job.yaml` and `checkpoints` in it",
    }
    for role, message in expected.items():
        assert error_of(role.finish()) == message


_OLD_ROLE = """
import sys
from elasticrec.cli import main
from elasticrec.net import messages
messages.PROTOCOL -= 1
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_foreign_roles_are_refused_by_a_coordinator(roles: Roles, run: Run, tmp_path: Path) -> None:
    url = roles.coordinator()
    coordinator = f"coordinator at {url.removeprefix('http://')}"
    before = files_of(run)
    other = make_run(tmp_path)
    assert read_start(other.path).run_id != read_start(run.path).run_id
    second = roles.start("coordinator")
    foreign = [roles.start(name, COORDINATOR=url, RUN=other.path) for name in ("ps", "trainer")]
    wrong = [roles.start(name, COORDINATOR=url, TOKEN="guess") for name in ("ps", "trainer")]
    assert error_of(second.finish()) == f"{run.path}: another coordinator holds the lock of this run"
    for role in wrong:
        assert error_of(role.finish()) == f"{coordinator}: missing or wrong token"
    old = [sys.executable, "-c", _OLD_ROLE, "ps", "--run", str(run.path), "--coordinator", url, "--token", TOKEN]
    ended = subprocess.run(old, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    message = f"{coordinator}: register: protocol: expected 1, got 0: the role runs another release"
    assert error_of((ended.returncode, ended.stderr)) == message
    message = f"{coordinator}: register: run: expected a role of this run, got a role with the directory of another run"
    for role in foreign:
        assert error_of(role.finish()) == message
    assert files_of(run) == before


@pytest.mark.slow
def test_a_changed_job_is_refused(tmp_path: Path) -> None:
    """Even before the first checkpoint, because servers may have created rows for the earlier job."""
    run = make_run(tmp_path)
    before = files_of(run)
    result = elasticrec("train", "job.yaml", "--set", "train.batch_size=64", cwd=tmp_path)
    message = "job.yaml: differs from the job of runs/tiny in `train.batch_size`; change it back"
    assert error_of((result.returncode, result.stderr)).startswith(message)
    assert files_of(run) == before
    with Roles(run) as roles:
        roles.coordinator()
        roles.started[0].stop()
        before = files_of(run)
        text = run.job_path.read_text()
        run.job_path.write_text(text.replace("batch_size: 128", "batch_size: 64"))
        message = (
            f"{run.path}: the run belongs to another job, which differs in `job`: "
            "its job.yaml was changed after the start"
        )
        assert error_of(roles.start("coordinator").finish()) == message
        run.job_path.write_text(text)
        assert files_of(run) == before
        roles.coordinator()


@pytest.mark.slow
def test_invalid_numbers_of_servers_are_refused(run: Run) -> None:
    directory = run.path.parents[1]
    for settings, message in (
        (["train.servers=0"], "--set train.servers=0: expected at least 1, got 0"),
        (["train.servers=17"], "job.yaml: train.servers: expected at most 16 (`sparse.partitions`), got 17"),
    ):
        result = elasticrec("check", "job.yaml", *[p for s in settings for p in ("--set", s)], cwd=directory)
        assert error_of((result.returncode, result.stderr)) == message
