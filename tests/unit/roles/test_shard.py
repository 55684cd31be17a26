"""The process of a parameter server without a table or a socket: what it makes of the coordinator's answers."""

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
from elasticrec.roles.shard import DamagedError, ShardProcess
from elasticrec.roles.start import write_start
from elasticrec.run import Run

PLACE: dict[str, Any] = {
    "incarnation": 11,
    "index": 1,
    "epoch": 1,
    "partitions": [2, 4],
    "boundaries": [],
    "skipped": [],
    "checkpoint": {"name": "ps-00000001-000001", "parts": []},
}
BEAT: dict[str, Any] = {"lease_s": 5.0, "next_s": 0.0, "commands": []}


class Client:
    """A coordinator that gives these answers, one after the other, or raises them."""

    def __init__(self, *places: dict[str, Any] | Exception) -> None:
        self.places = list(places)
        self.asked: list[dict[str, Any]] = []
        self.deadline_s = 1.0
        self.sent_at = 0.0

    def register(self, role: str, nonce: str, **more: Any) -> dict[str, Any]:
        self.asked.append(more)
        place = self.places.pop(0)
        if isinstance(place, Exception):
            raise place
        return place

    def heartbeat(self, incarnation: int, sequence: int, **more: Any) -> dict[str, Any]:
        return BEAT


Make = Callable[..., ShardProcess]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[ShardProcess] = []
    write_start(Run(tmp_path), {"table": {"partitions": 4}, "num_dense": 0}, np.zeros((1, 0), np.float32))

    def make_one(client: Client | None = None, say: Callable[[str], None] = print) -> ShardProcess:
        options = RoleOptions(tmp_path, "http://127.0.0.1:1", index=1)
        process = ShardProcess(options, ListenAddress(), say, ParameterServers())
        process._client = client or Client()  # type: ignore[assignment]
        made.append(process)
        return process

    yield make_one
    for process in made:
        process._metrics.close()


@pytest.mark.parametrize(
    "refusal", [ConfigError("could not be loaded, although its files are whole"), SurplusError("below 1, got 1")]
)
def test_only_a_shard_that_is_too_much_ends_quietly(
    make: Make, monkeypatch: pytest.MonkeyPatch, refusal: ConfigError
) -> None:
    said: list[str] = []
    client = Client(PLACE, refusal)
    process = make(client, said.append)
    is_surplus = isinstance(refusal, SurplusError)

    def serve() -> None:
        raise MovedError("moved") if is_surplus else DamagedError("out of memory")

    monkeypatch.setattr(process, "_serve", serve)
    if is_surplus:
        process.run()
        assert said[-1] == "shard 1: is not needed any more: below 1, got 1"
    else:
        with pytest.raises(ConfigError, match="its files are whole"):
            process.run()
        assert client.asked[1]["damaged"] == {"ps-00000001-000001": "out of memory"}


def test_a_shard_that_never_had_a_place_says_that_its_number_is_too_high(make: Make) -> None:
    with pytest.raises(ConfigError, match="below 1, got 1"):
        make(Client(SurplusError("below 1, got 1"))).run()


class Server:
    """Writes a snapshot when it is told to go on."""

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
def test_an_old_snapshot_does_not_answer_for_the_next_one(make: Make, rows: str) -> None:
    process, old, new = make(), Server(), Server()
    process._place = PLACE

    def obey(server: Server, name: str, rows: str = "rows") -> None:
        process._server = server  # type: ignore[assignment]
        process._obey(command(name, rows))

    obey(old, "a", rows)
    (first,) = snapshot_threads()
    # meanwhile the coordinator has given that one up
    obey(new, "b")
    obey(new, "b")
    (second,) = [thread for thread in snapshot_threads() if thread is not first]
    writing = {"checkpoint": "b", "incarnation": 11, "state": "writing"}
    old.may_end.set()
    first.join()
    assert process._snapshots.told == writing
    new.may_end.set()
    second.join()
    files = {"rows": {"bytes": 1, "sha256": "rows"}, "dense": {"bytes": 2, "sha256": "dense"}}
    assert process._snapshots.told == {**writing, "state": "written", **files}


def test_a_snapshot_of_before_does_not_answer_for_the_next_incarnation(make: Make) -> None:
    process, server = make(), Server()
    process._server, process._place = server, PLACE  # type: ignore[assignment]
    process._obey(command("a"))
    (first,) = snapshot_threads()
    process._place = PLACE | {"incarnation": 12}
    process._obey(command("a"))
    (second,) = [thread for thread in snapshot_threads() if thread is not first]
    assert process._snapshots.told == {"checkpoint": "a", "incarnation": 12, "state": "writing"}
    # it loads again, and nothing is written
    process._snapshots.forget()
    server.may_end.set()
    first.join()
    second.join()
    assert process._snapshots.told is None


def test_a_lease_runs_from_before_the_sign_of_life_was_sent(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator counts from when it came: a shard that counted from the answer could outlive its lease."""
    events: list[str] = []
    leases: list[tuple[str, float]] = []

    class Beating(Client):
        def heartbeat(self, incarnation: int, sequence: int, **more: Any) -> dict[str, Any]:
            events.append("heartbeat")
            self.sent_at = 100.0
            return BEAT

    class Leased:
        failure = None
        address = "127.0.0.1:2"

        def status(self) -> str:
            return "{}"

        def extend_lease(self, asked: str, lease_s: float) -> None:
            leases.append((asked, lease_s))

    def moment() -> str:
        events.append("moment")
        return f"moment {len(events)}"

    monkeypatch.setattr("elasticrec._core.Moment", moment)
    process = make(Beating())
    monkeypatch.setattr(process, "_figures", lambda server: {})
    monkeypatch.setattr(process, "_rest", lambda next_s: None)
    process._server, process._place = Leased(), PLACE  # type: ignore[assignment]
    assert process._beat()
    assert events == ["moment", "heartbeat"] and leases == [("moment 1", 5.0)]
    assert process._lease_until == 105.0, "from when the request was sent that was answered, not from now"
