"""The training loop: every sample once per epoch, the same state after any stop, and clear errors."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ConfigError, ElasticRecError, ModelError, SampleError
from elasticrec.run import Run
from elasticrec.training.checkpoint import latest, list_checkpoints
from elasticrec.training.loop import Trainer, train_job
from elasticrec.training.metrics import MetricSums
from elasticrec.training.predict import load_checkpoint
from elasticrec.training.report import Reporter, Summary
from support.small import MakeJob, WriteSamples, sample_lines

Capture = pytest.CaptureFixture[str]


pytestmark = pytest.mark.usefixtures("own_directory")


def state_of(job: Job) -> dict[str, bytes]:
    """Return the parameters of the newest checkpoint."""
    checkpoint = latest(Run.of(job))
    assert checkpoint is not None
    return {name: (checkpoint.path / name).read_bytes() for name in ("table/part-00000", "dense.bin")}


def records_of(job: Job) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Run.of(job).metrics_path.read_text().splitlines()]


def refusal(job: Job, kind: type[ElasticRecError]) -> str:
    with pytest.raises(kind) as caught:
        train_job(job)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Send this process a signal after the given step, or raise there, like a crash."""
    with monkeypatch.context() as patch:

        def stop(steps: int, number: signal.Signals | None) -> None:
            step = Trainer.step

            def counted(self: Trainer, batch: _core.Batch) -> None:
                if number is None and self.progress.steps == steps:
                    raise RuntimeError("crash")
                step(self, batch)
                if number is not None and self.progress.steps == steps:
                    os.kill(os.getpid(), number)

            patch.setattr(Trainer, "step", counted)

        stop.undo = patch.undo  # type: ignore[attr-defined]
        yield stop


def test_training_learns_and_reports(make_job: MakeJob, write_samples: WriteSamples, capsys: Capture) -> None:
    write_samples(count=3000)
    write_samples("eval.txt", count=1000, seed=2)
    job = make_job(data={"eval": "eval.txt"}, train={"epochs": 2})
    summary = train_job(job)
    assert summary.evaluation is not None
    evaluation = summary.evaluation["click"]
    assert evaluation.samples == 1000
    assert evaluation.auc is not None
    assert evaluation.auc > 0.6
    assert summary.train["click"].samples == 3000
    assert (summary.progress.samples, summary.progress.epoch, summary.progress.steps) == (6000, 2, 94)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line.startswith("epoch ") and "click: train" in line] == lines[-2:]
    assert re.fullmatch(
        r"epoch 2/2 click: train loss 0\.\d{4} auc 0\.\d{4} copc \d\.\d\d \| eval loss .* auc .* copc .*", lines[-1]
    )
    epochs = [record for record in records_of(job) if "epoch" in record]
    assert [(record["epoch"], record["samples"]) for record in epochs] == [(1, 3000), (2, 6000)]
    assert epochs[1]["eval"] == [evaluation.to_dict()]


def test_the_evaluation_measures_the_checkpoint(make_job: MakeJob, write_samples: WriteSamples) -> None:
    """Scores of `predict` give the metrics of the summary; the evaluation does not change the parameters."""
    write_samples(count=500)
    path = write_samples("eval.txt", count=1000, seed=2)
    job = make_job(data={"eval": "eval.txt"})
    summary = train_job(job)
    without = make_job(name="without")
    train_job(without)
    assert state_of(job) == state_of(without)

    scores = load_checkpoint(Run.of(job)).predict(path.read_bytes()).astype(float)[:, 0]
    batch = _core.Parser(json.dumps(job.features())).parse(path.read_bytes(), labels=True)
    sums = MetricSums()
    sums.add(torch.logit(torch.tensor(scores)).numpy(), batch.labels[:, 0], batch.weights)
    assert summary.evaluation is not None
    for name in ("auc", "log_loss", "copc"):
        assert getattr(sums.result(), name) == pytest.approx(getattr(summary.evaluation["click"], name), abs=1e-4)


def test_evaluation_batches_may_be_larger_than_training_batches(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=50)
    write_samples("eval.txt", count=1000, seed=2)
    summary = train_job(make_job(data={"eval": "eval.txt"}, train={"epochs": 2, "batch_size": 512}))
    assert summary.progress.samples == 100


def test_every_epoch_has_its_own_units(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=2000)
    job = make_job(data={"unit_bytes": 4096}, train={"epochs": 3})
    train_job(job)
    units = [
        [json.loads(line) for line in path.read_text().splitlines()[:-1]]
        for path in sorted(Run.of(job).units.iterdir())
    ]
    assert [len(epoch) for epoch in units] == [len(units[0])] * 3
    assert [unit["id"] for epoch in units for unit in epoch] == list(range(3 * len(units[0])))
    assert [{unit["epoch"] for unit in epoch} for epoch in units] == [{0}, {1}, {2}]
    orders = [[unit["start"] for unit in epoch] for epoch in units]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_run_stopped_anywhere_ends_with_the_same_state(
    make_job: MakeJob, write_samples: WriteSamples, stop_after: Any, shuffle: bool
) -> None:
    write_samples(count=1000)
    write_samples("eval.txt", count=200, seed=2)

    def job_of(name: str) -> Job:
        # units of about ten batches and a checkpoint every seven steps: in the middle of units and epochs
        train = {"epochs": 2, "batch_size": 32, "checkpoint": {"every_steps": 7}}
        return make_job(name=name, data={"eval": "eval.txt", "unit_bytes": 7000, "shuffle": shuffle}, train=train)

    whole = job_of("whole")
    expected = train_job(whole)
    assert expected.progress.steps > 64

    broken = job_of("broken")
    for steps in (3, 8, 20, 40, 41, 60):
        stop_after(steps, None)
        with pytest.raises(RuntimeError, match="crash"):
            train_job(broken)
        stop_after.undo()
    check_same(whole, expected, broken, train_job(broken))

    interrupted = job_of("interrupted")
    for steps, number in ((5, signal.SIGINT), (30, signal.SIGTERM), (50, signal.SIGINT)):
        stop_after(steps, number)
        with pytest.raises(KeyboardInterrupt):
            train_job(interrupted)
        stop_after.undo()
        checkpoint = latest(Run.of(interrupted))
        assert checkpoint is not None
        assert checkpoint.progress.steps == steps
    check_same(whole, expected, interrupted, train_job(interrupted))


def check_same(whole: Job, expected: Summary, other: Job, summary: Summary) -> None:
    assert state_of(other) == state_of(whole)
    assert summary.progress == expected.progress
    assert summary.train == expected.train
    assert summary.evaluation == expected.evaluation


def test_a_signal_saves_and_restores_the_handlers(
    make_job: MakeJob, write_samples: WriteSamples, stop_after: Any, capsys: Capture
) -> None:
    write_samples(count=500)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    stop_after(3, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_job(make_job())
    assert capsys.readouterr().err.splitlines()[-1] == "stopped and saved; run the same command to continue from step 3"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_a_finished_run_is_reported_and_not_changed(
    make_job: MakeJob, write_samples: WriteSamples, capsys: Capture
) -> None:
    write_samples(count=300)
    write_samples("eval.txt", count=100, seed=2)
    job = make_job(data={"eval": "eval.txt"})
    first = train_job(job)
    checkpoint, records = latest(Run.of(job)), records_of(job)
    assert checkpoint is not None
    assert checkpoint.progress.finished
    capsys.readouterr()
    again = train_job(job)
    assert capsys.readouterr().err == (
        "runs/small is finished: 1 of 1 epochs, 300 samples; "
        "raise `train.epochs` to continue, or start over with `--fresh`\n"
    )
    assert latest(Run.of(job)) == checkpoint
    assert records_of(job) == records
    assert (again.progress, again.train, again.evaluation) == (first.progress, first.train, first.evaluation)


def test_more_epochs_continue_a_finished_run(make_job: MakeJob, write_samples: WriteSamples, stop_after: Any) -> None:
    write_samples(count=300)
    grown = make_job(name="grown")
    train_job(grown)
    grown = make_job(name="grown", train={"epochs": 3, "checkpoint": {"every_steps": 2}})
    stop_after(7, None)
    with pytest.raises(RuntimeError, match="crash"):
        train_job(grown)
    stop_after.undo()
    checkpoint = latest(Run.of(grown))
    assert checkpoint is not None
    assert (checkpoint.progress.epoch, checkpoint.progress.finished) == (1, False)
    summary = train_job(grown)
    assert (summary.progress.epoch, summary.progress.samples, summary.progress.finished) == (3, 900, True)
    at_once = make_job(name="at_once", train={"epochs": 3})
    train_job(at_once)
    assert state_of(grown) == state_of(at_once)


def test_fresh_discards_the_run(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=300)
    job = make_job()
    train_job(job)
    state = state_of(job)
    other = make_job(train={"seed": 2})
    assert "differs from the job of runs/small in `train.seed`" in refusal(other, ConfigError)
    assert train_job(other, fresh=True).progress.samples == 300
    assert state_of(other) != state
    assert train_job(job, fresh=True).progress.samples == 300
    assert state_of(job) == state


def test_a_failed_fresh_start_keeps_the_run(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=300)
    job = make_job()
    train_job(job)
    before = state_of(job)
    with pytest.raises(ConfigError, match="no file matches"):
        train_job(make_job(data={"train": "elsewhere.txt"}), fresh=True)
    assert state_of(job) == before


def test_a_run_without_a_checkpoint_uses_the_current_job_and_data(
    make_job: MakeJob, write_samples: WriteSamples, stop_after: Any
) -> None:
    """Units recorded for another job, or for files that have changed, are planned again."""
    write_samples(count=300)
    stop_after(2, None)
    with pytest.raises(RuntimeError, match="crash"):
        train_job(make_job())
    stop_after.undo()
    write_samples(count=400, seed=3)
    assert train_job(make_job()).progress.samples == 400
    write_samples("other.txt", count=70, seed=4)
    Run.of(make_job()).discard()
    stop_after(2, None)
    with pytest.raises(RuntimeError, match="crash"):
        train_job(make_job())
    stop_after.undo()
    assert train_job(make_job(data={"train": "other.txt"})).progress.samples == 70


def test_data_that_changed_in_the_middle_of_an_epoch_is_refused(
    make_job: MakeJob, write_samples: WriteSamples, stop_after: Any
) -> None:
    path = write_samples(count=300)
    stop_after(2, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train_job(make_job())
    stop_after.undo()
    write_samples(count=301)
    assert refusal(make_job(), SampleError).startswith(f"{path}: changed since its units were recorded: ")


def test_the_last_checkpoints_are_kept(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=640)
    job = make_job(train={"checkpoint": {"every_steps": 2, "keep": 2}})
    train_job(job)
    names = [checkpoint.name for checkpoint in list_checkpoints(Run.of(job))]
    # the last batch and the end of the epoch are the same step
    assert names == ["step-000000000010", "step-000000000010.1"]
    job = make_job(name="timed", train={"checkpoint": {"every_s": 1e-6, "keep": 100}})
    train_job(job)
    assert len(list_checkpoints(Run.of(job))) == 11


def test_bad_records_are_counted_and_shown(make_job: MakeJob, tmp_path: Path, capsys: Capture) -> None:
    lines = sample_lines(400, 1)
    bad = {at: f"1 0 x{at}:1" for at in range(7, 400, 40)}
    (tmp_path / "train.txt").write_text("\n".join(bad.get(at, line) for at, line in enumerate(lines)))
    job = make_job(data={"max_bad_ratio": 0.03, "shuffle": False})
    summary = train_job(job)
    assert (summary.progress.samples, summary.progress.records, summary.progress.bad_records) == (390, 400, 10)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bad record: ")]
    assert shown == [
        f"bad record: {tmp_path}/train.txt:{at + 1}: slot `1`: sign `x{at}` is not a u64" for at in sorted(bad)[:5]
    ]
    message = refusal(make_job(name="strict", data={"max_bad_ratio": 0.02}), SampleError)
    assert message == (
        "job.yaml: data.train: 10 of 400 records are bad (2.50%), expected at most 2.00% (data.max_bad_ratio)"
    )
    assert latest(Run.of(make_job(name="strict"))) is None


def test_too_many_bad_records_end_a_training_early(make_job: MakeJob, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("1 0 5:0\n1 0 x:0\n" * 10_000)
    message = refusal(make_job(data={"max_bad_ratio": 0.4}, train={"batch_size": 1000}), SampleError)
    assert re.fullmatch(r"job.yaml: data.train: [45],\d{3} of 10,000 records are bad .*", message)


def test_bad_records_of_the_evaluation(make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path) -> None:
    write_samples(count=100)
    (tmp_path / "eval.txt").write_text("1 0 5:0\n" * 9 + "1 2 5:0\n")
    message = refusal(make_job(data={"eval": "eval.txt"}), SampleError)
    assert message.startswith("job.yaml: data.eval: 1 of 10 records are bad (10.00%)")


def test_a_batch_of_bad_records_only(make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path) -> None:
    path = write_samples(count=64)
    path.write_text(path.read_text() + "bad\n" * 64)
    summary = train_job(make_job(data={"max_bad_ratio": 1.0, "shuffle": False}))
    assert (summary.progress.steps, summary.progress.samples, summary.progress.bad_records) == (2, 64, 64)


@pytest.mark.parametrize("content", ["", "\n \n\r\n"])
def test_data_without_samples(make_job: MakeJob, tmp_path: Path, content: str) -> None:
    (tmp_path / "train.txt").write_text(content)
    message = refusal(make_job(), SampleError)
    assert message == "job.yaml: data.train: expected samples, got 1 file(s) without any"
    assert latest(Run.of(make_job())) is None


def test_data_that_is_empty_in_a_later_epoch(make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path) -> None:
    write_samples(count=100)
    train_job(make_job())
    (tmp_path / "train.txt").write_text("")
    message = refusal(make_job(train={"epochs": 2}), SampleError)
    assert message == "job.yaml: data.train: expected samples, got 1 file(s) without any"


def test_several_labels(make_job: MakeJob, tmp_path: Path, capsys: Capture) -> None:
    lines = []
    for at, line in enumerate(sample_lines(600, 1)):
        show, click, *fields = line.split()
        # the label may be anywhere after show and click
        fields.insert(at % (len(fields) + 1), f"buy={int(click) // 2}")
        lines.append(" ".join([show, click, *fields, "other=9"]))
    (tmp_path / "train.txt").write_text("\n".join(lines))
    job = make_job(data={"labels": ["click", "buy"]})
    summary = train_job(job)
    assert summary.progress.bad_records == 0
    assert list(summary.train) == ["click", "buy"]
    assert summary.train["click"] != summary.train["buy"]
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()[-2:]] == ["click:", "buy:"]
    scores = load_checkpoint(Run.of(job)).predict("\n".join(lines).encode())
    assert scores.shape == (600, 2)
    assert scores[:, 0].mean() > scores[:, 1].mean()


def test_a_sample_shown_n_times_weighs_n(make_job: MakeJob, tmp_path: Path) -> None:
    """One line `5 2` trains as two clicks and three misses of the same signs in the same batch."""
    one = ["5 2 1:0 2:1", "1 0 3:0 2:1 3:2", "2 2 4:0"]
    each = ["1 1 1:0 2:1"] * 2 + ["1 0 1:0 2:1"] * 3 + [one[1]] + ["1 1 4:0"] * 2
    states = []
    for name, lines in (("one", one), ("each", each)):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        job = make_job(name=name, data={"train": f"{name}.txt", "shuffle": False}, train={"epochs": 3})
        summary = train_job(job)
        states.append((load_checkpoint(Run.of(job)).state, summary))
    (left, summary), (right, other) = states
    torch.testing.assert_close(left.dense.values, right.dense.values, rtol=1e-4, atol=1e-6)
    for sign in (1, 2, 3, 4):
        ours, theirs = left.embedding.table.get(sign), right.embedding.table.get(sign)
        assert ours is not None
        assert theirs is not None
        assert ours[:3] == theirs[:3]
        torch.testing.assert_close(torch.tensor(ours[3:]), torch.tensor(theirs[3:]), rtol=1e-4, atol=1e-6)
    for metric in ("auc", "log_loss", "copc"):
        assert getattr(summary.train["click"], metric) == pytest.approx(getattr(other.train["click"], metric), rel=1e-5)


@pytest.mark.parametrize(
    ("shuffle", "lines"),
    [(True, r"lines \d+, .* and 59 more up to \d+"), (False, r"lines 66, 67, 68, 69, 70 and 59 more up to 129")],
)
def test_a_loss_that_is_not_finite_names_its_batch_and_lines(
    make_job: MakeJob, write_samples: WriteSamples, shuffle: bool, lines: str
) -> None:
    path = write_samples(count=500)
    # blank lines count as lines, not as records; the second unit begins in the middle of a line
    path.write_text("\n" + path.read_text())
    job = make_job(
        data={"shuffle": shuffle, "unit_bytes": 8192}, dense={"optimizer": {"kind": "sgd", "learning_rate": 1e30}}
    )
    assert re.fullmatch(
        rf"unit 0 batch 1 \(.*/train.txt: {lines}\): expected a finite loss, got (nan|inf); "
        "lower the learning rates or check the data",
        refusal(job, ModelError),
    )


def test_the_number_of_workers_does_not_change_the_result(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=2000)
    states = []
    for workers in (1, 3):
        job = make_job(name=f"workers{workers}", data={"workers": workers, "unit_bytes": 4096})
        train_job(job)
        states.append(state_of(job))
    assert states[0] == states[1]


@pytest.mark.parametrize("kind", ["dnn", "wide_deep"])
def test_criteo_rows(make_job: MakeJob, tmp_path: Path, kind: str) -> None:
    rows = []
    for at in range(400):
        values = ["" if (at + column) % 5 == 0 else str(at * column % 97 - 3) for column in range(13)]
        signs = ["" if (at + column) % 7 == 0 else f"{at % (column + 3):08x}" for column in range(26)]
        rows.append("\t".join([str(int(at % 3 == 0)), *values, *signs]))
    (tmp_path / "train.txt").write_text("\n".join(rows))
    data = {"format": "criteo", "train": "train.txt", "slots": None, "dense": None}
    dense = {"optimizer": {"learning_rate": 0.01}}
    job = make_job(data=data, model={"kind": kind}, dense=dense, train={"epochs": 5})
    summary = train_job(job)
    assert (summary.progress.samples, summary.progress.bad_records) == (2000, 0)
    assert summary.train["click"].auc is not None
    assert summary.train["click"].auc > 0.9


@pytest.mark.parametrize("where", ["dense", "sparse"])
def test_a_gradient_that_is_not_finite_is_counted_and_not_applied(
    make_job: MakeJob, write_samples: WriteSamples, monkeypatch: pytest.MonkeyPatch, capsys: Capture, where: str
) -> None:
    write_samples(count=640)
    job = make_job()
    states = []
    step = Trainer.step

    def broken(self: Trainer, batch: _core.Batch) -> None:
        if self.progress.steps != 4:
            return step(self, batch)
        states.append((self.state.dense.values.clone(), len(self.state.embedding.table)))
        known = self.state.embedding.table.get(int(batch.signs[0]))
        with monkeypatch.context() as patch:
            if where == "dense":
                patch.setattr(type(self.state.dense), "gradient_is_finite", lambda _: False)
            else:
                push = self.state.embedding.push
                nan = float("nan")
                patch.setattr(self.state.embedding, "push", lambda b, p, scale, seen: push(b, p, nan, seen))
            step(self, batch)
        after = self.state.embedding.table.get(int(batch.signs[0]))
        assert torch.equal(self.state.dense.values, states[0][0])
        assert known is not None and after is not None
        assert after[3] == known[3] and after[0] > known[0], "the weights are unchanged and the shows are counted"

    monkeypatch.setattr(Trainer, "step", broken)
    summary = train_job(job)
    assert summary.progress.non_finite == 1
    checkpoint = latest(Run.of(job))
    assert checkpoint is not None and checkpoint.progress.non_finite == 1


def test_the_seed_determines_the_network(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=1)
    one, same, other = (
        Trainer(make_job(train={"seed": seed}), Run(Path("runs/x")), Reporter(None, 1.0)) for seed in (1, 1, 2)
    )
    assert torch.equal(one.state.dense.values, same.state.dense.values)
    assert not torch.equal(one.state.dense.values, other.state.dense.values)


def test_slots_without_a_sample_are_an_error(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=100)
    assert "expected signs in these slots" in refusal(make_job(data={"slots": "50-60"}), SampleError)


def test_a_failed_evaluation_loses_no_training(make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path) -> None:
    write_samples(count=300)
    (tmp_path / "eval.txt").write_text("not a sample\n")
    job = make_job(data={"eval": "eval.txt"})
    assert "data.eval: 1 of 1 records are bad" in refusal(job, SampleError)
    saved = latest(Run.of(job))
    assert saved is not None and saved.progress.samples == 300
    write_samples("eval.txt", count=50)
    assert train_job(job).progress.samples == 300, "no sample is trained twice"


def test_the_content_of_a_progress_line(make_job: MakeJob, write_samples: WriteSamples, capsys: Capture) -> None:
    write_samples(count=2000)
    train_job(make_job(train={"print_every_s": 1e-9}))
    lines = [line for line in capsys.readouterr().err.splitlines() if " samples " in line]
    assert len(lines) > 10
    assert re.fullmatch(
        r"epoch 1/1 +\d+% +[\d,]+ samples +[\d,]+/s loss \S+ auc \S+ copc \S+ rows [\d,]+ \| .*", lines[-1]
    )


def test_a_stop_during_an_evaluation_saves_before_it_is_reported(
    make_job: MakeJob, write_samples: WriteSamples, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write_samples(count=300)
    write_samples("eval.txt", count=100)
    job = make_job(data={"eval": "eval.txt"})
    evaluate = Trainer._evaluate

    def stopping(self: Trainer) -> Any:
        self.stop_requested = True
        return evaluate(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate", stopping)
        with pytest.raises(KeyboardInterrupt):
            train_job(job)
    assert "stopped and saved; run the same command to continue from step 5\n" in capsys.readouterr().err
    saved = latest(Run.of(job))
    assert saved is not None and (saved.progress.samples, saved.progress.epoch) == (300, 0)
    summary = train_job(job)
    assert summary.progress.samples == 300 and summary.evaluation is not None
