"""The Python API: train, evaluate, publish and serve from a notebook, from any thread."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticrec
from elasticrec import errors
from elasticrec.api import TrainingRun
from elasticrec.errors import SampleError
from elasticrec.run import Run
from elasticrec.training.checkpoint import latest
from elasticrec.training.loop import Trainer
from support.small import WriteSamples
from support.store import wait_until

JOB = """\
name: small
data: {format: slots, train: train.txt, eval: eval.txt, slots: 0-2, workers: 2}
model: {dim: 4, hidden: [8, 8]}
sparse: {partitions: 4}
train: {threads: 1, batch_size: 64, evaluate: {every_steps: 4}, print_every_s: 1e-9}
"""


@pytest.fixture(autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_samples: WriteSamples) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(count=640)
    write_samples("eval.txt", count=200, seed=2)
    Path("job.yaml").write_text(JOB)


def threads() -> set[str]:
    """Return the threads of this process, including those of Rust."""
    return set(os.listdir("/proc/self/task"))


def expect_threads(before: set[str]) -> None:
    """Wait until no other threads are left: a joined thread stays listed for a moment."""
    wait_until(lambda: threads() <= before, lambda: f"threads are left: {threads() - before}")


# Child processes from before the test, such as the resource tracker of another test.
_EARLIER: set[str] = set()


@pytest.fixture(autouse=True)
def _earlier_children() -> None:
    _EARLIER.clear()
    _EARLIER.update(children())


def children() -> list[str]:
    """Return the child processes that were started since the test began."""
    found: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        # The thread may end meanwhile.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += (task / "children").read_text().split()
    return [process for process in found if process not in _EARLIER]


def test_importing_the_package_imports_neither_torch_nor_the_extension() -> None:
    code = (
        "import sys, elasticrec\n"
        "assert not {'torch', 'pandas', 'numpy', 'elasticrec._core'} & sys.modules.keys()\n"
        "[getattr(elasticrec, name) for name in elasticrec.__all__]\n"
        "assert not {'torch', 'pandas'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module `elasticrec` has no `trian`"):
        _ = elasticrec.trian  # type: ignore[attr-defined]


def test_importing_the_package_does_not_change_the_process() -> None:
    code = (
        "import logging, os, signal, threading\n"
        "def state():\n"
        "    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]\n"
        "    logger = logging.getLogger()\n"
        "    return dict(os.environ), os.getcwd(), handlers, threading.active_count(), logger.handlers, logger.level\n"
        "before = state()\n"
        "import elasticrec, elasticrec.cli\n"
        "[getattr(elasticrec, name) for name in elasticrec.__all__]\n"
        "assert state() == before, (before, state())"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("first", "given", "expected"),
    [("", None, "10000"), ("", "7", "7"), ("import torch", None, None)],
    ids=["default", "set by the user", "torch is loaded"],
)
def test_training_limits_how_long_threads_spin(first: str, given: str | None, expected: str | None) -> None:
    """OpenMP reads the variable when torch loads it, so it is set before."""
    code = (
        f"import os\n{first}\nimport elasticrec\n"
        "run = elasticrec.train('job.yaml', lambda event: False, quiet=True)\n"
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    environment |= {} if given is None else {"GOMP_SPINCOUNT": given}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(expected)]


def test_every_error_is_exported() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined <= set(elasticrec.__all__)


def test_a_job_with_overrides() -> None:
    by_name = elasticrec.load_job("job.yaml", set={"train.epochs": 3, "model.hidden": [4], "data.eval": "train.txt"})
    assert (by_name.train.epochs, by_name.model.hidden, len(by_name.data.eval)) == (3, (4,), 1)
    as_text = elasticrec.load_job("job.yaml", set=["train.epochs=3", "model.hidden=[4]", "data.eval=train.txt"])
    assert as_text.to_dict() == by_name.to_dict()
    with pytest.raises(elasticrec.ConfigError, match="did you mean `epochs`"):
        elasticrec.load_job("job.yaml", set={"train.epoch": 3})


def test_a_run_has_history_metrics_and_scores(capsys: pytest.CaptureFixture[str]) -> None:
    events: list[Any] = []
    result = elasticrec.train("job.yaml", callback=events.append, quiet=True)
    assert capsys.readouterr().err == ""
    assert result.finished and repr(result) == "TrainingRun('runs/small')"
    assert [event.kind for event in events if event.kind != "progress"] == [
        "start",
        "evaluation",
        "evaluation",
        "epoch",
    ]

    history = result.history
    assert list(history["event"]) == [event.kind for event in events]
    assert list(history["steps"]) == [event.steps for event in events]
    epoch = history[history["event"] == "epoch"].iloc[0]
    metrics = result.metrics["click"]
    assert (epoch["eval_click_auc"], epoch["eval_click_samples"]) == (metrics.auc, 200)
    assert {"train_click_log_loss", "share_wait", "share_forward", "samples_per_s", "rows"} <= set(history.columns)
    assert not [name for name in history.columns if "calibration" in name]

    path = Path("eval.txt")
    scores = result.score(path)
    assert scores.shape == (200, 1) and scores.dtype == np.float32
    lines = path.read_text().splitlines()
    for same in (lines, path.read_text(), path.read_bytes(), [line + "\n" for line in lines]):
        np.testing.assert_array_equal(result.score(same), scores)
    assert result.score([]).shape == (0, 1)
    with pytest.raises(elasticrec.ElasticRecError, match=r"^samples:2: slot `0`: sign `x` is not a u64"):
        result.score(["1 0 5:0", "1 0 x:0"])
    found = elasticrec.load_run("small")
    np.testing.assert_array_equal(found.score(path), scores)
    assert found.metrics == result.metrics == result.evaluate() == result.evaluate("eval.txt")
    assert (found.name, found.path, found.job.train.batch_size) == ("small", Path("runs/small"), 64)


def test_without_an_evaluation_the_metrics_are_of_the_training() -> None:
    result = elasticrec.train(elasticrec.load_job("job.yaml", set={"data.eval": [], "train.evaluate": {}}), quiet=True)
    assert result.metrics["click"].samples == 640


CRASH = """\
import os
import elasticrec

def crash(event):
    if event.steps == 8:
        os._exit(9)

elasticrec.train(elasticrec.load_job("job.yaml", set={"train.checkpoint.every_steps": 3}), callback=crash, quiet=True)
"""


def test_the_history_leaves_out_batches_that_a_crash_undid() -> None:
    # A fork of this process would inherit locks that torch's threads hold.
    assert subprocess.run([sys.executable, "-c", CRASH], check=False).returncode == 9
    job = elasticrec.load_job("job.yaml", set={"train.checkpoint.every_steps": 3})
    with open("runs/small/metrics.jsonl", "a") as file:
        file.write('{"time": 1')
    result = elasticrec.train(job, quiet=True)
    progress = result.history.query("event == 'progress'")
    assert list(progress["steps"]) == list(range(1, 11)), "steps 7 and 8 appear once"
    assert len(json.loads(Path("runs/small/metrics.jsonl").read_text().splitlines()[0])) > 1


def test_a_callback_stops_the_training_and_the_next_call_resumes() -> None:
    first = elasticrec.train("job.yaml", callback=lambda event: event.steps < 5, quiet=True)
    assert not first.finished
    assert first.score(["1 0 1:0"]).shape == (1, 1)
    assert elasticrec.train("job.yaml", quiet=True).finished
    again = elasticrec.train("job.yaml", callback=lambda event: event.steps < 5, fresh=True, quiet=True)
    assert not again.finished


def test_an_interrupt_leaves_a_checkpoint_and_no_thread_or_process(monkeypatch: pytest.MonkeyPatch) -> None:
    elasticrec.train("job.yaml", quiet=True)
    before = threads()
    inside = []

    def interrupt(event: Any) -> None:
        if event.steps == 3:
            inside.append(threads())
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        elasticrec.train("job.yaml", callback=interrupt, fresh=True, quiet=True)
    assert inside[0] - before, "a reader was running"
    expect_threads(before)
    assert children() == []
    saved = latest(Run(Path("runs/small")))
    assert saved is not None and saved.progress.steps == 3
    assert elasticrec.train("job.yaml", quiet=True).finished


def test_an_interrupt_within_a_batch_saves_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl-C interrupts within a batch: half a batch must not become a checkpoint."""
    elasticrec.train("job.yaml", quiet=True, fresh=True)
    before = threads()

    def interrupted(self: Trainer, *_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            elasticrec.train("job.yaml", fresh=True, quiet=True)
    expect_threads(before)
    assert latest(Run(Path("runs/small"))) is None


def test_a_training_in_a_second_thread() -> None:
    results: list[TrainingRun] = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    wanted = threading.Event()

    def callback(event: Any) -> bool:
        if event.steps == 4:
            wanted.set()
        return event.steps < 6

    thread = threading.Thread(target=lambda: results.append(elasticrec.train("job.yaml", callback, quiet=True)))
    thread.start()
    assert wanted.wait(240)
    thread.join(240)
    assert not results[0].finished
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert elasticrec.train("job.yaml", quiet=True).finished


def test_history_without_pandas_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    result = elasticrec.train("job.yaml", quiet=True)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'elasticrec\[notebook\]'"):
        _ = result.history


READER = """\
class Lines:
    def parse(self, line):
        show, click, *fields = line.split()
        sample = {"click": int(click) / int(show), "weight": int(show)}
        for field in fields:
            sign, slot = field.split(":")
            sample.setdefault(slot, []).append(sign)
        return sample
"""


@pytest.mark.parametrize("ending", ["interrupt", "false", "error"])
def test_the_processes_of_a_reader_end_with_the_training(ending: str) -> None:
    Path("mine.py").write_text(READER)
    inside: list[list[str]] = []

    def stop(event: Any) -> bool | None:
        if event.steps != 3:
            return None
        inside.append(children())
        if ending == "interrupt":
            signal.raise_signal(signal.SIGINT)
        if ending == "error":
            raise LookupError
        return ending != "false"

    job = elasticrec.load_job(
        "job.yaml", set={"data.format": "reader", "data.reader": "mine.py:Lines", "data.unit_bytes": 4096}
    )
    expected = {"interrupt": KeyboardInterrupt, "error": LookupError}
    with pytest.raises(expected[ending]) if ending in expected else contextlib.nullcontext():
        elasticrec.train(job, callback=stop, quiet=True)
    assert len(inside[0]) == 2, "two reader processes were running"
    assert children() == []
    saved = latest(Run(Path("runs/small")))
    assert saved is not None and saved.progress.steps == 3


@pytest.mark.parametrize("lines", [["1 0 5:0", ""], ["1 0 5:0\n1 0 6:0"]])
def test_each_item_of_a_list_is_one_line(lines: list[str]) -> None:
    result = elasticrec.train("job.yaml", quiet=True, fresh=True)
    assert result.score(["1 0 5:0\n", "1 0 6:0"]).shape == (2, 1)
    with pytest.raises(SampleError, match=r"samples\[\d\]: expected one line, got (none|several)"):
        result.score(lines)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: elasticrec.load_job(3), "load_job: path: expected a str or a Path, got int"),
        (
            lambda: elasticrec.load_job("job.yaml", set="train.epochs=3"),
            "load_job: set: expected a dict such as {'train.epochs': 3}, or a list of str, got str",
        ),
        (
            lambda: elasticrec.load_job("job.yaml", set=["train.epochs=3", 4]),
            "load_job: set[1]: expected a str such as 'train.epochs=3', got int",
        ),
        (
            lambda: elasticrec.load_job("job.yaml", set={3: 4}),
            "load_job: set: expected keys that are str such as 'train.epochs', got int",
        ),
        (
            lambda: elasticrec.load_job("job.yaml", set={"train.epochs": {1, 2}}),
            "load_job: set['train.epochs']: expected a number, a str, a bool, None, or a list or dict of them, got set",
        ),
        (lambda: elasticrec.train({"name": "a"}), "train: job: expected a Job, a str or a Path, got dict"),
        (lambda: elasticrec.train("job.yaml", 3), "train: callback: expected a function or None, got int"),
        (lambda: elasticrec.train("job.yaml", fresh="yes"), "train: fresh: expected a bool, got str"),
        (lambda: elasticrec.train("job.yaml", quiet=1), "train: quiet: expected a bool, got int"),
        (lambda: elasticrec.load_run(None), "load_run: run: expected a str or a Path, got NoneType"),
        (
            lambda: elasticrec.serve("models/small", 8500).__enter__(),
            "serve: models[1]: expected a str or a Path, got int",
        ),
        (
            lambda: TrainingRun(Run(Path("runs/small"))).evaluate(["eval.txt"]),
            "evaluate: data[0]: expected a str or a Path, got list",
        ),
        (
            lambda: TrainingRun(Run(Path("runs/small"))).score(5),
            "score: samples: expected a Path, a str, bytes or a list of str, got int",
        ),
        (
            lambda: TrainingRun(Run(Path("runs/small"))).score({"0": [5]}),
            "score: samples: expected a Path, a str, bytes or a list of str, got dict",
        ),
        (
            lambda: TrainingRun(Run(Path("runs/small"))).score(["1 0 5:0", {"0": 5}]),
            "score: samples[1]: expected a str with one line, got dict",
        ),
    ],
)
def test_arguments_of_another_type_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert str(caught.value) == message
    assert not Path("runs").exists()


def test_a_pandas_table_is_refused_as_samples() -> None:
    frame = pytest.importorskip("pandas").DataFrame({"0": [5]})
    with pytest.raises(TypeError, match=r"^score: samples: .*, got DataFrame$"):
        TrainingRun(Run(Path("runs/small"))).score(frame)


def test_overrides_may_be_numpy_numbers_and_paths() -> None:
    assert elasticrec.load_job(Path("job.yaml"), {"train.epochs": np.int64(3)}).train.epochs == 3
    assert elasticrec.load_job("job.yaml", {"data.eval": Path("eval.txt")}).data.eval == (str(Path.cwd() / "eval.txt"),)


def test_train_publish_serve_and_ask() -> None:
    run = elasticrec.train("job.yaml", quiet=True)
    published = run.publish()
    assert published.version == 1 and published.offer.is_offered
    instance = {"0": [5], "1": [1007], "2": [5]}
    expected = run.score(["1 0 5:0 1007:1 5:2"])
    with elasticrec.serve("models/small", quiet=True) as server, server.client() as client:
        np.testing.assert_allclose(client.predict([instance]), expected, rtol=1e-5)
        assert client.metadata()["version"] == 1
    # ONNX Runtime starts a thread that stays until the process ends, so only the second server must leave no thread.
    threads_before = threads()
    with elasticrec.serve(published.path, quiet=True) as server, server.client() as client:
        np.testing.assert_allclose(client.predict([instance]), expected, rtol=1e-5)
    with elasticrec.Client(server.url, timeout_s=1, retries=0) as client:
        assert not client.is_ready()
    expect_threads(threads_before)
    assert children() == []


def test_the_client_of_a_server_has_the_token_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMALL_TOKEN", "a-secret-of-the-test")
    job = elasticrec.load_job("job.yaml", {"serve.token": "${SMALL_TOKEN}"})
    elasticrec.train(job, quiet=True).publish()
    with elasticrec.serve(job=job, quiet=True) as server:
        with server.client("small") as client:
            assert client.predict([{"0": [5]}]).shape == (1, 1)
        with elasticrec.Client(server.url) as client, pytest.raises(elasticrec.ElasticRecError):
            client.predict([{"0": [5]}])


def test_each_call_prints_its_own_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Two servers and a training in one process, of which one server is quiet."""
    job, printed = elasticrec.load_job("job.yaml", {"serve.poll_s": 0.05}), list[str]()
    run = elasticrec.train(job, quiet=True)
    run.publish()
    with (
        elasticrec.serve("models/small", job=job) as server,
        elasticrec.serve("models/small", job=job, quiet=True) as quiet,
    ):
        run.publish()
        with server.client() as client, quiet.client() as other:
            wait_until(lambda: client.metadata()["version"] == other.metadata()["version"] == 2)

        def has_switched() -> bool:
            printed.append(capsys.readouterr().out)
            return "switched" in "".join(printed)

        wait_until(has_switched)
        elasticrec.train(job, fresh=True)
        trained = capsys.readouterr()
    assert trained.out == "" and trained.err and not re.search("version|small: |stopping", trained.err)
    lines = "".join([*printed, capsys.readouterr().out]).splitlines()
    assert [re.sub(r"[0-9.]+ s$|\([0-9,]+ rows\)|:[0-9]+/", "_", line) for line in lines] == [
        "loading models/small",
        "serving small version 1 _ on http://127.0.0.1_v1/models/small:predict",
        "small: switched to version 2 _, loaded in _",
        "stopping: answering accepted requests",
    ]


def test_the_port_of_a_server_is_checked() -> None:
    with (
        pytest.raises(elasticrec.ConfigError, match=r"^serve: port: expected 0 to 65535, got 70000$"),
        elasticrec.serve("models/small", port=70_000),
    ):
        pass


def test_serving_a_model_that_is_missing_leaves_no_server() -> None:
    before = threads()
    with pytest.raises(elasticrec.ElasticRecError, match="models/missing"), elasticrec.serve("models/missing"):
        pass
    expect_threads(before)


PS = {
    "train.mode": "ps",
    "train.servers": 2,
    "train.trainers": 1,
    "train.evaluate": {},
    "train.print_every_s": 0.1,
    "data.unit_bytes": 4096,
}


def test_mode_ps_trains_with_servers() -> None:
    events: list[elasticrec.Event] = []
    run = elasticrec.train(elasticrec.load_job("job.yaml", PS), events.append, quiet=True)
    assert run.finished and run.metrics["click"].samples == 200
    assert (run.path / "logs/ps-1.log").exists(), "parameter servers are processes with logs"
    assert {"progress", "pass"} <= {event.kind for event in events}
    assert children() == []


@pytest.mark.parametrize("ending", ["interrupt", "error", "false"])
def test_mode_ps_stops_with_a_checkpoint_and_leaves_no_process(ending: str) -> None:
    job = elasticrec.load_job("job.yaml", {**PS, "train.epochs": 100_000})
    running: list[list[str]] = []

    def stop(event: elasticrec.Event) -> bool:
        if not event.samples or running:
            return True
        running.append(children())
        if ending == "interrupt":
            signal.raise_signal(signal.SIGINT)
        if ending == "error":
            raise LookupError
        return ending != "false"

    expected = {"interrupt": KeyboardInterrupt, "error": LookupError}
    with pytest.raises(expected[ending]) if ending in expected else contextlib.nullcontext():
        elasticrec.train(job, stop, quiet=True)
    assert len(running[0]) == 4, "a coordinator, two servers and a trainer were running"
    assert children() == []
    assert not elasticrec.load_run("small").finished
    assert list(Path("runs/small/checkpoints").glob("ps-*/manifest.json"))
