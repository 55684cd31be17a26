"""A process of the store: start, lookups, shutdown."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticrec.cube.node import NodeOptions, StoreNode
from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.security import Security
from elasticrec.repository.repository import Repository
from support.store import MODEL, NUM_PARTITIONS, publish


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    (tmp_path / MODEL).mkdir()
    return Repository.open(tmp_path, MODEL)


Start = Callable[[], StoreNode]


@pytest.fixture
def start(repository: Repository) -> Iterator[Start]:
    """Make nodes that poll only when a test calls `_poll`."""
    nodes: list[StoreNode] = []

    def make() -> StoreNode:
        cache = Path(repository.location).parent / "cache"
        options = NodeOptions(repository, 0, 1, "127.0.0.1", 0, 0, Security(), cache, keep=2, poll_s=60.0)
        nodes.append(StoreNode(options))
        return nodes[-1]

    yield make
    for node in nodes:
        node._web.stop()
        if node._server is not None:
            node._server.stop()


def test_a_node_starts_despite_a_damaged_newer_version(
    repository: Repository, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = publish(repository)
    repository.offer(first.number)
    newer = publish(repository)
    (Path(repository.location) / newer.name / "manifest.json").write_bytes(b"{")
    node = start()
    node._poll()
    assert caplog.messages[0] == f"shard 0 of 1: partitions 0 to {NUM_PARTITIONS - 1}"
    assert node.status()["versions"] == [first.number] and node.is_ready()
    assert node.seek([7]).version == first.number


def test_lookups_are_refused_until_a_version_is_offered(
    repository: Repository, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    node = start()
    node._poll()
    assert caplog.messages == [f"waiting for the first version in {repository.location}"]
    assert not node.is_ready()
    first = publish(repository).number
    node._poll()
    with pytest.raises(UnavailableError, match="cube: no version is offered yet"):
        node.seek([7])
    repository.offer(first)
    node._poll()
    assert node.seek([7]).version == first


def test_a_node_does_not_listen_to_other_machines_without_tls(repository: Repository) -> None:
    options = NodeOptions(repository, 0, 1, "0.0.0.0", 0, 0, Security(token="secret"), Path(), keep=2, poll_s=60.0)
    with pytest.raises(ConfigError, match="cube"):
        StoreNode(options)


def test_a_hanging_repository_does_not_delay_the_shutdown(
    repository: Repository, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, end = threading.Event(), threading.Event()

    def hang() -> list[int]:
        hanging.set()
        end.wait()
        return []

    monkeypatch.setattr(repository, "versions", hang)
    node = start()
    running = threading.Thread(target=node.run)
    running.start()
    assert hanging.wait(120)
    node.stop()
    running.join(120)
    is_over = not running.is_alive()
    end.set()
    assert is_over
