"""The end of a coordinator's process: it waits for its members, and a failed run ends with an error."""

import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from elasticrec.config import Job
from elasticrec.coordinator.api import ServerOptions
from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.coordinator.settings import Settings
from elasticrec.errors import ElasticRecError
from elasticrec.roles import coordinator as role
from elasticrec.run import Run
from support.fake_roles import Clock, ask, plan_of
from support.small import MakeJob, WriteSamples


def test_the_coordinator_waits_for_its_members_to_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    waited: list[float] = []
    settings = Settings(job="j", num_partitions=4, servers=1, plan=plan_of(tmp_path))
    with closing(Coordinator(Run(tmp_path / "run"), settings, clock=clock)) as coordinator:
        members = [
            ask(coordinator, "register", protocol=1, role=name, nonce=name)["incarnation"] for name in ("ps", "trainer")
        ]
        leaves_at = dict(zip((clock() + 1.0, clock() + 2.0), members, strict=True))

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            clock.now += seconds
            for at in [at for at in leaves_at if at <= clock()]:
                ask(coordinator, "heartbeat", incarnation=leaves_at.pop(at), sequence=1, leaving=True)
            for incarnation in leaves_at.values():
                ask(coordinator, "heartbeat", incarnation=incarnation, sequence=1)

        monkeypatch.setattr(role, "time", SimpleNamespace(monotonic=clock, sleep=sleep))
        role._wait_for_members(coordinator)
        assert not leaves_at and 2.0 <= sum(waited) < 2.3, "it ends as soon as both have left"
        role._wait_for_members(coordinator)
        assert sum(waited) < 2.3
        # The wait for a member that does not leave is limited.
        leaves_at[clock() + 1e6] = ask(coordinator, "register", protocol=1, role="trainer", nonce="x")["incarnation"]
        waited.clear()
        role._wait_for_members(coordinator)
        assert 9.9 <= sum(waited) < 10.3


def test_a_failed_run_does_not_end_as_finished(
    tmp_path: Path, make_job: MakeJob, write_samples: WriteSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples()
    job: Job = make_job(train={"mode": "ps"})
    run = Run.create(job)

    def fail(coordinator: Coordinator) -> None:
        coordinator.failure = "train.txt: no such file"

    monkeypatch.setattr(Coordinator, "tick", fail)
    with pytest.raises(ElasticRecError, match=r"^train\.txt: no such file$"):
        role.serve_coordinator(job, run, ServerOptions(), threading.Event())
