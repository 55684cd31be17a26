"""Trainers, servers and the coordinator are killed again and again; every sample counts once."""

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster import Training, count
from elasticrec import _core
from elasticrec.config import load_job
from elasticrec.data.demo import write_demo
from elasticrec.training.embedding import table_spec
from elasticrec.training.network import build_model

SAMPLES = 400_000
SETTINGS = (
    "train.servers=2",
    "train.trainers=2",
    "train.ps.lease_s=2",
    "train.ps.heartbeat_s=0.5",
    "train.checkpoint.every_s=3",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_demo(directory, samples=SAMPLES, slots=20, hours=4, seed=1)
    return directory


@pytest.fixture
def trainings(tmp_path: Path, data: Path) -> Iterator["Trainings"]:
    with_data = Trainings(tmp_path, data)
    yield with_data
    for training in with_data.started:
        training.stop()


class Trainings:
    """Trainings on three hours of the data, and what they must come to."""

    def __init__(self, directory: Path, data: Path) -> None:
        self.directory, self.data, self.started = directory, data, list[Training]()
        hours = [str(data / f"20260101/0{hour}") for hour in range(4)]
        job = {
            "name": "cluster",
            "data": {
                "format": "slots",
                "train": hours[:3],
                "eval": hours[3],
                "slots": "0-19",
                "unit_bytes": 2**20,
            },
            # a model that has learned the data to its end: another order of batches moves its AUC by less than 0.001
            "model": {"kind": "deepfm", "dim": 8, "hidden": [64, 32]},
            "sparse": {"init_scale": 0.02, "optimizer": {"learning_rate": 0.03}},
            "train": {"mode": "ps", "threads": 1, "batch_size": 256, "print_every_s": 0.5},
        }
        (directory / "job.yaml").write_text(yaml.safe_dump(job))

    def start(self, *settings: str) -> Training:
        training = Training.start(self.directory, *SETTINGS, *settings)
        self.started.append(training)
        return training

    def check(self, epochs: int = 1) -> float:
        """Every sign is counted as often as it stands in the files; returns the AUC."""
        job = load_job(self.directory / "runs/cluster/job.yaml")
        table = _core.Table(json.dumps(table_spec(job, build_model(job).columns)))
        checkpoint = max((self.directory / "runs/cluster/checkpoints").glob("step-*"))
        table.load([str(path) for path in (checkpoint / "table").iterdir()])
        expected = count(sorted(self.data.glob("20260101/0[012]/*.txt")), epochs)
        assert len(table) == len(expected)
        differ = {sign: (row, counts) for sign, counts in expected.items() if (row := table.get(sign))[:2] != counts}
        assert differ == {}
        auc: float = json.loads((checkpoint / "manifest.json").read_text())["metrics"]["eval"][0]["auc"]
        return auc


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> float:
    trainings = Trainings(tmp_path_factory.mktemp("undisturbed"), data)
    trainings.start().finish()
    return trainings.check()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_any_role_may_be_killed_at_any_moment(trainings: Trainings, undisturbed: float, seed: int) -> None:
    training = trainings.start()
    training.wait_for("servers 2/2")
    training.disturb(seed, 4, ("ps", "trainer", "coordinator"))
    output = training.finish()
    assert training.kills.total() >= 2, "the run was over before anything happened"
    assert "300,000 samples" in output
    assert abs(trainings.check() - undisturbed) < 0.003


@pytest.mark.slow
def test_a_hung_server_is_replaced_and_does_no_harm_when_it_wakes_up(trainings: Trainings) -> None:
    training = trainings.start()
    training.wait_for("servers 2/2")
    (process, _), *_ = training.roles("ps")
    time.sleep(2)
    training.send(process, signal.SIGSTOP)
    training.wait_for("is silent, starting another one in its place")
    training.send(process, signal.SIGCONT)
    training.finish()
    trainings.check()


@pytest.mark.slow
def test_a_run_that_was_killed_as_a_whole_goes_on(trainings: Trainings) -> None:
    training = trainings.start()
    training.wait_for("servers 2/2")
    deadline = time.monotonic() + 60
    while not any((trainings.directory / "runs/cluster/checkpoints").glob("ps-*/manifest.json")):
        assert time.monotonic() < deadline, training.output()
        time.sleep(0.1)
    roles = dict(training.roles())
    assert sorted(roles.values()) == ["coordinator", "ps", "ps", "trainer", "trainer"]
    training.process.kill()
    training.process.wait()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in roles):
        assert time.monotonic() < deadline, "roles end with the process that started them"
        time.sleep(0.05)
    output = trainings.start("train.trainers=1").finish()
    assert re.search(r"trained runs/cluster: 300,000 samples", output)
    trainings.check()


@pytest.mark.slow
def test_a_run_that_was_stopped_is_saved_and_goes_on(trainings: Trainings) -> None:
    training = trainings.start("train.checkpoint.every_s=3600")
    training.wait_for("servers 2/2")
    training.wait_for(r"units [1-9]\d* of")
    training.process.send_signal(signal.SIGTERM)
    assert training.process.wait(60) == 130
    assert "stopped and saved; the same command goes on from there" in training.output()
    assert any((trainings.directory / "runs/cluster/checkpoints").glob("ps-*/manifest.json"))
    output = trainings.start().finish()
    assert "trained runs/cluster: 300,000 samples" in output
    trainings.check()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_and_named(trainings: Trainings) -> None:
    training = trainings.start("train.checkpoint.every_s=1")
    training.wait_for("servers 2/2")
    checkpoints = trainings.directory / "runs/cluster/checkpoints"
    deadline = time.monotonic() + 60
    while len(found := sorted(checkpoints.glob("ps-*/manifest.json"))) < 2:
        assert time.monotonic() < deadline, training.output()
        time.sleep(0.05)
    training.process.send_signal(signal.SIGSTOP)
    for process, _ in training.roles():
        training.send(process, signal.SIGKILL)
    training.process.kill()
    training.process.wait()
    newest = found[-1].parent / "shard-00001.rows"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    trainings.start().finish()
    said = (trainings.directory / "runs/cluster/logs/coordinator.log").read_text()
    assert f"{newest.name}" in said and "the checkpoint before it is used" in said
    trainings.check()
