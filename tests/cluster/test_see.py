"""Status, logs, metrics and scaling of a running job: roles join, leave and die, and all counts are exact."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticrec.data.demo import write_demo
from elasticrec.launch.status import read_status
from elasticrec.run import Run
from support.cluster import TIMEOUT_S, Training, check_counts
from support.harness import elasticrec, succeed

DOCS = Path(__file__).parents[2] / "docs/metrics.md"
# More than twice as many as pass during the test: commands may be slow on a machine where training is fast.
EPOCHS = 18
# Longer than a stall of the machine.
LEASE_S = 6

Status = dict[str, Any]


@dataclass
class RecordedRun:
    """Status, output and metrics recorded from one run."""

    directory: Path
    training: Training
    statuses: dict[str, Status] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    scrapes: dict[str, list[str]] = field(default_factory=dict)
    """By role, the metrics of each process."""
    scale_s: dict[str, float] = field(default_factory=dict)
    command_s: float = 0.0
    """Longest time of a `status` command during the run."""
    unauthorized_codes: list[int] = field(default_factory=list)

    def status(self) -> Status:
        return read_status(Run(self.directory / "runs/see"))

    def until(self, reached: Callable[[Status], bool]) -> Status:
        end = time.monotonic() + TIMEOUT_S
        while not reached(status := self.status()):
            assert self.training.process.poll() is None and time.monotonic() < end, self.training.output()
            time.sleep(0.1)
        return status

    def scale(self, *arguments: str) -> None:
        started = time.monotonic()
        self.texts[" ".join(arguments)] = succeed("scale", "see", *arguments, cwd=self.directory)
        self.scale_s[" ".join(arguments)] = time.monotonic() - started

    def measure(self) -> None:
        started = time.monotonic()
        succeed("status", "see", cwd=self.directory)
        self.command_s = max(self.command_s, time.monotonic() - started)

    def scrape(self, status: Status) -> None:
        """Read the metrics of all roles with the token of the run; try each role with a wrong token, too."""
        token = json.loads((self.directory / "runs/see/coordinator/address.json").read_text())["token"]
        urls = {"coordinator": [f"{status['coordinator']}/metrics"]}
        urls |= {"ps": [shard["figures"]["metrics"] for shard in status["shards"]]}
        urls |= {"trainer": [trainer["figures"]["metrics"] for trainer in status["trainers"]]}
        for role, addresses in urls.items():
            self.scrapes[role] = [_get(url, token) for url in addresses]
            with pytest.raises(urllib.error.HTTPError) as refused:
                _get(addresses[0], "another")
            self.unauthorized_codes.append(refused.value.code)
            refused.value.close()


def _get(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        text: str = response.read().decode()
        return text


def has(servers: int, trainers: int) -> Callable[[Status], bool]:
    def reached(status: Status) -> bool:
        states = [shard["state"] for shard in status.get("shards", [])]
        alive = [trainer for trainer in status.get("trainers", []) if trainer["state"] == "alive"]
        return states == ["serving"] * servers and len(alive) == trainers and bool(status["units"]["complete"])

    return reached


def have_all_reported(status: Status) -> bool:
    """Return whether every trainer has reported, samples are trained and a version is published."""
    is_known = all(trainer["figures"] for trainer in status["trainers"])
    return is_known and status["samples_per_s"] > 0 and status["publish"]["committed"] > 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRun]:
    """Scale a run to 1, 3, 1 trainers and 2, 3, 1, 2 servers, with a SIGKILL during a move and a SIGTERM per role."""
    directory = tmp_path_factory.mktemp("see")
    write_demo(directory / "data", samples=160_000, slots=20, hours=4, seed=1)
    job = {
        "name": "see",
        "data": {
            "format": "slots",
            "train": [f"data/20260101/0{hour}" for hour in range(3)],
            "slots": "0-19",
            "unit_bytes": 2**20,
        },
        "model": {"kind": "deepfm", "dim": 8, "hidden": [64, 32]},
        "publish": {"every": "1s"},
        "train": {
            "mode": "ps",
            "servers": 2,
            "threads": 1,
            "batch_size": 256,
            "epochs": EPOCHS,
            "ps": {"lease_s": LEASE_S, "heartbeat_s": 0.5},
        },
    }
    (directory / "job.yaml").write_text(yaml.safe_dump(job))
    recorded = RecordedRun(directory, Training.start(directory))
    with contextlib.ExitStack() as stack:
        stack.callback(recorded.training.stop)
        _record(recorded)
        yield recorded


def _record(recorded: RecordedRun) -> None:
    recorded.training.wait_for("servers 2/2")
    recorded.until(has(2, 1))
    recorded.scale("--trainers", "3", "--servers", "3")
    recorded.statuses["many"] = recorded.until(lambda status: has(3, 3)(status) and have_all_reported(status))
    recorded.texts["json"] = succeed("status", "job.yaml", "--json", cwd=recorded.directory)
    recorded.texts["status"] = succeed("status", "see", cwd=recorded.directory)
    recorded.scrape(recorded.statuses["many"])
    # A surplus server dies before its partitions have moved: it must be restarted to hand them over.
    scaling = subprocess.Popen(
        [sys.executable, "-m", "elasticrec.cli", "scale", "see", "--servers", "1"], cwd=recorded.directory
    )
    recorded.until(lambda status: status.get("wanted", {}).get("servers") == 1)
    recorded.training.send(max(recorded.training.roles("ps"))[0], signal.SIGKILL)
    assert scaling.wait(TIMEOUT_S) == 0
    recorded.scale("--trainers", "1")
    # A server and a trainer get SIGTERM and are replaced.
    for role in ("ps", "trainer"):
        before = recorded.training.roles(role)
        recorded.training.send(before[0][0], signal.SIGTERM)
        end = time.monotonic() + TIMEOUT_S
        while set(recorded.training.roles(role)) & set(before) or not recorded.training.roles(role):
            assert time.monotonic() < end, recorded.training.output()
            time.sleep(0.05)
    recorded.until(has(1, 1))
    recorded.measure()
    recorded.scale("--servers", "2")
    recorded.measure()
    recorded.training.finish()


@pytest.mark.slow
def test_every_sample_counts_once_however_it_is_scaled(recorded: RecordedRun) -> None:
    assert f"trained runs/see: {EPOCHS * 120_000:,} samples" in recorded.training.output()
    check_counts(recorded.directory / "runs/see", sorted(recorded.directory.glob("data/20260101/0[012]/*.txt")), EPOCHS)
    coordinator = (recorded.directory / "runs/see/logs/coordinator.log").read_text()
    moves = re.findall(r"the partitions moved from (\d) to (\d), map (\d)", coordinator)
    assert moves == [("2", "3", "2"), ("3", "1", "3"), ("1", "2", "4")]


@pytest.mark.slow
def test_servers_change_in_ten_seconds(recorded: RecordedRun) -> None:
    assert recorded.texts["--servers 2"].startswith(
        "scaling to 2 servers and 1 trainer\nscaled to 2 servers and 1 trainer in "
    )
    # On a slow machine, several times as long as another command.
    assert recorded.scale_s["--servers 2"] < max(10, 5 * recorded.command_s)


@pytest.mark.slow
def test_status_shows_every_role(recorded: RecordedRun) -> None:
    many = recorded.statuses["many"]
    assert many["state"] == "running" and many["wanted"] == {"servers": 3, "trainers": 3}
    for shard in many["shards"]:
        assert shard["figures"]["num_rows"] > 0 and shard["figures"]["num_bytes"] > 0 and shard["address"]
        assert 0 < shard["lease_left_s"] <= LEASE_S + 0.5
    for trainer in many["trainers"]:
        assert trainer["figures"]["name"].startswith("trainer-")
    assert sum(trainer["samples_per_s"] for trainer in many["trainers"]) == pytest.approx(many["samples_per_s"])
    assert any(trainer["figures"].get("staleness_sum", 0) > 0 for trainer in many["trainers"])
    assert json.loads(recorded.texts["json"]).keys() == many.keys()
    text = recorded.texts["status"]
    assert re.search(r"^runs/see: running, pass \d+ of 18, coordinator http://127\.0\.0\.1:\d+, term 1$", text, re.M)
    assert re.search(r"^units: \d+ of \d+ complete, \d+ leased, \d+ behind, \d+ not yet confirmed$", text, re.M)
    assert re.search(
        r"^  ps-2 serving, partitions 170 to 255, 127\.0\.0\.1:\d+, [\d,]+ rows, [\d.]+ MiB, time:", text, re.M
    )
    assert re.search(r"^  trainer-\d alive, .* samples/s, staleness [\d.]+ \(max \d+\), time: .*forward", text, re.M)
    assert re.search(r"^checkpoint: ps-\d+-\d+, \d+ s old, took [\d.]+ s.*; \d+ committed, 0 failed$", text, re.M)


@pytest.mark.slow
def test_a_finished_run(recorded: RecordedRun) -> None:
    checkpoint = max((recorded.directory / "runs/see/checkpoints").glob("step-*")).name
    assert succeed("status", "see", cwd=recorded.directory).startswith(
        f"runs/see: finished; last checkpoint {checkpoint} of "
    )
    assert not (recorded.directory / "runs/see/coordinator/address.json").exists()
    refused = elasticrec("scale", "see", "--servers", "3", cwd=recorded.directory)
    assert refused.returncode == 2 and refused.stderr.startswith(
        f"error: runs/see: finished; last checkpoint {checkpoint}"
    )
    assert refused.stderr.count("\n") == 1


@pytest.mark.slow
def test_logs(recorded: RecordedRun) -> None:
    one = succeed("logs", "see", "ps-2", cwd=recorded.directory).splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3} ", line) for line in one)
    assert "shard 2: loaded ps-" in one[0]
    merged = succeed("logs", "see", "ps", cwd=recorded.directory).splitlines()
    assert {line.partition(": ")[0] for line in merged} == {"ps-0", "ps-1", "ps-2"}
    times = [line.partition(": ")[2].partition(" ")[0] for line in merged]
    assert times == sorted(times)
    assert succeed("logs", "see", "ps", "--tail", "2", cwd=recorded.directory).splitlines() == merged[-2:]
    trainers = succeed("logs", "see", "trainer", cwd=recorded.directory)
    assert re.search(r"leaving the run, giving back unit \d+|left", trainers)


@pytest.mark.slow
def test_docs_list_every_metric_and_no_other(recorded: RecordedRun) -> None:
    # The metrics of the store are compared in test_store.py.
    of_runs = DOCS.read_text().partition("## Store")[0]
    documented = dict(re.findall(r"^\| `(elasticrec_\w+)` \| (\w+) \|", of_runs, re.M))
    scraped: dict[str, str] = {}
    for role, texts in recorded.scrapes.items():
        for text in texts:
            kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
            assert set(re.findall(r"^# HELP (\w+) \S", text, re.M)) == set(kinds)
            values = set(re.findall(r"^(\w+)(?:\{[^}]*\})? [\d.e+-]+$", text, re.M))
            assert values == set(kinds), "every metric has a type and a value"
            assert all(name.startswith(f"elasticrec_{role}_") for name in kinds)
            scraped |= kinds
    assert scraped == documented
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in documented.items())
    assert [len(recorded.scrapes[role]) for role in ("coordinator", "ps", "trainer")] == [1, 3, 3]
    assert recorded.unauthorized_codes == [401, 401, 401]
