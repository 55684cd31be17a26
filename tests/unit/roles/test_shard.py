"""The process of a parameter server, without a table and a socket: how it reacts to the coordinator's responses."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.config.train import ParameterServers
from elasticrec.errors import ConfigError
from elasticrec.net.messages import MovedError, SurplusError
from elasticrec.roles.member import ListenAddress, RoleOptions
from elasticrec.roles.shard import DamagedCheckpointError, ShardProcess
from elasticrec.roles.start import write_start
from elasticrec.run import Run

REGISTRATION: dict[str, Any] = {
    "incarnation": 11,
    "index": 1,
    "epoch": 1,
    "partitions": [2, 4],
    "boundaries": [],
    "skipped": [],
    "checkpoint": {"name": "ps-00000001-000001", "parts": []},
}
HEARTBEAT: dict[str, Any] = {"lease_s": 5.0, "next_s": 0.0, "commands": []}


class Client:
    """A coordinator that gives these registrations one after the other; errors are raised."""

    def __init__(self, *registrations: dict[str, Any] | Exception) -> None:
        self.registrations = list(registrations)
        self.requests: list[dict[str, Any]] = []
        self.deadline_s = 1.0
        self.sent_at = 0.0

    def register_shard(self, nonce: str, **more: Any) -> dict[str, Any]:
        self.requests.append(more)
        registration = self.registrations.pop(0)
        if isinstance(registration, Exception):
            raise registration
        return registration

    def shard_heartbeat(self, incarnation: int, sequence: int, **more: Any) -> dict[str, Any]:
        return HEARTBEAT

    def leave(self, incarnation: int, sequence: int) -> None:
        pass


Make = Callable[..., ShardProcess]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[ShardProcess] = []
    write_start(Run(tmp_path), {"table": {"partitions": 4}, "num_dense": 0}, np.zeros((1, 0), np.float32))

    def make_one(client: Client | None = None) -> ShardProcess:
        options = RoleOptions(tmp_path, "http://127.0.0.1:1", index=1)
        process = ShardProcess(options, ListenAddress(), ParameterServers())
        process._client = client or Client()  # type: ignore[assignment]
        made.append(process)
        return process

    yield make_one
    for process in made:
        process._metrics.close()


@pytest.mark.parametrize(
    "refusal", [ConfigError("could not be loaded, although its files are intact"), SurplusError("below 1, got 1")]
)
def test_only_a_surplus_shard_ends_without_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refusal: ConfigError
) -> None:
    caplog.set_level("INFO")
    client = Client(REGISTRATION, refusal)
    process = make(client)
    is_surplus = isinstance(refusal, SurplusError)

    def serve(_: object) -> None:
        raise MovedError("moved") if is_surplus else DamagedCheckpointError("out of memory")

    monkeypatch.setattr(process, "_serve", serve)
    if is_surplus:
        process.run()
        assert caplog.messages[-1] == "shard 1: no longer needed: below 1, got 1"
    else:
        with pytest.raises(ConfigError, match="its files are intact"):
            process.run()
        assert client.requests[1]["damaged"] == {"ps-00000001-000001": "out of memory"}


def test_a_shard_that_never_registered_raises_if_its_index_is_too_high(make: Make) -> None:
    with pytest.raises(ConfigError, match="below 1, got 1"):
        make(Client(SurplusError("below 1, got 1"))).run()


class Server:
    """Writes a snapshot once `may_end` is set."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def snapshot(self, rows: str, dense: str) -> tuple[tuple[int, str], tuple[int, str]]:
        assert self.may_end.wait(60)
        if rows == "full":
            raise OSError("no space left on device")
        return (1, rows), (2, dense)


def snapshot_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "snapshot"]


def command(name: str, rows: str = "rows") -> dict[str, Any]:
    return {"command": "snapshot", "checkpoint": name, "rows": rows, "dense": "dense"}


@pytest.mark.parametrize("rows", ["rows", "full"])
def test_the_report_of_an_old_snapshot_does_not_replace_a_newer_one(make: Make, rows: str) -> None:
    process, old, new = make(), Server(), Server()

    def execute(server: Server, name: str, rows: str = "rows") -> None:
        process._server = server  # type: ignore[assignment]
        process._execute(command(name, rows), REGISTRATION)  # type: ignore[arg-type]

    execute(old, "a", rows)
    (first,) = snapshot_threads()
    # Meanwhile the coordinator has given up the first checkpoint.
    execute(new, "b")
    execute(new, "b")
    (second,) = [thread for thread in snapshot_threads() if thread is not first]
    writing = {"checkpoint": "b", "incarnation": 11, "state": "writing"}
    old.may_end.set()
    first.join()
    assert process._snapshots.report == writing
    new.may_end.set()
    second.join()
    files = {"rows": {"bytes": 1, "sha256": "rows"}, "dense": {"bytes": 2, "sha256": "dense"}}
    assert process._snapshots.report == {**writing, "state": "written", **files}


def test_a_snapshot_of_an_earlier_incarnation_is_not_reported(make: Make) -> None:
    process, server = make(), Server()
    process._server = server  # type: ignore[assignment]
    process._execute(command("a"), REGISTRATION)  # type: ignore[arg-type]
    (first,) = snapshot_threads()
    process._execute(command("a"), REGISTRATION | {"incarnation": 12})  # type: ignore[arg-type, typeddict-item]
    (second,) = [thread for thread in snapshot_threads() if thread is not first]
    assert process._snapshots.report == {"checkpoint": "a", "incarnation": 12, "state": "writing"}
    # The shard loads again: no snapshot is being written.
    process._snapshots.forget()
    server.may_end.set()
    first.join()
    second.join()
    assert process._snapshots.report is None


def test_a_lease_runs_from_before_the_heartbeat_was_sent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator counts from the arrival: a shard that counted from the response could outlive its lease."""
    events: list[str] = []
    leases: list[tuple[str, float]] = []

    class HeartbeatClient(Client):
        def shard_heartbeat(self, incarnation: int, sequence: int, **more: Any) -> dict[str, Any]:
            events.append("heartbeat")
            self.sent_at = 100.0
            return HEARTBEAT

    class Leased:
        failure = None
        address = "127.0.0.1:2"

        def status(self) -> str:
            return "{}"

        def extend_lease(self, sent: str, lease_s: float) -> None:
            leases.append((sent, lease_s))

    def moment() -> str:
        events.append("moment")
        return f"moment {len(events)}"

    monkeypatch.setattr("elasticrec._core.Moment", moment)
    process = make(HeartbeatClient())
    monkeypatch.setattr(process, "_figures", lambda server: {})
    monkeypatch.setattr(process, "_wait_for_heartbeat", lambda next_s: None)
    process._server = Leased()  # type: ignore[assignment]
    assert process._heartbeat(REGISTRATION)  # type: ignore[arg-type]
    assert events == ["moment", "heartbeat"] and leases == [("moment 1", 5.0)]
    assert process._lease_until == 105.0, "the lease runs from the time the request was sent"
