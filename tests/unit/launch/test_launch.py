"""The launcher with fake processes; address, logs, metrics server, and the status of a stopped run."""

import io
import json
import re
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from elasticrec.cli import app, main
from elasticrec.config import parse_job
from elasticrec.errors import ConfigError, ElasticRecError, ModelError, UnavailableError
from elasticrec.launch.child import Child
from elasticrec.launch.local import LocalLauncher
from elasticrec.launch.logs import LogReader, find_logs
from elasticrec.launch.status import read_status, status_lines
from elasticrec.net.address import Address, read_address, remove_address, write_address
from elasticrec.net.logs import StampedStream, without_stamp
from elasticrec.net.metrics import Families, MetricsServer
from elasticrec.run import Run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    found = Run(Path("runs/demo"))
    for name in ("checkpoints", "coordinator", "logs"):
        (found.path / name).mkdir(parents=True)
    found.job_path.write_text("name: demo\n")
    return found


def write_checkpoint(run: Run, name: str, **manifest: Any) -> None:
    (run.checkpoints / name).mkdir()
    (run.checkpoints / name / "manifest.json").write_text(json.dumps(manifest))


def test_only_the_user_reads_the_token(run: Run) -> None:
    assert read_address(run.path) is None
    write_address(run.path, Address("http://127.0.0.1:7160", "secret"))
    (path,) = (run.path / "coordinator").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_address(run.path) == Address("http://127.0.0.1:7160", "secret")
    for text in ("[]", "{", '{"url": 1, "token": null}', '{"url": "http://127.0.0.1:7160", "token": 7}'):
        path.write_text(text)
        with pytest.raises(ModelError, match=r"address\.json: not the address of a coordinator"):
            read_address(run.path)
    remove_address(run.path)
    assert read_address(run.path) is None


@pytest.mark.parametrize("has_address", [False, True])
def test_a_killed_run_is_not_running(
    run: Run, has_address: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticrec.launch.status._ANSWER_S", 0.2)
    if has_address:
        # Nothing listens there.
        write_address(run.path, Address("http://127.0.0.1:1", "secret"))
    write_checkpoint(run, "ps-00000001-000002", created="2026-01-01T00:00:02+00:00")
    write_checkpoint(run, "ps-00000001-000001", created="2026-01-01T00:00:01+00:00")
    run.metrics_path.write_text('{"time": 1.5, "event": "progress", "rows": 1234, "auc_0": 0.75}\n{"ti')
    silent = ", the coordinator at http://127.0.0.1:1 did not answer within 0.2 s" if has_address else ""
    expected = f"runs/demo: not running{silent}; last checkpoint ps-00000001-000002 of 2026-01-01T00:00:02+00:00"
    assert status_lines(read_status(run)) == [expected, "last metrics: event progress, rows 1,234, auc_0 0.7500"]
    assert main(["scale", "demo", "--servers", "2"]) == 2
    assert capsys.readouterr().err == f"error: {expected}\n"
    assert main(["status", "demo", "--json", "--watch"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "stopped"


def test_a_finished_or_empty_run(run: Run) -> None:
    assert status_lines(read_status(run)) == ["runs/demo: not running; no checkpoint"]
    write_checkpoint(run, "step-000000000009", created="2026-01-01T00:00:02+00:00", progress={"finished": True})
    write_checkpoint(run, "ps-00000001-000001", created="2026-01-01T00:00:02+00:00")
    (line,) = status_lines(read_status(run))
    assert line == "runs/demo: finished; last checkpoint step-000000000009 of 2026-01-01T00:00:02+00:00"


def test_every_line_gets_a_time_stamp() -> None:
    sink = io.StringIO()
    stream = StampedStream(sink)
    stream.write("one\ntwo")
    stream.write(" halves\n")
    with pytest.raises(TypeError):
        stream.write(b"")  # type: ignore[arg-type]
    lines = sink.getvalue().splitlines()
    assert [without_stamp(line) for line in lines] == ["one", "two halves"]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} \S", line) for line in lines)


def at(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02d}.000 {text}"


def test_logs_of_all_servers_are_merged_by_time(run: Run) -> None:
    logs = run.path / "logs"
    (logs / "ps-10.log").write_text(f"{at(2, 'b')}\n{at(5, 'Traceback')}\n  in line 3\n")
    (logs / "ps-2.log").write_text(f"{at(1, 'a')}\n{at(6, 'd')}\n{at(7, 'not who')}")
    (logs / "trainer-0.log").write_text("x\n")
    paths = find_logs(run, "ps")
    assert [path.stem for path in paths] == ["ps-2", "ps-10"]
    reader = LogReader(paths)
    expected = [
        f"ps-2: {at(1, 'a')}",
        f"ps-10: {at(2, 'b')}",
        f"ps-10: {at(5, 'Traceback')}",
        "ps-10:   in line 3",
        f"ps-2: {at(6, 'd')}",
    ]
    assert reader.lines(None) == expected
    with (logs / "ps-2.log").open("a") as file:
        file.write("le\n")
    assert list(islice(reader.follow(), 1)) == [f"ps-2: {at(7, 'not whole')}"]
    assert LogReader(paths).lines(2) == [f"ps-2: {at(6, 'd')}", f"ps-2: {at(7, 'not whole')}"]
    assert LogReader(paths).lines(0) == []
    assert LogReader(find_logs(run, "trainer-0")).lines(None) == ["x"]


def test_missing_logs_are_refused(run: Run) -> None:
    with pytest.raises(ConfigError, match=r"runs/demo: no logs: only the processes of `train\.mode: ps` write logs"):
        find_logs(run, "ps")
    (run.path / "logs/ps-0.log").touch()
    with pytest.raises(ConfigError, match="ps-1: no such role in runs/demo: expected one of `ps-0`, or"):
        find_logs(run, "ps-1")
    result = CliRunner().invoke(app, ["logs", "demo", "ps-0", "--tail", "-1"])
    assert result.exit_code == 2


def test_metrics_text() -> None:
    found = Families("x_", shard="1")
    found.add("a_total", "All.", 12345678)
    found.add("b", "Some.", ({"state": "up"}, 1.5), ({"state": "down"}, None))
    assert found.text().splitlines() == [
        "# HELP x_a_total All.",
        "# TYPE x_a_total counter",
        'x_a_total{shard="1"} 1.2345678e+07',
        "# HELP x_b Some.",
        "# TYPE x_b gauge",
        'x_b{shard="1",state="up"} 1.5',
    ]


def test_the_metrics_of_a_role_need_the_token() -> None:
    server = MetricsServer(lambda: "x 1\n", token="secret")
    port = int(server.url.split(":")[2].split("/")[0])
    try:

        def get(url: str, token: str) -> tuple[int, str]:
            request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    return response.status, response.read().decode()
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        assert get(server.url, "secret") == (200, "x 1\n")
        assert get(server.url, "secre") == (401, "missing or wrong token\n")
        assert get(server.url.replace("/metrics", "/"), "secret") == (404, "not found\n")
        with pytest.raises(ConfigError, match=f"metrics: 127.0.0.1:{port}: cannot listen: Address already in use"):
            MetricsServer(lambda: "", token="", port=port)
    finally:
        server.close()


class Process:
    """A fake process that ends when it is terminated."""

    pid = 1

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.code = 0


class FakeLauncher:
    """A launcher with fake processes: a coordinator that answers `status`, three servers and two trainers."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        raw = {"name": "demo", "data": {"format": "slots", "train": "logs", "slots": "0"}}
        job = parse_job(raw, base=Path(), overrides=("train.mode=ps", "train.servers=3", "train.trainers=2"))
        self.now = 1000.0
        self.time = SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr("elasticrec.launch.local.time", self.time)
        self.launcher = LocalLauncher(job, run)
        self.started: list[str] = []
        monkeypatch.setattr(self.launcher, "_spawn", self.spawn)
        shard = {"state": "serving", "incarnation": 1, "figures": {"pid": Process.pid}}
        self.status: dict[str, Any] = {"state": "running", "wanted": {"servers": 3, "trainers": 2}, "trainers": []}
        self.status["shards"] = [shard | {"index": index} for index in range(3)]
        monkeypatch.setattr(self.launcher._client, "status", self.answer)
        monkeypatch.setattr(self.launcher._client, "checkpoint", lambda: {"ticket": 7})
        for child in self.launcher.children:
            self.launcher._spawn(child)

    @property
    def messages(self) -> list[str]:
        return self._caplog.messages

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def spawn(self, child: Child) -> None:
        self.started.append(child.name)
        child.process = Process()  # type: ignore[assignment]
        child.started, child.is_leaving, child.down_since = self.now, False, None

    def answer(self) -> dict[str, Any]:
        if not self.launcher.children[0].is_running():
            raise UnavailableError("coordinator did not answer")
        return self.status

    def child(self, name: str) -> Child:
        return next(child for child in self.launcher.children if child.name == name)

    def end(self, name: str, code: int) -> None:
        self.child(name).process.code = code  # type: ignore[union-attr, attr-defined]


@pytest.fixture
def launched(run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[FakeLauncher]:
    found = FakeLauncher(run, monkeypatch, caplog)
    yield found
    found.launcher._reserved_port.close()


@pytest.mark.parametrize(("cores", "threads"), [(16, 8), (2, 1), (1, 1), (5, 2)])
def test_trainers_of_a_machine_share_its_cores(
    launched: FakeLauncher, monkeypatch: pytest.MonkeyPatch, cores: int, threads: int
) -> None:
    """They keep their share when the run is scaled: with `sync`, another number of threads would change the bits."""
    launched.launcher._num_needed["trainer"] = 5
    env_threads = []
    popen = SimpleNamespace(Popen=lambda *_, env, **__: env_threads.append(env["ELASTICREC_THREADS"]), DEVNULL=None)
    monkeypatch.setattr("elasticrec.launch.local.subprocess", popen)
    monkeypatch.setattr("elasticrec.launch.local.num_cores", lambda: cores)
    LocalLauncher._spawn(launched.launcher, launched.child("trainer-1"))
    assert env_threads == [str(threads)]


@pytest.mark.parametrize(("job_threads", "env_threads", "expected"), [(None, "3", 3), (2, "3", 2), (None, None, None)])
def test_the_threads_of_the_job_override_those_of_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, job_threads: int | None, env_threads: str | None, expected: int | None
) -> None:
    raw = {
        "name": "demo",
        "data": {"format": "slots", "train": "logs", "slots": "0"},
        "train": {"threads": job_threads},
    }
    run.job_path.write_text(parse_job(raw, base=Path()).to_yaml())
    started = []
    monkeypatch.setattr("elasticrec.roles.trainer.TrainerProcess", lambda job, *_: started.append(job.train.threads))
    monkeypatch.setattr("elasticrec.roles.commands._run", lambda _: None)
    arguments = ["trainer", "--run", str(run.path), "--coordinator", "http://127.0.0.1:1"]
    result = CliRunner().invoke(app, arguments, env={"ELASTICREC_THREADS": env_threads})
    assert (result.exit_code, started) == (0, [expected]), result.output


def test_servers_of_the_old_map_are_restarted_until_the_partitions_moved(launched: FakeLauncher) -> None:
    launcher, status = launched.launcher, launched.status
    status["wanted"] = {"servers": 1, "trainers": 1}

    def running() -> list[str]:
        return sorted(child.name for child in launcher.children if child.is_running())

    dead = next(child for child in launcher.children if child.name == "ps-2")
    dead.process = Process()  # type: ignore[assignment]
    dead.process.code = -9  # type: ignore[union-attr, attr-defined]
    launcher._reconcile()
    launcher._restart_dead()
    assert running() == ["coordinator", "ps-0", "ps-1", "ps-2", "trainer-0"], "the surplus trainer was terminated"
    # The new map is in force: surplus servers end on their own and are not restarted.
    status["shards"] = status["shards"][:1]
    for child in launcher.children:
        if child.name in ("ps-1", "ps-2"):
            child.process.code = 0  # type: ignore[union-attr, attr-defined]
    launcher._reconcile()
    assert running() == ["coordinator", "ps-0", "trainer-0"] and len(launcher.children) == 3
    status["wanted"] = {"servers": 2, "trainers": 2}
    launcher._reconcile()
    assert running() == ["coordinator", "ps-0", "ps-1", "trainer-0", "trainer-1"]


@pytest.mark.parametrize(("code", "name"), [(0, "ps-1"), (1, "trainer-0"), (-9, "ps-1")])
def test_repeated_early_exits_end_the_training_with_the_last_log_line(
    launched: FakeLauncher, run: Run, code: int, name: str
) -> None:
    (run.path / f"logs/{name}.log").write_text(f"{at(1, 'starts')}\n{at(2, 'error: out of luck')}\n")
    launcher = launched.launcher

    def die(after_s: float) -> None:
        launched.now += after_s
        launched.end(name, code)
        launcher._restart_dead()
        launcher._reconcile()

    for _ in range(4):
        die(0.5)
    # A process that runs for a long time resets the count.
    die(100.0)
    for _ in range(4):
        die(0.5)
    assert launched.started.count(name) == 10
    with pytest.raises(ElasticRecError, match=f"^{name} died 5 times: out of luck$"):
        die(0.5)


def test_stopped_roles_do_not_count_as_early_exits(launched: FakeLauncher) -> None:
    for _ in range(10):
        launched.status["wanted"]["trainers"] = 1
        launched.launcher._reconcile()
        launched.status["wanted"]["trainers"] = 2
        launched.launcher._reconcile()
    assert launched.started.count("trainer-1") == 11 and launched.messages == []


def test_a_server_counts_as_hung_after_it_was_down_for_a_lease(launched: FakeLauncher) -> None:
    """A restarted coordinator does not know at once which members are alive."""
    launcher, lease_s = launched.launcher, 5.0
    shard = launched.status["shards"][1]
    launched.now += 100.0

    def observe(state: str, seconds: float) -> None:
        shard["state"] = state
        launched.now += seconds
        launcher._reconcile()

    observe("unheard", 0.1)
    observe("unheard", lease_s + 1.0)
    observe("down", 0.1)
    observe("down", lease_s - 0.1)
    observe("serving", 0.1)
    observe("down", 0.1)
    observe("down", lease_s - 0.1)
    assert launched.started.count("ps-1") == 1 and launched.messages == []
    before = launched.child("ps-1").process
    observe("down", 0.2)
    assert launched.messages == ["ps-1 does not respond: replacing it"]
    # The hung server is not terminated: it is fenced when it wakes up.
    assert launched.child("ps-1").hung == [before] and before is not None and before.poll() is None
    # Its successor has time to start.
    observe("down", 0.1)
    observe("down", 2 * lease_s - 0.2)
    assert len(launched.messages) == 1
    observe("down", 0.2)
    assert len(launched.messages) == 2


def test_a_restarting_server_does_not_count_as_hung(launched: FakeLauncher) -> None:
    """The known state is that of the previous process; another restart would only delay the recovery."""
    shard = launched.status["shards"][1] | {"state": "down", "figures": {"pid": 70}}
    launched.status["shards"][1] = shard
    launched.now += 100.0
    launched.launcher._spawn(launched.child("ps-1"))
    for _ in range(15):
        launched.launcher._reconcile()
        launched.now += 1.0
    assert launched.messages == []
    launched.now += 0.1
    launched.launcher._reconcile()
    assert launched.messages == ["ps-1 does not respond: replacing it"]


def test_a_hung_trainer_is_replaced_and_ended(launched: FakeLauncher) -> None:
    hung, other = launched.child("trainer-0").process, launched.child("trainer-1").process
    assert hung is not None and other is not None
    hung.pid, other.pid = 71, 72
    for state in ("alive", "unheard"):
        launched.status["trainers"] = [{"state": state, "figures": {"pid": 71}}, {"state": "alive", "figures": {}}]
        launched.launcher._reconcile()
    assert hung.poll() is None and launched.messages == []
    launched.status["trainers"][0]["state"] = "silent"
    launched.launcher._reconcile()
    assert launched.messages == ["trainer-0 does not respond: replacing it"]
    assert hung.poll() == 0, "a hung trainer is terminated"
    assert other.poll() is None and launched.child("trainer-1").process is other
    assert launched.child("trainer-0").is_running() and launched.child("trainer-0").hung == [hung]


@pytest.mark.parametrize("when", ["reports finished", "ended", "ended before it answered"])
def test_a_run_that_finishes_while_it_is_stopped_is_finished(
    launched: FakeLauncher, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    launched.launcher.stop_requested = True
    launched.status["checkpoint"] = {"ticket": 3}

    def finish() -> None:
        if when == "reports finished":
            launched.status["state"] = "finished"
        else:
            launched.end("coordinator", 0)

    def checkpoint() -> dict[str, Any]:
        finish()
        return {"ticket": 7}

    def sleep(seconds: float) -> None:
        launched.now += seconds
        finish()

    if when == "ended before it answered":
        monkeypatch.setattr(launched.launcher._client, "checkpoint", checkpoint)
    else:
        launched.time.sleep = sleep
    if when == "ended":
        # The last answer of the coordinator.
        monkeypatch.setattr(launched.launcher._client, "status", lambda: launched.status)
    assert launched.launcher.wait(lambda status: None)
    assert launched.messages == []


def test_a_stopped_run_is_saved_first(launched: FakeLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, status = launched.launcher, launched.status
    launcher.stop_requested = True
    status["checkpoint"] = {"ticket": 6}
    started = launched.now
    assert not launcher.wait(lambda status: None) and not launcher.is_saved
    assert 60.0 <= launched.now - started < 61.0, "the wait is limited"

    def save(seconds: float) -> None:
        status["checkpoint"] = {"ticket": 7}

    launched.time.sleep = save
    assert not launcher.wait(lambda status: None) and launcher.is_saved
    launcher.is_saved = False
    monkeypatch.setattr(launcher._client, "checkpoint", lambda: launched.end("coordinator", -9) or {"ticket": 8})
    assert not launcher.wait(lambda status: None) and not launcher.is_saved
    assert launched.messages[-1] == "not saved before shutdown: coordinator did not answer"


def test_a_save_is_retried_while_the_coordinator_is_slow(
    launched: FakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched.launcher.stop_requested = True
    launched.status["checkpoint"] = {"ticket": 7}
    slow, started = 3, launched.now

    def checkpoint() -> dict[str, Any]:
        nonlocal slow
        slow -= 1
        if slow > 0:
            raise UnavailableError("coordinator did not answer")
        return {"ticket": 7}

    monkeypatch.setattr(launched.launcher._client, "checkpoint", checkpoint)
    assert not launched.launcher.wait(lambda status: None) and launched.launcher.is_saved
    assert launched.messages == []
    launched.launcher.is_saved, slow = False, 10**6
    assert not launched.launcher.wait(lambda status: None) and not launched.launcher.is_saved
    assert 60.0 <= launched.now - started < 62.0, "the wait is limited"
    assert launched.messages == ["not saved before shutdown: coordinator did not answer"]
