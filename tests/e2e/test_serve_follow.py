"""A server follows new versions without failed or mixed answers, and survives bad versions."""

import shutil
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from elasticrec.errors import UnavailableError
from elasticrec.repository.repository import Repository
from elasticrec.serving.client import Client
from support.harness import serving
from support.request_threads import RequestThreads, metrics_of, score_of
from support.store import MODEL, Process, StoreProcesses, free_port, publish, wait_until

pytestmark = pytest.mark.slow

FAST = ("--set", "serve.poll_s=0.05")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """Return a repository whose first version is current."""
    (tmp_path / "models" / MODEL).mkdir(parents=True)
    repository = Repository.open(tmp_path / "models", MODEL)
    offer(repository)
    return repository


def offer(repository: Repository, parent: int | None = None) -> int:
    version = publish(repository, parent)
    repository.offer(version.number)
    return version.number


def metric(name: str, variant: str = "", model: str = MODEL) -> str:
    return f'{name}{{model="{model}",variant="{variant}"}}'


def test_new_bases_and_deltas_cause_no_failed_or_mixed_answer(tmp_path: Path, repository: Repository) -> None:
    with serving(f"models/{MODEL}", *FAST, cwd=tmp_path) as server, RequestThreads(server.url).running() as requests:
        version = 1
        for step in range(12):
            version = offer(repository, None if step % 5 == 4 else version)
            requests.wait_for(version)
        figures = metrics_of(server.url)
    assert requests.wrong == []
    assert len(requests.answers) == 13
    assert (figures[metric("model_version")], figures[metric("offered_version")]) == (13, 13)
    assert figures[metric("load_failures_total")] == 0


def test_a_rollback_is_followed(tmp_path: Path, repository: Repository) -> None:
    offer(repository)
    with serving(f"models/{MODEL}", *FAST, cwd=tmp_path) as server, Client(server.url) as client:
        assert client.ask([{"0": 1}]).version == 2
        repository.rollback(1)
        wait_until(lambda: client.ask([{"0": 1}]).version == 1, lambda: "the server did not follow the rollback")
        assert client.predict([{"0": 1}]).item() == score_of(1)


def test_a_version_given_by_number_is_not_replaced(tmp_path: Path, repository: Repository) -> None:
    offer(repository)
    with serving(f"models/{MODEL}:1", *FAST, cwd=tmp_path) as server, Client(server.url) as client:
        offer(repository)
        assert {client.ask([{"0": 1}]).version for _ in range(50)} == {1}


def test_a_damaged_version_is_logged_and_counted_and_the_previous_one_stays(
    tmp_path: Path, repository: Repository
) -> None:
    log = tmp_path / "serve.log"
    with (
        serving(f"models/{MODEL}", *FAST, cwd=tmp_path, log=log) as server,
        RequestThreads(server.url).running() as requests,
    ):
        damaged = publish(repository, 1)
        path = tmp_path / "models" / MODEL / damaged.name / damaged.parts[0]
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        repository.offer(damaged.number)
        wait_until(lambda: metrics_of(server.url)[metric("load_failures_total")] >= 2, lambda: "no failure is counted")
        figures = metrics_of(server.url)
        assert (figures[metric("model_version")], figures[metric("offered_version")]) == (1, 2)
        version = offer(repository)
        requests.wait_for(version)
    assert requests.wrong == [] and set(requests.answers) == {1, version}
    assert log.read_text().count("version 2 cannot be loaded, still serving 1: ") == 1


def test_a_model_is_served_while_its_repository_is_missing(tmp_path: Path, repository: Repository) -> None:
    log = tmp_path / "serve.log"
    with (
        serving(f"models/{MODEL}", *FAST, cwd=tmp_path, log=log) as server,
        RequestThreads(server.url).running() as requests,
    ):
        aside = tmp_path / "aside"
        (tmp_path / "models").rename(aside)
        requests.wait_for(1, 200)
        shutil.copytree(aside, tmp_path / "models")
        version = offer(repository, 1)
        requests.wait_for(version)
    assert requests.wrong == []


def test_a_server_may_wait_for_its_first_version(tmp_path: Path) -> None:
    repository = Repository.open(tmp_path / "models", MODEL)
    (tmp_path / "models" / MODEL).mkdir(parents=True)
    port = free_port()
    arguments = ["serve", f"models/{MODEL}", "--wait", "--port", str(port), *FAST]
    server = Process(arguments, tmp_path, tmp_path / "serve.log")
    try:
        server.wait_for("waiting: ")
        with Client(f"http://127.0.0.1:{port}", MODEL, retries=0) as client:
            assert not client.is_ready()
            with pytest.raises(UnavailableError, match="503: model `small`: no version is ready yet"):
                client.predict([{"0": 1}])
            offer(repository)
            wait_until(client.is_ready, server.output)
            assert client.predict([{"0": 1}]).item() == score_of(1)
    finally:
        assert server.stop() == 0


@pytest.fixture
def variants(tmp_path: Path, repository: Repository) -> Path:
    """Write a job that serves three versions as variants, and the last one also as a model of its own."""
    offer(repository)
    offer(repository)
    shares = {"a": (1, 60), "b": (2, 30), "c": (3, 10)}
    served = [
        {"name": name, "model": f"models/{MODEL}:{version}", "weight": weight}
        for name, (version, weight) in shares.items()
    ]
    job = {
        "name": "ab",
        "data": {"format": "criteo", "train": "."},
        "serve": {"models": [{"name": "ab", "variants": served}, f"models/{MODEL}"]},
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def test_variants_share_requests_by_weight_and_a_key_keeps_its_variant(tmp_path: Path, variants: Path) -> None:
    with serving("--job", str(variants), cwd=tmp_path) as server, Client(server.url, "ab", timeout_s=30) as client:
        names = {1: "a", 2: "b", 3: "c"}
        for with_key in (True, False):
            seen: Counter[str | None] = Counter()
            for user in range(20_000):
                answer = client.ask([{"0": 1}], key=f"user-{user}" if with_key else None)
                assert answer.variant == names[answer.version] and answer.scores.item() == score_of(answer.version)
                seen[answer.variant] += 1
            for name, share in {"a": 0.6, "b": 0.3, "c": 0.1}.items():
                assert abs(seen[name] / 20_000 - share) < 0.01, seen
        for user in range(20):
            assert len({client.ask([{"0": 1}], key=f"user-{user}").variant for _ in range(10)}) == 1
        assert client.ask([{"0": 1}], key="user-1", variant="c").variant == "c"
        with pytest.raises(UnavailableError, match="unknown variant `z`, expected one of `a`, `b`, `c`"):
            client.ask([{"0": 1}], variant="z")
        with Client(server.url, MODEL) as other:
            answer = other.ask([{"0": 1}])
            assert (answer.version, answer.variant) == (3, None)


def test_after_kill_9_a_server_answers_again_and_sigterm_drains(tmp_path: Path, repository: Repository) -> None:
    port = free_port()
    arguments = ["serve", f"models/{MODEL}", "--port", str(port)]
    server = Process(arguments, tmp_path, tmp_path / "serve.log")
    try:
        server.wait_for("serving small version 1 ")
        # Enough attempts for the time of a restart.
        with RequestThreads(f"http://127.0.0.1:{port}", retries=100).running() as requests:
            for _ in range(3):
                requests.wait_for(1, 100)
                server.kill()
                server.start()
                requests.wait_for(1, 100)
        assert requests.wrong == []
        with RequestThreads(f"http://127.0.0.1:{port}", retries=0).running() as requests:
            requests.wait_for(1, 100)
            server.send(signal.SIGTERM)
            assert server.process.wait(60) == 0
            wait_until(lambda: len(requests.wrong) > 0, lambda: "the server still answers")
        # Every accepted request was answered; only refused connections failed.
        assert all("connection refused" in wrong.lower() for wrong in requests.wrong), requests.wrong[:5]
    finally:
        if server.process.poll() is None:
            server.kill()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcesses]:
    """Start a store of two shards with a replica each, with a first version and a rollout."""
    store = StoreProcesses(tmp_path, 2, 1)
    publish(store.repository)
    store.start_all()
    store.deliver()
    store.wait_for_version(1)
    yield store
    store.stop()


def store_options(store: StoreProcesses, *more: str) -> tuple[str, ...]:
    addresses = f"cube.addresses={store.addresses}".replace("'", '"')
    shards = ("--set", "cube.shards=2", "--set", addresses, "--set", "serve.rows=store")
    return (f"models/{MODEL}", *FAST, *shards, "--set", "serve.store_timeout_ms=2000", *more)


def test_rows_from_a_store_are_of_the_version_that_scores(tmp_path: Path, store: StoreProcesses) -> None:
    with serving(*store_options(store), cwd=tmp_path) as server, RequestThreads(server.url).running() as requests:
        version = 1
        for step in range(6):
            version = publish(store.repository, None if step == 3 else version).number
            requests.wait_for(version)
    assert requests.wrong == []
    assert set(requests.answers) >= {1, version}


def test_a_lost_shard_gives_errors_or_zeros_and_is_counted(tmp_path: Path, store: StoreProcesses) -> None:
    instances = [{"0": sign} for sign in range(1, 101)]
    zeros = ("--set", "serve.on_lost_shard=zeros")
    patient = ("--set", "serve.store_timeout_ms=300")
    with (
        serving(*store_options(store, *patient), cwd=tmp_path) as strict,
        serving(*store_options(store, *zeros), cwd=tmp_path) as lenient,
        Client(strict.url, retries=0) as asks_strict,
        Client(lenient.url, retries=0) as asks_lenient,
    ):
        assert (asks_lenient.predict(instances) == score_of(1)).all()
        store.nodes[1, 0].kill()
        with pytest.raises(UnavailableError, match="503: cube shard 1: no replica answered in"):
            asks_strict.predict(instances)
        scores = asks_lenient.predict(instances).ravel().tolist()
        # Lost rows read as zeros, so only the weights' part of the score remains.
        assert set(scores) == {score_of(1), 1000.0}
        lost = scores.count(1000.0)
        figures = metrics_of(lenient.url)
        assert figures[metric("signs_lost_total")] == lost and figures[metric("signs_missed_total")] == 0
        assert metrics_of(strict.url)['requests_total{protocol="http",code="503"}'] == 1
        store.start(1, 0)
        wait_until(lambda: (asks_lenient.predict(instances) == score_of(1)).all(), store.output)

        def is_back() -> bool:
            try:
                return bool((asks_strict.predict(instances) == score_of(1)).all())
            except UnavailableError:
                return False

        wait_until(is_back, store.output)


def test_a_store_that_hangs_blocks_no_socket_thread(tmp_path: Path, store: StoreProcesses) -> None:
    instances = [{"0": sign} for sign in range(1, 101)]

    def ask() -> list[float]:
        with Client(server.url, retries=0, timeout_s=120) as client:
            return client.predict(instances).ravel().tolist()

    patient = ("--set", "serve.store_timeout_ms=60000")
    with serving(*store_options(store, *patient), cwd=tmp_path) as server, ThreadPoolExecutor(8) as threads:
        assert set(ask()) == {score_of(1)}
        for node in store.nodes.values():
            node.send(signal.SIGSTOP)
        try:
            asked = [threads.submit(ask) for _ in range(8)]
            # Enough time for all requests to arrive; a socket thread that waited for rows would not answer these.
            for _ in range(200):
                urllib.request.urlopen(f"{server.url}/health", timeout=20).close()
            assert not any(one.done() for one in asked)
        finally:
            for node in store.nodes.values():
                node.send(signal.SIGCONT)
        assert all(set(one.result()) == {score_of(1)} for one in asked)
