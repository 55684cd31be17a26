"""The online store with real processes: versions arrive, replicas die and hang; readers see one version at a time."""

import base64
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.errors import ModelError
from support.store import MODEL, NUM_ROWS, Readers, StoreProcesses, publish, wait_until

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs/metrics.md"

Start = Callable[[int, int], StoreProcesses]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a store with a first version and a rollout."""
    started: list[StoreProcesses] = []

    def make(shards: int, replicas: int) -> StoreProcesses:
        store = StoreProcesses(tmp_path, shards, replicas)
        started.append(store)
        publish(store.repository)
        store.start_all()
        store.deliver()
        store.wait_for_version(1)
        return store

    yield make
    for store in started:
        store.stop()


def models(store: StoreProcesses, *arguments: str) -> str:
    """Run `elasticrec models …`, which must succeed; return its output."""
    command = [sys.executable, "-m", "elasticrec", "models", *arguments]
    done = subprocess.run(command, cwd=store.directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ask(url: str, body: bytes | None = None) -> bytes:
    with urllib.request.urlopen(urllib.request.Request(url, data=body), timeout=60) as answer:
        content: bytes = answer.read()
        return content


def status(store: StoreProcesses, shard: int, replica: int) -> dict[str, Any]:
    """Return the status of a replica, or an empty dict while it does not answer."""
    try:
        found: dict[str, Any] = json.loads(ask(f"{store.url(shard, replica)}/v1/status"))
    except OSError:
        return {}
    return found


def held(store: StoreProcesses, shard: int, replica: int) -> list[int]:
    """Return the versions that a replica holds."""
    versions: list[int] = status(store, shard, replica).get("versions", [])
    return versions


def test_no_read_fails_or_mixes_versions_during_two_hundred_publishes(start: Start) -> None:
    store = start(2, 2)
    with Readers(store).reading() as readers:
        number = 1
        for count in range(2, 201):
            # Every fortieth version is a base, the others are deltas.
            number = publish(store.repository, None if count % 40 == 0 else number).number
        store.wait_for_version(number)
        before = readers.num_reads
        wait_until(lambda: readers.num_reads > before + 20, store.output)
    assert number == 200
    assert "switched to 200" in store.controllers[0].output()


def test_no_read_fails_while_a_replica_is_down(start: Start) -> None:
    store = start(2, 2)
    with Readers(store).reading() as readers:
        for round_number in range(3):
            node = store.nodes[round_number % 2, 0]
            node.kill()
            before = readers.num_reads
            version = publish(store.repository, store.repository.current()).number
            store.wait_for_version(version)
            wait_until(lambda before=before: readers.num_reads > before + 50, store.output)
            node.start()
            where = (round_number % 2, 0)
            wait_until(lambda where=where, version=version: version in held(store, *where), store.output)
    assert "late: shard 0" in store.controllers[0].output()


def test_a_replica_that_is_killed_while_it_loads_catches_up(start: Start) -> None:
    store = start(1, 2)
    many = np.arange(1, 400_001, dtype=np.uint64)
    with Readers(store).reading():
        for delay_s in (0.0, 0.05, 0.2):
            version = publish(store.repository, signs=many).number
            time.sleep(delay_s)
            store.nodes[0, 1].kill()
            store.nodes[0, 1].start()
            store.wait_for_version(version)
            wait_until(lambda version=version: version in held(store, 0, 1), store.output)


def test_a_rollback_holds_against_new_deltas_until_it_is_resumed(start: Start) -> None:
    store = start(1, 2)
    base = store.repository.current()
    assert base is not None
    number = publish(store.repository, base).number
    store.wait_for_version(number)
    with Readers(store).reading():
        started = time.monotonic()
        models(store, "list", f"models/{MODEL}")
        rolled = time.monotonic()
        models(store, "rollback", f"models/{MODEL}:{base}")
        assert store.repository.current() == base
        # On a slow machine, several times as long as another command.
        assert time.monotonic() - rolled < max(10, 5 * (rolled - started))
        for _ in range(10):
            number = publish(store.repository, number).number
            time.sleep(0.1)
            state = store.repository.state()
            assert state is not None and (state.version, state.is_held) == (base, True)
        store.controllers[0].wait_for("held by a rollback")
        models(store, "resume", f"models/{MODEL}")
        store.wait_for_version(number)


def test_a_replica_that_never_loads_is_named_and_does_not_block(tmp_path: Path) -> None:
    """The files that one of the two replicas reads are damaged."""
    store = StoreProcesses(tmp_path, 1, 2)
    try:
        publish(store.repository)
        shutil.copytree(tmp_path / "models", tmp_path / "broken")
        store.start(0, 0)
        store.start(0, 1, model=f"broken/{MODEL}")
        store.deliver()
        store.wait_for_version(1)
        wait_until(lambda: held(store, 0, 1) == [1], store.output)
        with Readers(store).reading():
            version = publish(store.repository).number
            # The version appears already damaged, so that the replica never sees it intact.
            shutil.copytree(tmp_path / "models" / MODEL / "2", tmp_path / "damaged")
            flip_a_bit(tmp_path / "damaged/cube/part-00001")
            (tmp_path / "damaged").rename(tmp_path / "broken" / MODEL / "2")
            store.wait_for_version(version)
            store.controllers[0].wait_for(r"late: shard 0 .*: cannot load 2: .*part-00001: .*damaged")
        assert held(store, 0, 1) == [1]
    finally:
        store.stop()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.unlink()
    path.write_bytes(content)


def test_a_damaged_version_is_refused_and_the_previous_one_stays(start: Start) -> None:
    store = start(2, 1)
    with Readers(store).reading():
        # Damaged before its manifest is written, so that no replica sees it intact.
        with pytest.MonkeyPatch.context() as patch:
            commit = store.repository.commit

            def damaged(draft, *rest):  # type: ignore[no-untyped-def]
                flip_a_bit(draft.directory / "cube/part-00002")
                return commit(draft, *rest)

            patch.setattr(store.repository, "commit", damaged)
            bad = publish(store.repository).number
        store.nodes[1, 0].wait_for(f"version {bad} cannot be loaded: .*part-00002")
        store.controllers[0].wait_for(r"late: .*part-00002")
        assert store.repository.current() == 1
        store.wait_for_version(publish(store.repository).number)


def test_a_delta_whose_base_is_missing_is_named(start: Start) -> None:
    store = start(1, 1)
    publish(store.repository)
    store.wait_for_version(2)
    delta = publish(store.repository, 2).number
    store.wait_for_version(delta)
    # The replica has the whole chain in memory; after a restart it has not.
    (store.directory / "models" / MODEL / "2/manifest.json").unlink()
    node = store.nodes[0, 0]
    node.kill()
    node.start()
    node.wait_for(r"its (base|parent), version 2, is missing")
    with pytest.raises(ModelError, match="version 2, is missing"):
        publish(store.repository, delta)
    store.wait_for_version(publish(store.repository).number)


def test_all_replicas_are_restarted_one_by_one(start: Start) -> None:
    store = start(2, 2)
    number = 1
    with Readers(store).reading():
        for where in store.nodes:
            node = store.nodes[where]
            assert node.stop() == 0
            number = publish(store.repository, number).number
            node.start()
            wait_until(lambda where=where, number=number: number in held(store, *where), store.output)
        store.wait_for_version(number)


def test_another_number_of_shards_has_the_same_rows(start: Start, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two shards, then five, load a version of three parts; removed signs are gone in both."""
    store = start(2, 2)
    signs = np.arange(1, NUM_ROWS + 1, dtype=np.uint64)
    kept, removed = signs[signs % 7 != 0], signs[signs % 7 == 0]
    number = publish(store.repository, 1, signs=kept, removed=removed).number
    store.wait_for_version(number)
    rows, is_there = store.client().get(number, signs)
    assert (is_there == (signs % 7 != 0)).all() and (rows[is_there, 0] == signs[is_there]).all()
    assert not rows[~is_there].any()
    store.stop()
    five = StoreProcesses(store.directory, 5, 1)
    five.start_all()
    try:
        for shard in range(5):
            wait_until(lambda shard=shard: number in held(five, shard, 0), five.output)
        again, there_again = five.client().get(number, signs)
        assert (again == rows).all() and (there_again == is_there).all()
    finally:
        five.stop()


def test_docs_list_every_metric_and_seek_answers_json(start: Start) -> None:
    store = start(1, 1)
    # A replica learns of the offer at its next poll.
    wait_until(lambda: status(store, 0, 0).get("current") == 1, store.output)
    answer = json.loads(ask(f"{store.url(0, 0)}/DictService/seek", b'{"keys": [7, 999999], "version_required": true}'))
    assert [value["status"] for value in answer["values"]] == [0, 2**32 - 1] and answer["version"] == "1"
    assert np.frombuffer(base64.b64decode(answer["values"][0]["value"]), "<f4").tolist() == [7.0, 1.0]
    text = ask(f"{store.url(0, 0)}/metrics").decode()
    documented = dict(re.findall(r"^\| `(elasticrec_cube_\w+)` \| (\w+) \|", DOCS.read_text(), re.M))
    assert dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M)) == documented
    values = set(re.findall(r"^(\w+?)(?:_bucket|_sum|_count)?\{[^}]*\} [\d.e+-]+$", text, re.M))
    assert values == set(documented)
    assert 'elasticrec_cube_misses_total{model="small",shard="0"} 1' in text
    assert ask(f"{store.url(0, 0)}/ready") == b'{"ready":true}'


def test_a_hung_replica_delays_neither_reads_nor_rollouts(start: Start) -> None:
    store = start(1, 2)
    with Readers(store).reading() as readers:
        store.nodes[0, 0].send(signal.SIGSTOP)
        before = readers.num_reads
        version = publish(store.repository, 1).number
        store.wait_for_version(version)
        wait_until(lambda: readers.num_reads > before + 10, store.output)
        store.nodes[0, 0].send(signal.SIGCONT)
        wait_until(lambda: version in held(store, 0, 0), store.output)
