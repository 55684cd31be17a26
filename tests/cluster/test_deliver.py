"""From a training to the store: versions of a running job are rolled out to store processes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.launch.status import read_status
from elasticrec.repository.repository import Repository
from elasticrec.run import Run
from support.by_hand import TOKEN, Roles, make_run
from support.cluster import Trainings, load_rows
from support.store import Process, free_port, wait_until

pytestmark = pytest.mark.slow


def test_rows_of_three_servers_reach_a_store_of_two_shards_and_two_replicas(trainings: Trainings) -> None:
    ports = [[free_port(), free_port()] for _ in range(2)]
    addresses = [[f"127.0.0.1:{port}" for port in replicas] for replicas in ports]
    settings = ("cube.shards=2", "cube.replicas=2", f"cube.addresses={json.dumps(addresses)}", "cube.poll_s=0.2")
    nodes = [
        Process(
            ["cube", "serve", "job.yaml", "--shard", f"{shard}/2", "--port", str(port), "--poll", "0.2"],
            trainings.directory,
            trainings.directory / f"node-{shard}-{replica}.log",
        )
        for shard, replicas in enumerate(ports)
        for replica, port in enumerate(replicas)
    ]
    try:
        training = trainings.start("train.servers=3", "publish.every=1s", "publish.base_every=3", *settings)
        wait_until(lambda: is_rolling_out(trainings.run), lambda: str(read_status(Run(trainings.run))))
        training.finish()
        found = Repository.open(trainings.directory / "models", "cluster")
        newest = max(found.versions())
        assert newest >= 2 and found.current() == newest
        log = (trainings.run / "logs/coordinator.log").read_text()
        assert f"store: switched to {newest}" in log
        table = load_rows(trainings.run, max((trainings.run / "checkpoints").glob("step-*")))
        signs = np.array(trainings.signs()[::7], np.uint64)
        client = _core.CubeClient("cluster", addresses, token="", deadline_s=60.0)
        rows, is_there = client.get(newest, signs)
        assert is_there.all()
        differ = [sign for sign, row in zip(signs.tolist(), rows.tolist(), strict=True) if table.get(sign)[3] != row]
        assert differ == []
    finally:
        for node in nodes:
            node.kill()


def is_rolling_out(run: Path) -> bool:
    """Return whether the status of the run shows a rollout."""
    status = read_status(Run(run))
    return "coordinator" in status and re.match("loading|switched|version", status["store"]["doing"]) is not None


def without(directory: Path) -> list[str]:
    """Return a command prefix that hides a directory, as on a machine that does not share this disk."""
    script = f"mount -t tmpfs tmpfs '{directory}' && exec \"$@\""
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


def can_unshare(directory: Path) -> bool:
    directory.mkdir(parents=True, exist_ok=True)
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*without(directory), "true"], capture_output=True, check=False).returncode == 0


def test_machines_that_share_no_disk_send_and_fetch_files_over_http(tmp_path: Path) -> None:
    models = tmp_path / "models"
    if not can_unshare(models):
        pytest.skip("a mount namespace, for the disk of another machine, needs `unshare` and root")
    port = free_port()
    run = make_run(
        tmp_path,
        train__epochs=3,
        publish__every="epoch",
        publish__repository=str(models),
        cube__addresses=[[f"127.0.0.1:{port}"]],
        cube__poll_s=0.2,
        cube__token=f"file:{tmp_path / 'token'}",
    )
    (tmp_path / "token").write_text(TOKEN)
    cache = tmp_path / "cache"
    with Roles(run) as roles:
        coordinator = roles.coordinator()
        node = roles.start(
            f"cube serve {coordinator}/files/tiny --poll 0.2 --cache {cache}", without(models), PORT=port
        )
        for index in range(2):
            roles.start("ps", without(models), COORDINATOR=coordinator, INDEX=index)
        roles.start("trainer", COORDINATOR=coordinator)
        code, output = roles.started[0].finish()
        assert code == 0, output
        found = Repository.open(models, "tiny")
        assert found.versions() == [1, 2, 3] and found.current() == 3
        assert "store: switched to 3" in output
        assert "fetching http" in node.output
        assert TOKEN not in "".join(role.output for role in roles.started)
        client = _core.CubeClient("tiny", [[f"127.0.0.1:{port}"]], token=TOKEN, deadline_s=60.0)
        base, *deltas = (
            [str(found.storage.path_of(f"{one.name}/{part}")) for part in one.parts] for one in found.chain(3)
        )
        view = _core.CubeView(base, deltas)
        for signs, rows in view.items():
            got, is_there = client.get(3, signs)
            assert is_there.all() and (got == rows).all()
        assert view.num_rows > 100
        # No temporary file is left beside the versions.
        assert not [path for path in models.rglob(".dense-*")]
