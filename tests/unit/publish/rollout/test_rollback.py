"""A rollback that waits for a store of fake replicas: it offers its version, or nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from elasticrec import cli
from elasticrec.errors import UnavailableError
from elasticrec.net.security import Security, check_addresses
from elasticrec.publish.rollout.decide import Replica
from elasticrec.publish.rollout.known_store import KnownStore, RecordingReplicas, read_known_store, record_store
from elasticrec.publish.rollout.patience import Patience
from elasticrec.publish.rollout.replicas import StoreReplicas
from elasticrec.publish.rollout.rollback import Rollback
from elasticrec.repository.repository import Current, Repository
from support.store import MODEL, publish
from support.versions import write_version


class FakeReplicas:
    """SlowReplicas shards of one replica each; `then` is called before the second poll returns."""

    def __init__(self, then: Callable[["FakeReplicas"], None] = lambda _: None) -> None:
        self.versions: tuple[int, ...] = (2,)
        self.bytes_per_s: float | None = None
        self.polls, self.then = 0, then
        self.notified: list[str] = []

    def poll(self) -> Sequence[Sequence[Replica]]:
        self.polls += 1
        if self.polls == 2:
            self.then(self)
        return [[Replica(shard, f"a:{shard}", self.versions, bytes_per_s=self.bytes_per_s)] for shard in (0, 1)]

    def notify(self, replicas: Sequence[Replica]) -> None:
        self.notified += [replica.address for replica in replicas]


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Versions 1 to 3; 2 is current and 3 was not offered, as if the gate had refused it."""
    repository = Repository.open(tmp_path, MODEL)
    for _ in range(3):
        write_version(repository)
    repository.offer(2)
    return repository


def test_a_rollback_completes_once_the_store_holds_the_version(
    repository: Repository, caplog: pytest.LogCaptureFixture
) -> None:
    def load(replicas: FakeReplicas) -> None:
        assert repository.state() == Current(2, 2, is_held=True, wanted=1)
        replicas.versions = (1, 2, 3)

    replicas = FakeReplicas(load)
    assert Rollback(repository, replicas, None).roll_back(1, 60) == Current(1, 3, is_held=True)
    assert caplog.messages == ["loading 1, about 1 s", "loading 1: 0 of 2 replicas have it, held by a rollback"]
    assert replicas.notified == ["a:0", "a:1"]


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_cancelled_rollback_ends_and_offers_nothing(repository: Repository, is_resumed: bool) -> None:
    def change(replicas: FakeReplicas) -> None:
        replicas.versions = (1, 2, 3)
        if is_resumed:
            repository.resume()
        else:
            repository.rollback(3, is_loaded=False)

    with pytest.raises(
        UnavailableError, match="the rollback to version 1 was cancelled by another rollback or by `models resume`"
    ):
        Rollback(repository, FakeReplicas(change), None).roll_back(1, 60)
    wanted = Current(2, 3) if is_resumed else Current(2, 3, is_held=True, wanted=3)
    assert repository.state() == wanted


def test_a_rollback_waits_for_replicas_that_get_traffic(repository: Repository) -> None:
    """One of two replicas has the version: if it died right after the offer, no replica could answer."""

    class SlowReplicas(FakeReplicas):
        def poll(self) -> Sequence[Sequence[Replica]]:
            super().poll()
            others = (1, 2) if self.polls > 3 else (2,)
            return [[Replica(0, "a:0", (1, 2)), Replica(0, "a:1", others)]]

    now, replicas = [0.0], SlowReplicas()
    assert Rollback(repository, replicas, None, Patience(lambda: now[0])).roll_back(1, 60).version == 1
    assert replicas.polls == 4

    class StuckReplicas(FakeReplicas):
        def poll(self) -> Sequence[Sequence[Replica]]:
            super().poll()
            now[0] += 10
            return [[Replica(0, "a:0", (1, 2, 3)), Replica(0, "a:1", (1,))]]

    replicas = StuckReplicas()
    assert Rollback(repository, replicas, None, Patience(lambda: now[0])).roll_back(2, 60).version == 2
    assert replicas.polls == 4


def test_a_rollback_timeout_names_replicas_that_are_behind(repository: Repository) -> None:
    with pytest.raises(UnavailableError, match=r"version 1 is not current after 0 s; .*: shard 0 a:0: has 2; shard 1"):
        Rollback(repository, FakeReplicas(), None).roll_back(1, 0)
    assert repository.state() == Current(2, 2, is_held=True, wanted=1)


def test_a_rollback_to_the_current_version_is_immediate(repository: Repository) -> None:
    assert Rollback(repository, FakeReplicas(), None).roll_back(2, 0) == Current(2, 2, is_held=True)


def test_the_estimate_covers_the_whole_chain(repository: Repository, caplog: pytest.LogCaptureFixture) -> None:
    replicas = FakeReplicas()
    replicas.bytes_per_s = repository.version(1).num_bytes / 40
    with pytest.raises(UnavailableError):
        Rollback(repository, replicas, None).roll_back(1, 0)
    assert caplog.messages[0] == "loading 1, about 40 s"


def test_store_commands_take_a_model_and_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    repository = Repository.open(tmp_path / "models", MODEL)
    for _ in range(2):
        publish(repository)
    repository.offer(1)
    for command in (["cube", "serve"], ["cube", "status"], ["deliver"]):
        assert cli.main([*command, f"models/{MODEL}:2"]) == 2
        assert capsys.readouterr().err == (
            f"error: {' '.join(command)}: expected a model, got its version 2: `models/{MODEL}:2`; "
            "to serve that version, use `elasticrec models rollback`\n"
        )
    for model, version in ((f"models/{MODEL}:2", 2), (f"models/{MODEL}", 1)):
        assert cli.main(["cube", "get", model, "7"]) == 0
        assert capsys.readouterr().out.splitlines() == [f"version {version}", f"7: value 7  version {version}"]
    assert cli.main(["cube", "get", f"models/{MODEL}:2", "7", "--version", "1"]) == 2
    assert capsys.readouterr().err == f"error: --version: expected 2, as in `models/{MODEL}:2`, got 1\n"


@pytest.mark.parametrize(
    "command",
    [["cube", "status", "MODEL"], ["cube", "get", "MODEL", "7"], ["deliver", "MODEL", "--once"]],
)
def test_no_token_goes_to_another_machine_in_clear(
    command: list[str], repository: Repository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICREC_TOKEN", "secret")
    far = ["10.255.255.1:7"]
    arguments = [part.replace("MODEL", repository.location) for part in command]
    in_clear = "the token would go to another machine in clear text: expected TLS, or `insecure: true`\n"
    assert cli.main([*arguments, "--address", f"127.0.0.1:1,{far[0]}"]) == 2
    assert capsys.readouterr().err == f"error: cube shard 0 at {far[0]}: {in_clear}"
    check_addresses(Security("secret", insecure=True), [far])
    check_addresses(Security(), [far])
    check_addresses(Security("secret"), [["localhost:7", "[::1]:7"]])


def test_no_token_of_a_rollback_goes_to_another_machine_in_clear(
    repository: Repository, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICREC_TOKEN", "secret")
    repository.storage.write("STORE", b'{"shards": [["10.255.255.1:7"]], "min_ready": null}')
    assert cli.main(["models", "rollback", f"{repository.location}:1"]) == 2
    assert "error: cube shard 0 at 10.255.255.1:7: the token would go" in capsys.readouterr().err
    assert repository.current() == 2


def test_a_store_is_recorded_once_every_shard_has_answered(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record_store(repository, [["old:1"]], None)
    live = {"a:1"}

    def poll(self: StoreReplicas) -> list[list[Replica]]:
        return [
            [Replica(shard, address, is_there=address in live) for address in replicas]
            for shard, replicas in enumerate(self.addresses)
        ]

    monkeypatch.setattr(StoreReplicas, "poll", poll)
    replicas = StoreReplicas(MODEL, [["a:1", "a:2"], ["b:1", "b:2"]], Security())
    recording = RecordingReplicas(repository, replicas, 1)
    # a typo: no replica of one shard answers
    recording.poll()
    assert read_known_store(repository) == KnownStore([["old:1"]], None)
    live.add("b:2")
    with monkeypatch.context() as patch:
        patch.setattr("elasticrec.publish.rollout.known_store.record_store", fail)
        for _ in range(2):
            recording.poll()
    assert caplog.messages == [
        "cannot record the addresses of the store, `models rollback` will not find it: no space left"
    ]
    assert [[one.is_there for one in shard] for shard in recording.poll()] == [[True, False], [False, True]]
    assert read_known_store(repository) == KnownStore([["a:1", "a:2"], ["b:1", "b:2"]], 1)


def test_a_typo_in_an_address_keeps_the_recorded_store(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    record_store(repository, [["old:1"]], None)
    assert cli.main(["deliver", repository.location, "--address", "127.0.0.1:1", "--once"]) == 0
    assert read_known_store(repository) == KnownStore([["old:1"]], None)


def fail(*_: object) -> None:
    raise OSError("no space left")
