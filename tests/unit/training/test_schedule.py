"""Evaluations inside an epoch, kept checkpoints, and stops: none of them changes the learned parameters."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.batches import Batches, open_batches
from elasticrec.errors import ModelError
from elasticrec.run import Run
from elasticrec.training import loop
from elasticrec.training.checkpoint import Checkpoint, best, latest, list_checkpoints
from elasticrec.training.evaluate import Evaluator
from elasticrec.training.loop import Trainer, train_job
from elasticrec.training.metrics import Metrics
from elasticrec.training.predict import load_checkpoint
from support.small import MakeJob, WriteSamples

Capture = pytest.CaptureFixture[str]
PARAMETERS = ("table/part-00000", "dense.bin")


@pytest.fixture(autouse=True)
def _data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write_samples: WriteSamples) -> None:
    """Write 640 samples, ten batches per epoch."""
    monkeypatch.chdir(tmp_path)
    write_samples(count=640)
    write_samples("eval.txt", count=200, seed=2)


def parameters(checkpoint: Checkpoint | None) -> dict[str, bytes]:
    assert checkpoint is not None
    return {name: (checkpoint.path / name).read_bytes() for name in PARAMETERS}


def records_of(job: Job, event: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in Run.of(job).metrics_path.read_text().splitlines()]
    return [record for record in records if record.get("event") == event]


def steps_saved(job: Job) -> list[str]:
    return [checkpoint.name.removeprefix("step-").lstrip("0") for checkpoint in list_checkpoints(Run.of(job))]


def script_evaluations(monkeypatch: pytest.MonkeyPatch, *aucs: float | None) -> None:
    """Replace evaluations; they return these values of AUC one after another."""
    left = list(aucs)

    def run(self: Evaluator, *_: object) -> list[Metrics]:
        auc = left.pop(0)
        loss = None if auc is None else 1 - auc
        return [Metrics(samples=1, auc=auc, log_loss=loss, copc=1.0, own={} if auc is None else {"mine": -auc})]

    monkeypatch.setattr(Evaluator, "run", run)


def test_evaluations_inside_an_epoch_are_recorded_and_change_nothing(make_job: MakeJob) -> None:
    plain = make_job(name="plain", train={"epochs": 2})
    train_job(plain)
    job = make_job(data={"eval": "eval.txt"}, train={"epochs": 2, "evaluate": {"every_steps": 4}})
    summary = train_job(job)
    assert parameters(latest(Run.of(job))) == parameters(latest(Run.of(plain)))
    inside = records_of(job, "evaluation")
    assert [(one["steps"], one["samples"]) for one in inside] == [(s, 64 * s) for s in (4, 8, 12, 16, 20)]
    assert all(one["eval"][0]["samples"] == 200 and len(one["eval"][0]["calibration"]) == 10 for one in inside)
    assert len({one["eval"][0]["log_loss"] for one in inside}) == 5, "each evaluation measures other parameters"
    assert summary.evaluation is not None
    assert [one["eval"] for one in records_of(job, "epoch")][-1] == [summary.evaluation["click"].to_dict()]
    # the epoch also ends at step 20
    assert inside[-1]["eval"] == records_of(job, "epoch")[-1]["eval"]


def test_evaluations_by_time(make_job: MakeJob) -> None:
    job = make_job(data={"eval": "eval.txt"}, train={"evaluate": {"every_s": "0.000001s"}})
    train_job(job)
    assert [one["steps"] for one in records_of(job, "evaluation")] == list(range(1, 11))
    rare = make_job(name="rare", data={"eval": "eval.txt"}, train={"evaluate": {"every_s": "2h"}})
    train_job(rare)
    assert records_of(rare, "evaluation") == []


def test_a_stopped_evaluation_is_repeated_after_the_resume(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    job = make_job(data={"eval": "eval.txt"}, train={"evaluate": {"every_steps": 4}})
    whole = make_job(name="whole", data={"eval": "eval.txt"}, train={"evaluate": {"every_steps": 4}})
    expected = train_job(whole)
    evaluate = Trainer._evaluate

    def stopping(self: Trainer) -> None:
        self.stop_requested = True
        evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_job(job)
    assert capsys.readouterr().err.endswith("stopped and saved; run the same command to continue from step 4\n")
    saved = latest(Run.of(job))
    assert saved is not None and (saved.progress.steps, saved.progress.evaluated) == (4, 0)
    assert saved.evaluation is None and saved.own_evaluation is None
    assert records_of(job, "evaluation") == []

    summary = train_job(job)
    assert [one["steps"] for one in records_of(job, "evaluation")] == [4, 8]
    for ours, theirs in zip(records_of(job, "evaluation"), records_of(whole, "evaluation"), strict=True):
        assert ours["eval"] == theirs["eval"]
    assert parameters(latest(Run.of(job))) == parameters(latest(Run.of(whole)))
    assert (summary.progress, summary.evaluation) == (expected.progress, expected.evaluation)


def test_a_failed_evaluation_inside_an_epoch_loses_no_training(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "eval.txt").write_text("not a sample\n")
    job = make_job(data={"eval": "eval.txt"}, train={"evaluate": {"every_steps": 3}})
    with pytest.raises(ValueError, match=r"data\.eval: 1 of 1 records are bad"):
        train_job(job)
    saved = latest(Run.of(job))
    assert saved is not None and saved.progress.steps == 3


def test_checkpoints_are_saved_every_epochs(make_job: MakeJob) -> None:
    job = make_job(train={"epochs": 5, "checkpoint": {"every_epochs": 2, "keep": 9}})
    train_job(job)
    assert steps_saved(job) == ["20", "40", "50"]
    whole = make_job(name="whole", train={"epochs": 5})
    train_job(whole)
    assert parameters(latest(Run.of(job))) == parameters(latest(Run.of(whole)))


def test_a_run_resumes_from_the_last_saved_epoch(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job = make_job(train={"epochs": 3, "checkpoint": {"every_epochs": 3, "every_steps": 8}})
    step = Trainer.step

    def crashing(self: Trainer, batch: _core.Batch) -> None:
        if self.progress.steps == 13:
            raise RuntimeError("crash")
        step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", crashing)
        with pytest.raises(RuntimeError, match="crash"):
            train_job(job)
    assert steps_saved(job) == ["8"]
    train_job(job)
    whole = make_job(name="whole", train={"epochs": 3})
    train_job(whole)
    assert parameters(latest(Run.of(job))) == parameters(latest(Run.of(whole)))


@pytest.mark.parametrize(("keep_epochs", "kept"), [(True, [0, 1, 2, 3]), ([0, 2], [0, 2, 3]), (False, [3])])
def test_snapshots_of_epochs_are_kept(make_job: MakeJob, keep_epochs: Any, kept: list[int]) -> None:
    job = make_job(train={"epochs": 4, "checkpoint": {"keep": 1, "keep_epochs": keep_epochs, "every_epochs": 3}})
    train_job(job)
    found = list_checkpoints(Run.of(job))
    assert [one.end_of_epoch for one in found] == kept
    for one in found:
        short = make_job(name=f"short{one.end_of_epoch}", train={"epochs": (one.end_of_epoch or 0) + 1})
        train_job(short)
        assert parameters(one) == parameters(latest(Run.of(short)))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"keep_best": "auc"}, "6"),
        ({"keep_best": "auc", "best_is": "lowest"}, "2"),
        ({"keep_best": "log_loss"}, "6"),
        ({"keep_best": "mine"}, "2"),
        ({"keep_best": "mine", "best_is": "lowest"}, "6"),
        ({}, None),
    ],
)
def test_the_best_checkpoint_is_kept(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], expected: str | None
) -> None:
    # after 2, 4, 6, 8 and 10 batches, and at the end of the epoch
    script_evaluations(monkeypatch, 0.6, 0.7, 0.8, 0.8, 0.61, 0.61)
    Path("mine.py").write_text("class Mine:\n    def update(self, *_): ...\n    def result(self): ...\n")
    train = {"evaluate": {"every_steps": 2}, "checkpoint": {"keep": 1, **settings}, "metrics": "mine.py:Mine"}
    job = make_job(data={"eval": "eval.txt"}, train=train)
    train_job(job)
    last = steps_saved(job)[-1]
    assert steps_saved(job) == ([last] if expected is None else [expected, last])
    chosen = best(Run.of(job), job)
    assert chosen is not None
    if expected:
        assert chosen.name.removeprefix("step-").lstrip("0") == expected
        assert load_checkpoint(Run.of(job), best=True).checkpoint == chosen
        assert load_checkpoint(Run.of(job)).checkpoint != chosen


def test_the_best_checkpoint_is_known_after_a_resume(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    # after 5 and 10 batches, at the end of the epoch, after 15 and 20 batches
    script_evaluations(monkeypatch, 0.9, None, 0.7, 0.85, 0.95)
    train = {"epochs": 4, "evaluate": {"every_steps": 5}, "checkpoint": {"keep": 1, "keep_best": "auc"}}
    job = make_job(data={"eval": "eval.txt"}, train=train)

    def stop_at(steps: int) -> None:
        train_job(job, callback=lambda event: event.steps < steps)

    stop_at(10)
    assert steps_saved(job)[0] == "5"
    stop_at(15)
    assert steps_saved(job)[0] == "5"
    stop_at(20)
    assert steps_saved(job) == ["20"]


def test_no_best_without_an_evaluation(make_job: MakeJob) -> None:
    job = make_job()
    train_job(job)
    assert best(Run.of(job), job) is None
    with pytest.raises(ModelError, match=r"^runs/small: expected a checkpoint that was evaluated, got none; train it"):
        load_checkpoint(Run.of(job), best=True)


def test_an_old_checkpoint_with_a_damaged_manifest_is_kept(make_job: MakeJob) -> None:
    job = make_job(train={"epochs": 1, "checkpoint": {"keep": 1, "keep_epochs": True}})
    train_job(job)
    first = latest(Run.of(job))
    assert first is not None
    more = make_job(train={"epochs": 3, "checkpoint": {"keep": 1, "keep_epochs": True}})
    trainer_calls = []

    def damage(event: Any) -> None:
        if event.kind == "epoch" and not trainer_calls:
            trainer_calls.append(event)
            (first.path / "manifest.json").write_text("{")

    train_job(more, callback=damage)
    paths = sorted(path.name for path in Run.of(job).checkpoints.iterdir())
    assert len(paths) == 3 and first.name in paths


def test_a_callback_receives_events_and_may_stop(make_job: MakeJob, capsys: Capture) -> None:
    events = []

    def callback(event: Any) -> bool:
        events.append(event)
        return event.steps < 13

    train = {"epochs": 2, "evaluate": {"every_steps": 5}, "print_every_s": 1e-9}
    job = make_job(data={"eval": "eval.txt"}, train=train)
    summary = train_job(job, callback=callback)
    assert (summary.progress.steps, summary.progress.finished) == (13, False)
    assert "stopped and saved; run the same command to continue from step 13\n" in capsys.readouterr().err
    kinds = [event.kind for event in events]
    assert kinds.count("progress") == 13
    assert [kind for kind in kinds if kind != "progress"] == ["start", "evaluation", "evaluation", "epoch"]
    assert events[-1].values["shares"].keys() >= {"wait", "pull", "forward", "backward", "push"}
    for event in events:
        if event.kind == "progress":
            stages = [share for name, share in event.values["shares"].items() if name not in ("read", "parse")]
            assert 0 < sum(stages) <= 1.001

    whole = make_job(name="whole", data={"eval": "eval.txt"}, train=train)
    expected = train_job(whole, callback=lambda event: None)
    assert train_job(job).progress == expected.progress
    assert parameters(latest(Run.of(job))) == parameters(latest(Run.of(whole)))


@pytest.mark.parametrize("kind", ["progress", "evaluation", "epoch"])
def test_a_callback_that_fails_leaves_a_checkpoint(make_job: MakeJob, kind: str) -> None:
    def callback(event: Any) -> None:
        if event.kind == kind:
            raise LookupError(kind)

    train = {"evaluate": {"every_steps": 5}, "print_every_s": 1e-9}
    job = make_job(data={"eval": "eval.txt"}, train=train)
    with pytest.raises(LookupError, match=kind):
        train_job(job, callback=callback)
    saved = latest(Run.of(job))
    assert saved is not None
    assert saved.progress.steps == {"progress": 1, "evaluation": 5, "epoch": 10}[kind]
    assert train_job(job).progress.finished


def test_a_stop_at_the_end_of_an_unsaved_epoch_saves_it(make_job: MakeJob) -> None:
    job = make_job(train={"epochs": 3, "checkpoint": {"every_epochs": 3}})
    summary = train_job(job, callback=lambda event: event.kind != "epoch")
    assert (summary.progress.epoch, summary.progress.steps) == (1, 10)
    assert steps_saved(job) == ["10"]
    train_job(job)
    whole = make_job(name="whole", train={"epochs": 3})
    train_job(whole)
    assert parameters(latest(Run.of(job))) == parameters(latest(Run.of(whole)))


def test_a_second_signal_in_an_evaluation_saves_nothing_more(
    make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(data={"eval": "eval.txt"}, train={"evaluate": {"every_steps": 3}})

    def interrupted(*_: object) -> list[Metrics]:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("unreachable")

    # SIGINT may be ignored here, because shells ignore it for background jobs
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Evaluator, "run", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_job(job)
    finally:
        signal.signal(signal.SIGINT, before)
    assert latest(Run.of(job)) is None


def test_an_auc_worse_than_chance_is_reported(make_job: MakeJob, tmp_path: Path, capsys: Capture) -> None:
    swapped = []
    for line in (tmp_path / "train.txt").read_text().splitlines():
        show, click, *fields = line.split()
        swapped.append(" ".join([show, str(int(show) - int(click)), *fields]))
    (tmp_path / "eval.txt").write_text("\n".join(swapped))
    # after a few epochs the training data is learned well enough to predict the swapped labels badly
    train_job(make_job(data={"eval": "eval.txt"}, dense={"optimizer": {"learning_rate": 0.01}}, train={"epochs": 3}))
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("eval click: ")]
    assert (
        lines
        and "standard errors below 0.5" in lines[-1]
        and "labels of `data.train` or `data.eval` swapped" in lines[-1]
    )
    train_job(make_job(name="right", data={"eval": "train.txt"}, train={"epochs": 3}))
    assert "is under 0.5" not in capsys.readouterr().err


class CountingReader:
    """A reader that reports fixed times of its threads per batch."""

    def __init__(self, reader: Batches) -> None:
        self._reader = reader
        self._batches = 0

    def __next__(self) -> _core.Batch:
        batch = next(self._reader)
        self._batches += 1
        return batch

    def times(self) -> tuple[float, float]:
        return 1000.0 * self._batches, 4000.0 * self._batches

    def close(self) -> None:
        self._reader.close()


def test_reader_threads_are_reported_beside_the_loop(make_job: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "open_batches", lambda *args, **options: CountingReader(open_batches(*args, **options)))
    summary = train_job(make_job(data={"workers": 2}, train={"epochs": 2}))
    assert summary.read is not None and summary.parse is not None
    assert summary.parse == pytest.approx(2 * summary.read), "four times the seconds, divided by two workers"
    assert not {"read", "parse"} & summary.shares.keys()
    assert sum(summary.shares.values()) <= 1
