"""The reader of a version and its reader processes: start, supervision, end."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.config import Job, parse_job
from elasticrec.errors import ModelError
from elasticrec.publish.train import train_and_publish
from elasticrec.repository.repository import Repository
from elasticrec.serving import readers
from elasticrec.serving.follow import Follower, ReaderSettings
from elasticrec.serving.onnxruntime import library_path
from elasticrec.serving.plan import plan_models
from elasticrec.serving.reader import encode_batch
from elasticrec.serving.reader_source import ReaderSource, reader_source
from elasticrec.serving.readers import ReaderProcesses
from support.store import wait_until

FEATURES = {
    "format": "reader",
    "hash": 1,
    "slots": [{"name": "user", "pooling": "sum"}],
    "dense": [],
    "labels": ["click"],
}
GOOD = """\
class Mine:
    def parse(self, line):
        click, user = line.split(",")
        return {"click": float(click) if click else None, "user": user}
"""


def source(text: str) -> ReaderSource:
    return ReaderSource("reader.py:Mine", text.encode(), json.dumps(FEATURES))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class WatchedReaders:
    """Reader processes, their ids and their log messages."""

    def __init__(self, caplog: pytest.LogCaptureFixture, text: str, num: int = 1) -> None:
        self._caplog = caplog
        self.processes = ReaderProcesses(source(text), num, 1000, "demo")

    @property
    def messages(self) -> list[str]:
        return self._caplog.messages

    @property
    def pids(self) -> list[int]:
        return [
            supervisor._process.pid for supervisor in self.processes._supervisors if supervisor._process is not None
        ]


@pytest.fixture
def watch(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., WatchedReaders]]:
    caplog.set_level("INFO")
    made: list[WatchedReaders] = []

    def make(*arguments: Any) -> WatchedReaders:
        made.append(WatchedReaders(caplog, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.processes.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_module", r"^reader.py:1: ModuleNotFoundError: No module named 'no_such_module'$"),
        ("class Other: ...", r"^reader.py: expected a class `Mine`, got `Other`$"),
        ("import os; os._exit(7)", r"^reader.py:Mine: the reader process ended \(code 7\) before it was ready$"),
        (
            "import os; os.kill(os.getpid(), 9)",
            r"^reader.py:Mine: the reader process ended \(signal 9, SIGKILL\) before it was ready$",
        ),
    ],
)
def test_a_reader_that_cannot_be_created_is_reported_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ReaderProcesses(source(text), 2, 1000, "demo")


def test_starting_a_reader_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "_START_S", 0.5)
    with pytest.raises(ModelError, match=r"^reader.py:Mine: the reader was not ready within 0 s$"):
        ReaderProcesses(source("import time; time.sleep(3600)"), 1, 1000, "demo")


def test_a_dead_reader_process_is_restarted(watch: Callable[..., WatchedReaders]) -> None:
    one = watch(GOOD, 2)
    (killed, other) = one.pids
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: one.pids[0] != killed and one.processes._supervisors[0]._number == 2)
    assert one.pids[1] == other
    assert one.messages == ["demo: a reader process ended (signal 9, SIGKILL), restarting it"]


def test_readers_that_keep_dying_are_restarted_with_back_off(watch: Callable[..., WatchedReaders]) -> None:
    text = "import os, threading, time\nthreading.Timer(0.2, lambda: os._exit(5)).start()\n" + GOOD
    one = watch(text)
    seen: set[int] = set()
    until = time.monotonic() + 6

    def is_over() -> bool:
        """Return whether six seconds have passed, or more on a machine on which two starts take longer."""
        seen.update(one.pids)
        return time.monotonic() >= until and len(one.messages) >= 2

    wait_until(is_over, lambda: str(one.messages))
    # restarts are immediate, then after 0.5, 1, 2 … seconds, plus the time to start and die
    assert 2 <= len(seen) <= 5, seen
    assert one.messages == [
        "demo: a reader process ended (code 5), restarting it",
        "demo: a reader process ended (code 5), restarting it with back-off",
    ]


def test_retired_processes_end_with_the_last_reference(watch: Callable[..., WatchedReaders]) -> None:
    one = watch(GOOD)
    (pid,) = one.pids
    # a loaded version holds a reference to its reader processes
    held = one.processes.core
    one.processes.retire()
    assert not is_gone(pid)
    del held
    wait_until(lambda: is_gone(pid))
    assert one.messages == []


def train(directory: Path, text: str, **publish: Any) -> Job:
    directory.mkdir(exist_ok=True)
    (directory / "mine.py").write_text(text)
    (directory / "train.txt").write_text("".join(f"{i % 3 // 2},u{i % 7}\n" for i in range(300)))
    raw = {
        "name": "small",
        "data": {"reader": "mine.py:Mine", "train": "train.txt", "slots": ["user"]},
        "model": {"kind": "lr"},
        "train": {"batch_size": 64, "threads": 1, "epochs": 3},
        "publish": {"every": "epoch", **publish},
    }
    job = parse_job(raw, base=directory, source="job.yaml")
    train_and_publish(job)
    return job


def test_every_version_carries_its_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = train(tmp_path, GOOD, base_every=2)
    repository = Repository.open("models", "small")
    assert repository.versions() == [1, 2, 3]
    for number in repository.versions():
        version = repository.version(number)
        path = Path("models/small") / version.name
        assert version.is_delta == (number > 1)
        # a release without support for readers can serve a base of format 1
        assert version.manifest["format"] == (2 if number > 1 else 1)
        found = reader_source(path)
        assert found == ReaderSource("reader.py:Mine", GOOD.encode(), json.dumps(job.features()))
    predictor = _core.Predictor("models/small", str(library_path()))
    assert found is not None
    batch = found.line_reader().parse(b"0,u1\n\n,u2\r\n")
    scores = predictor.predict_parsed(encode_batch(batch))
    assert scores.shape == (2, 1) and np.isfinite(scores).all()
    (path / "reader.py").write_text(GOOD + "#")
    with pytest.raises(
        ModelError, match=r"deltas/3/reader.py: sha-256 differs from the manifest, the file is damaged$"
    ):
        reader_source(path)


class FakeServer:
    """Records the readers of each load."""

    def __init__(self) -> None:
        self.loaded_readers: list[Any] = []
        self.fails = False

    def load(self, model: str, variant: str, path: str, **options: Any) -> tuple[int, int]:
        if self.fails:
            raise ModelError("planted")
        self.loaded_readers.append(options["readers"])
        return int(Path(path).name), 1

    def note(self, *_: Any) -> None:
        """Ignore the note."""


def test_readers_are_reused_by_versions_with_the_same_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    job = train(tmp_path, GOOD, base_every=2)
    (variant,) = plan_models(["models/small"], job, is_given=False)
    repository = variant.repository
    assert repository is not None
    offered = [1]
    monkeypatch.setattr(type(repository), "current", lambda _: offered[0])
    server = FakeServer()
    follower = Follower(server, variant, tmp_path / "cache", readers=ReaderSettings(1, 1000))
    try:
        follower.begin()
        first = follower._readers
        assert first is not None
        for number in (2, 3):
            offered[0] = number
            follower.poll()
        assert follower.version == 3 and follower._readers is first
        assert server.loaded_readers == [first.core] * 3
        # another reader gets new processes; a version that cannot be loaded keeps the current ones
        changed = ReaderSource("reader.py:Mine", GOOD.encode() + b"#", first.source.features)
        monkeypatch.setattr("elasticrec.serving.follow.reader_source", lambda _: changed)
        offered[0], server.fails = 2, True
        follower.poll()
        assert "planted" in caplog.messages[-1] and follower._readers is first and not first.is_ending
        server.fails = False
        monkeypatch.setattr(follower, "_again_at", 0.0)
        follower.poll()
        assert follower.version == 2 and follower._readers is not first and first.is_ending
    finally:
        follower.close()


def test_without_reader_settings_no_reader_process_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = train(tmp_path, GOOD)
    (variant,) = plan_models(["models/small"], job, is_given=False)
    server = FakeServer()
    monkeypatch.setattr("elasticrec.serving.follow.ReaderProcesses", None)
    follower = Follower(server, variant, tmp_path / "cache")
    follower.begin()
    assert server.loaded_readers == [None]


def test_lines_are_split_as_in_training(tmp_path: Path) -> None:
    """A line ends with a line feed or CRLF; a carriage return inside belongs to the line."""
    reader = source("class Mine:\n    def parse(self, line):\n        return {'user': line}\n").line_reader()
    parser = _core.Parser(json.dumps(FEATURES))
    batch = reader.parse(b"a\rb\r\n\r\nc\x0bd\n")
    assert batch.signs.tolist() == [parser.sign("user", b"a\rb"), parser.sign("user", b"c\x0bd")]
