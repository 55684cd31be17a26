"""Roles die at fail points, hang, lose their connections or find the disk full; every sample counts once."""

import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elasticrec.config import load_job
from elasticrec.config.strategies import STRATEGIES, StrategyName
from elasticrec.roles.coordinator import prepare
from elasticrec.run import Run
from support.by_hand import Roles
from support.cluster import Trainings, Undisturbed
from support.disks import fill, small_file_system
from support.store import free_port

# Fail points: three processes die at each, at these counts since their start.
POINTS = {
    "apply": (150, 400, 90),
    "snapshot": (40, 200, 3),
    "load": (1, 1, 1),
    "manifest": (1, 2, 1),
    "manifest-written": (1, 2, 1),
    "lease": (9, 15, 4),
    "leased": (5, 9, 3),
}
# Strategies that merge batches push a quarter as often.
MERGED_POINTS = POINTS | {"apply": (60, 100, 30)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_roles_may_die_at_every_fail_point(trainings: Trainings, tmp_path: Path, strategy: StrategyName) -> None:
    """While a push is applied, a snapshot written, a checkpoint loaded, a unit leased; before and after a manifest."""
    points = tmp_path / "points"
    points.mkdir()
    for name, counts in (MERGED_POINTS if STRATEGIES[strategy].merges_batches else POINTS).items():
        for at, count in enumerate(counts):
            (points / f"{name}.{at}").write_text(str(count))
    training = trainings.start(
        f"train.strategy={strategy}", "train.checkpoint.every_s=1.5", ELASTICREC_FAIL_POINTS=str(points)
    )
    output = training.finish()
    assert sorted(path.name for path in points.iterdir()) == [], "each point was hit three times"
    assert f"{trainings.num_samples:,} samples" in output
    trainings.check()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_role_may_hang(trainings: Trainings, undisturbed: Callable[[str], Undisturbed], strategy: str) -> None:
    calm = undisturbed(strategy)
    training = trainings.start(f"train.strategy={strategy}")
    training.wait_for("servers 2/2")
    training.disturb(1, calm.fault_interval_s, ("ps", "trainer", "coordinator"), hang_s=5)
    output = training.finish()
    assert training.kills.total() >= 2, "the run ended before two faults"
    assert f"{trainings.num_samples:,} samples" in output
    trainings.check()


@pytest.mark.slow
def test_a_coordinator_that_hangs_is_replaced(short_trainings: Trainings) -> None:
    training = short_trainings.start()
    training.wait_for(r"units [1-9]\d* of")
    ((process, _),) = training.roles("coordinator")
    os.kill(process, signal.SIGSTOP)
    training.wait_for("coordinator does not respond: replacing it")
    training.finish()
    short_trainings.check()


class CuttingProxy:
    """A proxy between trainers and a server that cuts connections in the middle of a frame."""

    def __init__(self, port: int, seed: int) -> None:
        self._target = ("127.0.0.1", port)
        # Servers announce this address of the machine, with their own port.
        self._listener = socket.create_server(("127.0.0.2", port))
        self._chance = random.Random(seed)
        self.num_cut = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._target, timeout=60)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            # Counts both directions together, so that some requests and some responses are cut.
            remaining = [self._chance.randrange(1_000_000, 6_000_000)]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, sink, remaining), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, remaining: list[int]) -> None:
        try:
            while received := source.recv(65536):
                remaining[0] -= len(received)
                if remaining[0] <= 0:
                    self.num_cut += 1
                    # Forward half of the received bytes.
                    sink.sendall(received[: len(received) // 2])
                    break
                sink.sendall(received)
        except OSError:
            pass
        for one in (source, sink):
            # While the other thread reads, closing the socket alone does not reach the peer.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        self._listener.close()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_connections_may_be_cut_in_the_middle_of_a_frame(trainings: Trainings, strategy: str) -> None:
    """Servers listen on ports chosen in advance, and announce the address of the proxy."""
    settings = trainings.settings(f"train.strategy={strategy}")
    job = load_job(trainings.directory / "job.yaml", overrides=settings)
    run = Run.create(job, trainings.run.parent)
    prepare(job, run)
    ports = [free_port(), free_port()]
    proxies = [CuttingProxy(port, seed) for seed, port in enumerate(ports)]
    try:
        with Roles(run) as roles:
            url = roles.coordinator()
            for port in ports:
                roles.start("ps", COORDINATOR=url, PORT=port, ADVERTISE="127.0.0.2")
            trainers = [roles.start("trainer", COORDINATOR=url) for _ in range(2)]
            assert [trainer.finish()[0] for trainer in trainers] == [0, 0]
            assert all(role.finish()[0] == 0 for role in roles.started)
    finally:
        for proxy in proxies:
            proxy.close()
    assert sum(proxy.num_cut for proxy in proxies) >= 6
    # The run is finished: this command only collects what the servers saved.
    assert f"{trainings.num_samples:,} samples" in trainings.start(f"train.strategy={strategy}").finish()
    trainings.check()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system with space for a few checkpoints of the demo data."""
    with small_file_system(tmp_path / "disk", "192m") as path:
        yield path


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_full_disk_fails_checkpoints_and_nothing_else(small_disk: Path, data: Path, strategy: str) -> None:
    trainings = Trainings(small_disk, data)
    try:
        training = trainings.start(
            f"train.strategy={strategy}", "train.checkpoint.every_s=1", "train.checkpoint.keep=1"
        )
        training.wait_until(lambda: any(trainings.run.glob("checkpoints/ps-*/manifest.json")))
        filler = small_disk / "filler"
        fill(filler, leave=300_000)
        log = trainings.run / "logs/coordinator.log"
        training.wait_until(lambda: "No space left on device" in log.read_text())
        # The earlier checkpoint is complete: a server that dies now is restored from it.
        ((process, _), *_) = training.roles("ps")
        os.kill(process, signal.SIGKILL)
        training.wait_for("ended with signal 9")
        filler.unlink()
        training.finish()
        trainings.check()
    finally:
        trainings.stop()
