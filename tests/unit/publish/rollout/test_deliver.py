"""A rollout with fake replicas: the offers that it makes, and the status that it shows."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.config.publish import Gate
from elasticrec.launch.status import _store_lines
from elasticrec.net.security import Security
from elasticrec.publish.rollout.decide import Replica
from elasticrec.publish.rollout.deliver import Delivery
from elasticrec.publish.rollout.patience import Patience
from elasticrec.publish.rollout.replicas import StoreReplicas
from elasticrec.repository.repository import Repository
from support.store import MODEL, publish
from support.versions import write_version

FEW_SIGNS = np.arange(1, 11, dtype=np.uint64)


class FakeReplicas:
    """One shard of two replicas."""

    def __init__(self) -> None:
        self.shard = (Replica(0, "a:1"), Replica(0, "b:1", is_there=False, why="does not answer in 1 s"))
        self.notified: list[str] = []

    def hold(self, *versions: int) -> None:
        self.shard = (Replica(0, "a:1", versions), self.shard[1])

    def poll(self) -> Sequence[Sequence[Replica]]:
        return (self.shard,)

    def notify(self, replicas: Sequence[Replica]) -> None:
        self.notified += [replica.address for replica in replicas]


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / MODEL).mkdir()
    return Repository.open(tmp_path, MODEL)


def test_the_status_shows_the_step_late_replicas_and_refusals(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = FakeReplicas()
    delivery = Delivery(repository, replicas, Gate())
    assert delivery.describe()["doing"] == "checking the store"
    first = publish(repository).number
    delivery.step()
    assert replicas.notified == ["a:1"]
    assert _store_lines(delivery.describe()) == [
        "store: loading 1: 0 of 2 replicas have it",
        "  late: shard 0 a:1: has nothing",
        "  late: shard 0 b:1: does not answer in 1 s",
    ]
    replicas.hold(first)
    delivery.step()
    assert repository.current() == first
    assert _store_lines(delivery.describe()) == [
        "store: switched to 1, 1 of 2 replicas are behind",
        "  late: shard 0 b:1: does not answer in 1 s",
    ]
    # almost all rows are gone: the gate refuses the version
    second = publish(repository, signs=FEW_SIGNS).number
    replicas.hold(first, second)
    delivery.step()
    assert repository.current() == first
    (*_, last) = _store_lines(delivery.describe())
    assert last.startswith(f"  version {second} is not offered: ") and "rows" in last
    assert any(line.startswith(f"version {second} is not offered") for line in caplog.messages)


def test_the_rollout_stops_waiting_for_a_slow_replica(repository: Repository) -> None:
    """A live replica that never loads a version delays one offer, by at most the patience."""
    replicas, now = FakeReplicas(), [100.0]
    delivery = Delivery(repository, replicas, Gate(), patience=Patience(lambda: now[0]))
    first = publish(repository).number
    replicas.shard = (Replica(0, "a:1", (1,)), Replica(0, "b:1", (1,)))
    delivery.step()
    assert repository.current() == first
    second = publish(repository).number
    replicas.hold(1, 2)
    for wait_s, expected in ((0, first), (29, first), (2, second)):
        now[0] += wait_s
        delivery.step()
        assert repository.current() == expected
    # the replica gets no traffic any more, so the rollout does not wait for it
    third = publish(repository).number
    replicas.hold(1, 2, 3)
    delivery.step()
    assert repository.current() == third


def test_a_preview_waits_for_loading_replicas_too(repository: Repository) -> None:
    """While a replica is loading a version, the preview does not ask the user to start `deliver`."""
    replicas = FakeReplicas()
    delivery = Delivery(repository, replicas, Gate())
    repository.offer(publish(repository).number)
    second = publish(repository).number
    replicas.shard = (Replica(0, "a:1", (1, second)), Replica(0, "b:1", (1,)))
    assert delivery.preview()[0].text == f"loading {second}: 1 of 2 replicas have it"
    replicas.shard = (Replica(0, "a:1", (1, second)), Replica(0, "b:1", (1, second)))
    assert delivery.preview()[0].text == f"version {second} can be offered: start `elasticrec deliver`"


@pytest.mark.parametrize("ends_early", [True, False])
def test_each_version_has_its_own_patience(repository: Repository, ends_early: bool) -> None:
    """The wait for the version before it may end because all replicas have it, or by the time limit."""
    replicas, now = FakeReplicas(), [100.0]
    delivery = Delivery(repository, replicas, Gate(), patience=Patience(lambda: now[0]))
    held = [publish(repository).number]
    replicas.shard = (Replica(0, "a:1", tuple(held)), Replica(0, "b:1", tuple(held)))
    delivery.step()
    for _ in range(2):
        before = held[-1]
        held.append(publish(repository).number)
        replicas.shard = (Replica(0, "a:1", tuple(held)), Replica(0, "b:1", tuple(held[:-1])))
        delivery.step()
        now[0] += 29
        delivery.step()
        assert repository.current() == before, "waits for the replica that is still loading"
        if ends_early:
            replicas.shard = (Replica(0, "a:1", tuple(held)), Replica(0, "b:1", tuple(held)))
        else:
            now[0] += 2
        delivery.step()
        assert repository.current() == held[-1]
        # the next check sees the next version already
        now[0] += 100


def test_an_unreadable_version_is_named_and_does_not_block_newer_ones(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    replicas = FakeReplicas()
    delivery = Delivery(repository, replicas, Gate())
    replicas.hold(1, 2, 3, 4)
    publish(repository)
    delivery.step()
    root = Path(repository.location)
    bad = [publish(repository), publish(repository)]
    (root / bad[0].name / "manifest.json").write_bytes(b"{")
    dense = root / bad[1].name / "dense.bin"
    dense.write_bytes(dense.read_bytes()[:-1] + b"!")
    delivery.step()
    delivery.step()
    assert repository.current() == 1
    assert sum("version 2 is not offered: " in line and "manifest.json" in line for line in caplog.messages) == 1
    assert sum("version 3 is not offered: " in line and "sha-256" in line for line in caplog.messages) == 1
    # a damaged current version does not block newer ones either
    (root / "1/manifest.json").write_bytes(b"{")
    fourth = publish(repository).number
    delivery.step()
    assert repository.current() == fourth


def test_weights_that_are_not_finite_are_not_offered(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    replicas = FakeReplicas()
    replicas.hold(1)
    write_version(repository, dense=np.array([1.0, np.nan], np.float32).tobytes())
    Delivery(repository, replicas, Gate()).step()
    assert repository.current() is None
    assert caplog.messages[0] == "version 1 is not offered: dense weights: `w` has values that are not finite"


def test_a_replica_of_another_shard_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting it would leave partitions without a server."""
    monkeypatch.setattr("elasticrec.publish.rollout.replicas._TIMEOUT_S", 60.0)
    server = _core.CubeServer(MODEL, address="127.0.0.1:0", token="", partitions=(0, 8), num_partitions=16)
    try:
        ((first,), (second,)) = StoreReplicas(MODEL, [[server.address], [server.address]], Security()).poll()
    finally:
        server.stop()
    assert first.is_there and not second.is_there
    assert second.why == "expected partitions 8 to 15, shard 1 of 2, got 0 to 7"


def test_the_store_is_polled_more_often_during_a_rollout(repository: Repository) -> None:
    pauses: list[float] = []
    replicas = FakeReplicas()
    publish(repository)

    def wait(pause_s: float) -> bool:
        pauses.append(pause_s)
        if len(pauses) == 3:
            replicas.shard = (Replica(0, "a:1", (1,)), Replica(0, "b:1", (1,)))
        return len(pauses) == 5

    Delivery(repository, replicas, Gate()).run(wait)
    assert pauses == [0.02, 0.04, 0.08, 0.5, 0.5]


def test_the_status_shows_a_repository_that_cannot_be_read(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Repository) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(Repository, "state", fail)
    delivery = Delivery(repository, FakeReplicas(), Gate())
    delivery.run(lambda _: True)
    assert delivery.describe()["doing"] == "rollout failed, retrying: no such disk"
