"""Cube servers and clients through the binding: versions are installed, looked up and retired."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from elasticrec import _core
from elasticrec.bench.cube_versions import partitions_of
from elasticrec.errors import ConfigError, ModelError, UnavailableError
from support.store import wait_until

PARTITIONS = 256
COLUMNS = [("version", 1), ("deep", 2)]
SIGNS = np.arange(2000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
NONE = np.empty(0, np.uint64)


def rows_of(signs: npt.NDArray[np.uint64], version: int) -> npt.NDArray[np.float32]:
    """Return rows that contain their version and their sign."""
    return np.stack([np.full(len(signs), version), signs % 1009, signs % 7], axis=1).astype(np.float32)


def write_base(path: Path, version: int) -> str:
    writer = _core.CubeWriter(str(path), COLUMNS, row_type="f32", num_partitions=PARTITIONS)
    partitions = partitions_of(SIGNS)
    for partition in range(PARTITIONS):
        own = SIGNS[partitions == partition]
        writer.add(partition, own, rows_of(own, version))
    writer.finish()
    return str(path)


def write_delta(path: Path, version: int, changed: npt.NDArray[np.uint64], removed: npt.NDArray[np.uint64]) -> str:
    writer = _core.DeltaWriter(str(path), COLUMNS, row_type="f32", num_partitions=PARTITIONS)
    for partition in range(PARTITIONS):
        own, own_removed = (signs[partitions_of(signs) == partition] for signs in (changed, removed))
        writer.add(partition, own, rows_of(own, version), own_removed)
    writer.finish()
    return str(path)


@pytest.fixture
def serve() -> Iterator[Callable[[int, int], _core.CubeServer]]:
    servers = []

    def start(first: int, end: int) -> _core.CubeServer:
        server = _core.CubeServer(
            "ctr", address="127.0.0.1:0", token="secret", partitions=(first, end), num_partitions=PARTITIONS
        )
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


Serve = Callable[[int, int], _core.CubeServer]


def connect(*shards: list[_core.CubeServer]) -> _core.CubeClient:
    addresses = [[server.address for server in shard] for shard in shards]
    return _core.CubeClient("ctr", addresses, token="secret", deadline_s=60.0)


def connect_with_short_deadline(server: _core.CubeServer) -> _core.CubeClient:
    """Return a client with a short deadline, which also applies to connecting; retry while the machine stalls."""
    while True:
        try:
            return _core.CubeClient("ctr", [[server.address]], token="secret", deadline_s=0.2)
        except UnavailableError:
            time.sleep(0.1)


def test_a_base_and_its_delta(serve: Serve, tmp_path: Path) -> None:
    low, high = serve(0, 100), serve(100, 256)
    base = write_base(tmp_path / "base", 7)
    delta = write_delta(tmp_path / "delta", 8, SIGNS[:50], SIGNS[50:60])
    for server in (low, high):
        server.install_base(7, [base])
        server.install_delta(8, 7, [delta])
        assert server.versions() == [7, 8]
    client = connect([low], [high])
    asked = np.concatenate([SIGNS, NONE + 1, np.array([3, 5], np.uint64)])
    rows, present = client.get(7, asked)
    assert present.tolist() == [True] * len(SIGNS) + [False] * 2
    assert (rows[: len(SIGNS)] == rows_of(SIGNS, 7)).all()
    assert (rows[len(SIGNS) :] == 0).all()
    rows, present = client.get(8, asked)
    assert (rows[:50] == rows_of(SIGNS[:50], 8)).all()
    assert (rows[50:60] == 0).all() and not present[50:60].any()
    assert (rows[60 : len(SIGNS)] == rows_of(SIGNS[60:], 7)).all()
    assert client.layout(8) == (COLUMNS, "f32")
    assert sum(server.counters()["keys"] for server in (low, high)) == 2 * len(asked)
    assert sum(server.counters()["misses"] for server in (low, high)) == 2 + 12
    assert sum(dict(server.held())[8]["rows"] for server in (low, high)) == len(SIGNS) - 10
    buckets, seconds = low.latency()
    assert seconds > 0 and buckets[-1][0] == float("inf")


def test_seek_returns_rows_as_they_are_stored(serve: Serve, tmp_path: Path) -> None:
    server = serve(0, PARTITIONS)
    server.install_base(1, [write_base(tmp_path / "base", 1)])
    rows, present = server.seek(1, np.array([SIGNS[3], 5], np.uint64))
    assert np.frombuffer(rows, np.float32).reshape(2, 3).tolist() == [*rows_of(SIGNS[3:4], 1).tolist(), [0, 0, 0]]
    assert present.tolist() == [True, False]
    with pytest.raises(ModelError, match="version 2: not held by this server, held: 1"):
        server.seek(2, SIGNS)


def test_unusable_versions_are_refused(serve: Serve, tmp_path: Path) -> None:
    server = serve(0, PARTITIONS)
    base = write_base(tmp_path / "base", 1)
    delta = write_delta(tmp_path / "delta", 2, SIGNS[:5], NONE)
    with pytest.raises(ModelError, match="version 1: not held by this server, held: none"):
        server.install_delta(2, 1, [delta])
    server.install_base(1, [base])
    with pytest.raises(ModelError, match="version 1: already held"):
        server.install_base(1, [base])
    with pytest.raises(FileNotFoundError):
        server.install_base(2, [str(tmp_path / "none")])
    damaged = bytearray(Path(base).read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (tmp_path / "damaged").write_bytes(damaged)
    with pytest.raises(ModelError, match="damaged"):
        server.install_base(2, [str(tmp_path / "damaged")])
    assert server.versions() == [1]
    with pytest.raises(ModelError, match="version 9: not held by this server, held: 1"):
        server.retire(9)
    with pytest.raises(ConfigError, match="expected partitions between 0 and 8, got 3 to 3"):
        _core.CubeServer("ctr", address="127.0.0.1:0", token="", partitions=(3, 3), num_partitions=8)
    with pytest.raises(ConfigError, match="the port is in use"):
        _core.CubeServer("ctr", address=server.address, token="", partitions=(0, 8), num_partitions=8)


def test_clients_get_the_reason_for_missing_rows(serve: Serve, tmp_path: Path) -> None:
    server = serve(0, PARTITIONS)
    server.install_base(1, [write_base(tmp_path / "base", 1)])
    client = connect([server])
    with pytest.raises(ModelError, match="version 2: no shards hold it, versions held: 1"):
        client.get(2, SIGNS)
    with pytest.raises(ConfigError, match="expected the token of the model, got another token"):
        _core.CubeClient("ctr", [[server.address]], token="guess", deadline_s=60.0)
    with pytest.raises(ConfigError, match="expected 256 partitions, got 100"):
        connect([serve(0, 100)])
    with pytest.raises(ValueError, match="deadline_s"):
        _core.CubeClient("ctr", [[server.address]], token="secret", deadline_s=-1.0)
    expected = [{"shard": 0, "address": server.address, "down": None, "versions": [1], "waiting": 0}]
    # The client updates this in the background.
    wait_until(lambda: client.info() == expected, lambda: str(client.info()))
    short = connect_with_short_deadline(server)
    server.stop()
    with pytest.raises(UnavailableError, match="cube shard 0: no replica answered in "):
        short.get(1, SIGNS)


def test_versions_change_while_threads_read(serve: Serve, tmp_path: Path) -> None:
    """Replicas of one shard load deltas one after another; every answer is of the requested version."""
    servers = [serve(0, PARTITIONS), serve(0, PARTITIONS)]
    base = write_base(tmp_path / "base", 1)
    for server in servers:
        server.install_base(1, [base])
    client = connect(servers)
    current, failures, reads, is_done = [1], [], [0], threading.Event()

    def read() -> None:
        while not is_done.is_set() and not failures:
            version = current[0]
            try:
                rows, _ = client.get(version, SIGNS[:100])
                if not (rows[:, 0] == version).all():
                    failures.append(f"version {version}: {set(rows[:, 0])}")
            except ModelError as error:
                # The version may have been retired after `current` was read.
                if version >= current[0] - 1:
                    failures.append(str(error))
            reads[0] += 1

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version in range(2, 40):
        delta = write_delta(tmp_path / f"delta-{version}", version, SIGNS[:100], NONE)
        for server in servers:
            server.install_delta(version, version - 1, [delta])
        current[0] = version
        for server in servers:
            if version > 3:
                server.retire(version - 3)
    seen, deadline = reads[0], time.monotonic() + 120
    while reads[0] < seen + 20 and not failures and time.monotonic() < deadline:
        time.sleep(0.01)
    is_done.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert reads[0] >= seen + 20
    assert servers[0].versions() == [37, 38, 39]
