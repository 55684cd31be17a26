"""The requests of each strategy, counted by real servers on real sockets."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.config import Job, parse_job
from elasticrec.config.strategies import STRATEGIES
from elasticrec.config.train import ParameterServers, Train
from elasticrec.data.batches import open_batches
from elasticrec.data.demo import write_demo
from elasticrec.data.units import Unit, UnitSplit, plan_units
from elasticrec.errors import ConfigError, ModelError, UnavailableError
from elasticrec.net.logs import RepeatFilter
from elasticrec.roles.dry_run import run_dry
from elasticrec.roles.member import ShutdownRequest
from elasticrec.roles.server_link import ServerLink
from elasticrec.roles.start import read_start
from elasticrec.roles.trainer import TrainerProcess
from elasticrec.training.embedding import table_spec
from elasticrec.training.flight import Servers
from elasticrec.training.groups import MergeGroup, UnitBatch, split_batches, split_groups
from elasticrec.training.lanes import Lanes
from elasticrec.training.metrics import FLAT_SIZE
from elasticrec.training.remote import RemoteNetwork
from elasticrec.training.strategies import strategies
from elasticrec.training.strategies.geo import Geo
from elasticrec.training.strategies.half_async import HalfAsync

K = 3
BATCHES = 8  # batches of the only unit: two full groups and a group of two


def job_of(directory: Path, *settings: str) -> Job:
    job = {
        "name": "strategies",
        "data": {"format": "slots", "train": "data", "slots": "0-7"},
        "model": {"kind": "wide_deep", "dim": 4, "hidden": [8]},
        "sparse": {"partitions": 8},
        "dense": {"optimizer": {"kind": "adagrad", "learning_rate": 0.05}},
        "train": {"mode": "ps", "threads": 1, "batch_size": 100, "merge_batches": K},
    }
    return parse_job(job, base=directory, overrides=settings)


class Cluster:
    """Two servers in this process, and the trainer that uses them."""

    def __init__(self, directory: Path, *settings: str) -> None:
        write_demo(directory / "data", samples=BATCHES * 100 - 30, slots=8, hours=1, seed=1)
        self.job = job_of(directory, *settings)
        self.network = RemoteNetwork(self.job)
        spec = {
            "table": table_spec(self.job, self.network.model.columns),
            "num_dense": len(self.network.dense.values),
            "dense": self.job.dense.optimizer.model_dump(include={"kind", "learning_rate"}),
            "num_sums": FLAT_SIZE + 2,
        }
        self.start = self.network.dense.values.numpy().copy()
        self.shards = [self._serve(spec, range(4 * at, 4 * at + 4), at + 1) for at in range(2)]
        self.client = self.connect()
        files = sorted((directory / "data").glob("*/*/*.txt"))
        (self.unit,) = plan_units(files, UnitSplit.of(self.job), 0, 0)
        self.parser = _core.Parser(json.dumps(self.job.features()))

    def _serve(self, spec: dict[str, object], owned: range, incarnation: int) -> _core.PsServer:
        first, end = (partition * len(self.start) // 8 for partition in (owned.start, owned.stop))
        server = _core.PsServer(
            json.dumps({**spec, "owned": {"start": owned.start, "end": owned.stop}}),
            address="127.0.0.1:0",
            run="run",
            token="token",
            incarnation=incarnation,
            epoch=1,
            threads=1,
            files=[],
            dense=self.start[np.newaxis, first:end],
        )
        server.extend_lease(_core.Moment(), 600.0)
        return server

    def connect(self) -> _core.PsClient:
        return _core.PsClient(
            [shard.address for shard in self.shards], run="run", token="token", partitions=8, timeout_s=60
        )

    def batches(self, unit: Unit | None = None) -> Iterator[_core.Batch]:
        return iter(open_batches(self.job, self.parser, [unit or self.unit], shuffle=False))

    def named(self) -> Iterator[UnitBatch]:
        return split_batches(self.batches(), partial(self.parser.empty, self.unit.id))

    def groups(self) -> Iterator[MergeGroup]:
        return split_groups(self.batches(), K, partial(self.parser.empty, self.unit.id))

    def lanes(self, servers: Servers, **settings: int) -> Lanes:
        others = [RemoteNetwork(self.job, self.network.clock) for _ in range(settings.get("lanes", 1) - 1)]
        steps = [partial(network.step, self.client, 0) for network in (self.network, *others)]
        return Lanes(servers, steps, lambda _: None, ParameterServers(**settings), self.network.clock)

    def counted(self, counter: str) -> list[int]:
        return [shard.counters()[counter] for shard in self.shards]

    def stop(self) -> None:
        for shard in self.shards:
            shard.stop()

    def rows(self) -> dict[int, tuple[float, ...]]:
        """Return the pooled rows of each batch of the unit, as a trainer pulls them."""
        pulled = {}
        for batch in self.batches():
            out = np.zeros((batch.num_samples, 8, self.client.width), np.float32)
            pulling = self.client.pull(batch, dense=False)
            self.client.receive(pulling, batch, out, None)
            pulled[batch.index] = tuple(out.flatten().tolist())
        return pulled


class Context:
    """The part of a trainer that `half_async` and `geo` use."""

    def __init__(self, cluster: Cluster, meet: Callable[[], None] = lambda: None) -> None:
        self.job, self.networks, self.meet = cluster.job, [cluster.network], meet


def geo_of(cluster: Cluster) -> Geo:
    return Geo(Context(cluster), cluster.client)  # type: ignore[arg-type]


def test_every_strategy_of_the_job_file_has_its_own_module() -> None:
    choices = get_args(Train.model_fields["strategy"].annotation)
    assert strategies().keys() == STRATEGIES.keys() == set(choices)
    assert len({strategy.__module__ for strategy in strategies().values()}) == len(choices)


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[partial[Cluster]]:
    made = []

    def make(*settings: str) -> Cluster:
        made.append(Cluster(tmp_path / str(len(made)), *settings))
        return made[-1]

    yield partial(make)
    for cluster in made:
        cluster.stop()


@pytest.mark.parametrize(("limit", "lanes"), [(1, 1), (2, 1), (3, 1), (7, 1), (2, 2), (3, 2), (6, 2), (7, 3)])
def test_async_never_exceeds_max_in_flight(clusters: partial[Cluster], limit: int, lanes: int) -> None:
    cluster = clusters()
    lock = threading.Lock()
    in_flight = 0

    class Watched:
        most = 0

        def pull(self, batch: _core.Batch, *, dense: bool) -> _core.PullTicket:
            nonlocal in_flight
            with lock:
                in_flight += 1
                self.most = max(self.most, in_flight)
            return cluster.client.pull(batch, dense=dense)

        def wait_for_ack(self, pushing: _core.PushTicket) -> tuple[bool, bool]:
            nonlocal in_flight
            with lock:
                in_flight -= 1
            return cluster.client.wait_for_ack(pushing)

    watched = Watched()
    strategy = cluster.lanes(watched, max_in_flight=limit, lanes=lanes)
    strategy.run(cluster.named())
    # several lanes may not all be full at the same time
    assert watched.most <= strategy.most_in_flight <= limit
    assert lanes > 1 or watched.most == limit
    assert in_flight == 0
    assert cluster.counted("pushes") == [BATCHES] * 2
    assert sum(cluster.shards[0].samples()) == 4 * (BATCHES * 100 - 30)


def test_a_pull_without_dense_values_keeps_them(clusters: partial[Cluster]) -> None:
    cluster = clusters()
    cluster.lanes(cluster.client, max_in_flight=1).run(cluster.named())
    batch = next(cluster.batches())
    out = np.zeros((batch.num_samples, 8, cluster.client.width), np.float32)
    values = np.full(cluster.client.num_dense, 7, np.float32)
    cluster.client.receive(cluster.client.pull(batch, dense=False), batch, out, values)
    assert (values == 7).all()
    cluster.client.receive(cluster.client.pull(batch, dense=True), batch, out, values)
    assert (values != 7).any() and not np.array_equal(values, cluster.start)
    assert cluster.client.applied() == [BATCHES] * 2


def test_half_async_pushes_once_per_group_and_then_meets(clusters: partial[Cluster]) -> None:
    cluster = clusters("train.strategy=half_async")
    met = []
    strategy = HalfAsync(Context(cluster, lambda: met.append(cluster.counted("pushes"))), cluster.client)  # type: ignore[arg-type]
    strategy.train_groups(cluster.unit.id, 0, cluster.groups())
    # each meeting is after the push of its group is applied
    assert met == [[1, 1], [2, 2], [3, 3]]
    assert cluster.counted("pulls") == [BATCHES] * 2
    assert cluster.shards[0].samples() == [BATCHES * 100 - 30] * 4
    records = json.loads(cluster.shards[0].status())["records"]
    assert [record["watermark"] for _, record in records] == [1]


def test_a_merged_push_is_one_step_on_the_joined_batch(clusters: partial[Cluster]) -> None:
    """The batches of a group see the same rows, like one batch of three times the size."""
    merged, joined = clusters("train.strategy=half_async"), clusters("train.batch_size=300")
    for cluster in (merged, joined):
        groups = list(split_groups(cluster.batches(), K if cluster is merged else 1, partial(cluster.parser.empty, 0)))
        strategy = HalfAsync(Context(cluster), cluster.client)  # type: ignore[arg-type]
        # all pulls of a group are before its push, so no push is applied between its batches
        strategy.train_groups(0, 0, groups[:1])
    dense = []
    for cluster in (merged, joined):
        batch = next(cluster.batches())
        values = np.zeros(cluster.client.num_dense, np.float32)
        out = np.zeros((batch.num_samples, 8, cluster.client.width), np.float32)
        cluster.client.receive(cluster.client.pull(batch, dense=True), batch, out, values)
        dense.append(values)
    assert not np.array_equal(dense[0], merged.start)
    np.testing.assert_allclose(dense[0], dense[1], atol=1e-6)


def test_geo_pulls_nothing_between_exchanges(clusters: partial[Cluster]) -> None:
    cluster = clusters("train.strategy=geo")
    pulls = []
    groups = list(cluster.groups())

    def watched() -> Iterator[MergeGroup]:
        for group in groups:
            pulls.append(cluster.counted("pulls"))
            yield group

    geo_of(cluster).train_groups(cluster.unit.id, 0, watched(), 1)
    assert pulls == [[0, 0], [1, 1], [2, 2]]
    assert cluster.counted("pulls") == [3, 3]
    assert cluster.counted("pushes") == [3, 3]
    assert cluster.network.num_batches == BATCHES


def test_geo_with_one_trainer_is_never_stale(clusters: partial[Cluster]) -> None:
    """Increments of one trainer give the same rows as training with one batch in flight."""
    geo, plain = clusters("train.strategy=geo"), clusters()
    geo_of(geo).train_groups(0, 0, geo.groups(), 1)
    plain.lanes(plain.client, max_in_flight=1).run(plain.named())
    expected, got = plain.rows(), geo.rows()
    assert got.keys() == expected.keys()
    for batch, values in expected.items():
        np.testing.assert_allclose(got[batch], values, atol=1e-5)


def test_dense_changes_of_geo_are_divided_by_the_number_of_trainers(clusters: partial[Cluster]) -> None:
    changes = []
    for num_trainers in (1, 2):
        cluster = clusters("train.strategy=geo")
        groups = list(cluster.groups())[:1]
        geo_of(cluster).train_groups(0, 0, groups, num_trainers)
        batch = next(cluster.batches())
        values = np.zeros(cluster.client.num_dense, np.float32)
        out = np.zeros((batch.num_samples, 8, cluster.client.width), np.float32)
        cluster.client.receive(cluster.client.pull(batch, dense=True), batch, out, values)
        changes.append(values - cluster.start)
    assert np.abs(changes[0]).max() > 0.01
    np.testing.assert_allclose(changes[1], changes[0] / 2, atol=1e-6)


def test_geo_begins_with_the_parameters_of_the_servers(clusters: partial[Cluster]) -> None:
    learned = []
    for noise in (0.0, 7.0):
        cluster = clusters("train.strategy=geo")
        # the earlier dense values of a trainer are replaced
        cluster.network.dense.values.add_(noise)
        geo_of(cluster).train_groups(0, 0, cluster.groups(), 2)
        learned.append(cluster.rows())
    for batch, values in learned[0].items():
        np.testing.assert_array_equal(learned[1][batch], values)


def test_a_dry_run_needs_no_servers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    write_demo(tmp_path / "data", samples=1000, slots=8, hours=1, seed=1)
    run_dry(job_of(tmp_path))
    last = caplog.messages[-1]
    assert last.startswith("dry run of one trainer: 1,000 samples in ") and "forward" in last
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError) as caught:
        run_dry(job_of(tmp_path, "train.mode=local"))
    assert "train.mode: expected `ps` for a dry run without servers, got `local`" in str(caught.value)


@pytest.mark.parametrize("section", ["sparse", "dense"])
def test_geo_refuses_adam(tmp_path: Path, section: str) -> None:
    with pytest.raises(ConfigError) as caught:
        job_of(tmp_path, "train.strategy=geo", f"{section}.optimizer.kind=adam")
    assert f"{section}.optimizer.kind: with `train.strategy: geo` expected another optimizer, got `adam`" in str(
        caught.value
    )


def test_strategies_need_mode_ps(tmp_path: Path) -> None:
    for settings, text in (
        (("train.strategy=sync", "data.on_missing=skip"), "with `train.strategy: sync` expected `fail`"),
        (("train.mode=local", "train.strategy=sync"), "`strategy`: belongs to mode `ps`, not `local`"),
        (("train.step_batches=2",), "`step_batches`: belongs to strategy `sync`, not `async`"),
    ):
        with pytest.raises(ConfigError) as caught:
            job_of(tmp_path, *settings)
        assert text in str(caught.value)


def test_a_batch_that_is_not_finite_is_skipped_by_all_servers(
    clusters: partial[Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every server gets the marker for skipping the step, even a server without signs of the batch."""
    cluster = clusters()
    batch = next(cluster.batches())
    monkeypatch.setattr(cluster.network.dense, "gradient_is_finite", lambda: False)
    learned = cluster.network.learn(batch, cluster.network.rows_of(batch, cluster.client.width).zero_())
    assert np.isnan(learned.scale) and np.isnan(learned.dense).all()
    assert len(learned.dense) == cluster.client.num_dense


class FakeClient:
    """A coordinator's client that lets a trainer continue at the third request."""

    def __init__(self) -> None:
        self.meetings: list[int] = []
        self.given_back: list[int] = []

    def meet(self, _: int, meeting: int) -> dict[str, bool]:
        self.meetings.append(meeting)
        return {"go": len(self.meetings) == 3}

    def give_back(self, _: int, unit: int) -> None:
        self.given_back.append(unit)


def trainer_of(cluster: Cluster) -> tuple[TrainerProcess, FakeClient]:
    """Return a trainer without a coordinator, and its client."""
    trainer, client = object.__new__(TrainerProcess), FakeClient()
    trainer.__dict__.update(
        _client=client,
        clock=cluster.network.clock,
        job=cluster.job,
        _registration={"incarnation": 7, "index": 0},
        meeting=4,
        _fenced=None,
        _units=[3],
        _dropped=frozenset(),
        _units_ended={"given_back": 0},
        _attempts=0,
        _next_attempt=0.0,
        _problems=RepeatFilter(print),
        _link=object.__new__(ServerLink),
        shutdown=ShutdownRequest(),
        networks=[cluster.network],
    )
    return trainer, client


def test_a_trainer_waits_for_its_meeting(clusters: partial[Cluster]) -> None:
    trainer, client = trainer_of(clusters())
    trainer.meet()
    assert client.meetings == [5, 5, 5]


def test_a_trainer_drops_a_unit_leased_to_another_trainer(clusters: partial[Cluster]) -> None:
    cluster = clusters()
    trainer, client = trainer_of(cluster)
    batches = trainer.read(cluster.unit, cluster.batches())  # type: ignore[arg-type]
    assert next(batches).unit == cluster.unit.id
    trainer._dropped = frozenset({cluster.unit.id})
    with pytest.raises(UnavailableError, match="its lease expired, another trainer has it"):
        next(batches)
    assert client.given_back == []


def test_a_trainer_gives_up_after_its_retries(clusters: partial[Cluster], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, client = trainer_of(clusters("train.ps.retries=2"))

    def lost(_: object) -> None:
        trainer._units = [3]
        raise UnavailableError("ps shard 0 at 127.0.0.1:1: did not answer in time")

    monkeypatch.setattr(trainer._link, "connect", lost)
    now = [100.0]
    monkeypatch.setattr("elasticrec.roles.trainer.time.monotonic", lambda: now[0])
    monkeypatch.setattr(trainer.shutdown, "wait", lambda _: None)
    answer = {"unit": {"id": 3}, "shards": [], "group": None}
    lease_s = trainer.job.train.ps.lease_s
    for _ in range(2):
        # attempts count only after the time in which a dead server is replaced
        for _ in range(10):
            now[0] += lease_s / 10.1
            trainer._train(answer)  # type: ignore[arg-type]
        now[0] += lease_s
    with pytest.raises(UnavailableError, match=r"did not answer in time \(3 attempts\)"):
        trainer._train(answer)  # type: ignore[arg-type]
    assert client.given_back == [3] * 21


def test_a_trainer_does_not_wait_for_a_server_that_was_replaced(clusters: partial[Cluster]) -> None:
    cluster = clusters()
    trainer, _ = trainer_of(cluster)
    shards = [{"incarnation": one} for one in cluster.client.incarnations]
    trainer._link._connected = (cluster.client.incarnations, cluster.client.closer())
    trainer._link.check(shards)  # type: ignore[arg-type]
    batch = next(cluster.batches())
    cluster.client.pull(batch, dense=True)
    trainer._link.check([shards[0], {"incarnation": 99}])  # type: ignore[arg-type, list-item]
    with pytest.raises(UnavailableError):
        for _ in range(100):
            cluster.client.pull(batch, dense=True)
            time.sleep(0.01)


def test_a_damaged_declaration_is_named(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start/dense.bin").write_bytes(b"")
    for text in ('{"x', "{}", "[]"):
        (tmp_path / "start/shard.json").write_text(text)
        with pytest.raises(ModelError, match=r"shard\.json: damaged"):
            read_start(tmp_path)


def test_keys_of_local_training_are_refused_with_servers(tmp_path: Path) -> None:
    for key in ("evaluate.every_s=5", "checkpoint.every_steps=5", "checkpoint.keep_epochs=true"):
        with pytest.raises(ConfigError, match="belongs to mode `local`, not `ps`"):
            job_of(tmp_path, f"train.{key}", "data.eval=data")
    with pytest.raises(ConfigError, match=r"`heartbeat_s`: expected at most half of `lease_s`, 0\.5, got 5"):
        job_of(tmp_path, "train.ps.lease_s=1", "train.ps.heartbeat_s=5")


def test_trainers_of_a_step_wait_for_each_other(clusters: partial[Cluster]) -> None:
    """With two trainers of one unit each, no push of a step is applied before all pushes have arrived."""
    cluster = clusters("train.strategy=sync", "train.trainers=2")
    group = (0, 2)
    batches = list(cluster.batches())[:2]
    clients = [cluster.client, cluster.connect()]
    networks = [cluster.network, RemoteNetwork(cluster.job)]
    seen: list[list[tuple[int, bool]]] = []

    def push(at: int) -> None:
        unit = Unit(**{**cluster.unit.__dict__, "id": at})
        (batch, *_) = cluster.batches(unit)
        assert batch.unit == at
        pulling = clients[at].pull(batch, dense=True, after=(0, 0))
        pushing = networks[at].step(clients[at], 0, UnitBatch(batch, is_last=True), pulling, group=group)
        clients[at].wait_for_ack(pushing)

    assert len(batches) == 2
    push(0)
    assert clients[0].step_status(group, 0, 0.0) == [(0, False)] * 2

    def wait() -> None:
        # a step on a slow machine may take longer than the longest wait of one second
        deadline = time.monotonic() + 60
        while (met := clients[0].step_status(group, 0, 1.0)) != [(0, True)] * 2 and time.monotonic() < deadline:
            pass
        seen.append(met)

    waiting = threading.Thread(target=wait)
    waiting.start()
    push(1)
    waiting.join()
    assert seen == [[(0, True)] * 2]
    assert cluster.counted("steps") == [0, 0]
    clients[1].commit(0, 1)
    assert cluster.counted("steps") == [1, 1]
