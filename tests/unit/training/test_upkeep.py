"""Late columns, decay and eviction in small trainings: the rows of the table, of the version and of a resumed run."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.errors import ConfigError
from elasticrec.models import Column
from elasticrec.publish.local import publish_run
from elasticrec.run import Run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.checkpoint import Progress
from elasticrec.training.embedding import Embedding, late_columns
from elasticrec.training.loop import Trainer, train_job
from elasticrec.training.predict import load_checkpoint
from elasticrec.training.report import summary_lines
from elasticrec.training.upkeep import run_upkeep
from support.small import MakeJob, WriteSamples, sample_lines

COLUMNS = (Column("wide", 1, init="zero"), Column("deep", 4))
MASK = 2**64 - 1


pytestmark = pytest.mark.usefixtures("own_directory")


def counts_of(path: Path) -> tuple[Counter[int], Counter[int]]:
    """Return the shows and clicks of each sign, counted from the text of a file."""
    shows: Counter[int] = Counter()
    clicks: Counter[int] = Counter()
    for line in path.read_text().splitlines():
        show, click, *fields = line.split()
        for field in fields:
            sign = int(field.split(":")[0])
            shows[sign] += int(show)
            clicks[sign] += int(click)
    return shows, clicks


def mix(value: int) -> int:
    """Hash as specified in `docs/formats/part.md`."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        value = ((value ^ (value >> 33)) * factor) & MASK
    return value ^ (value >> 33)


def test_rare_signs_have_no_late_columns_in_the_table_and_the_cube(
    make_job: MakeJob, write_samples: WriteSamples
) -> None:
    shows, _ = counts_of(write_samples(count=1500))
    job = make_job(sparse={"admission": {"count": 20}})
    train_job(job)
    table = load_checkpoint(Run.of(job)).state.embedding.table
    published = publish_run(Run.of(job))
    signs = sorted(shows)
    cube, found = _core.read_cube([str(published.path / "cube/part-00000")], signs)
    assert found == len(signs) == len(table)
    rare = [sign for sign in signs if shows[sign] < 20]
    assert 10 < len(rare) < len(signs) - 10
    for at, sign in enumerate(signs):
        row = table.get(sign)
        assert row is not None
        show, _, _, weights, _ = row
        assert show == shows[sign]
        assert weights[0] != 0
        assert any(weights[1:]) == all(weights[1:]) == (sign not in rare)
        np.testing.assert_array_equal(cube[at], np.array(weights, np.float32))


def test_all_columns_may_be_late(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=200)
    job = make_job(model={"kind": "dnn"}, sparse={"admission": {"count": 10**6, "columns": ["deep"]}})
    train_job(job)
    loaded = load_checkpoint(Run.of(job))
    assert len(loaded.state.embedding.table) > 0
    scores = loaded.predict("\n".join(sample_lines(50, 3)).encode())
    assert len(np.unique(scores)) == 1, "all samples have the same score"


def test_evicted_rows_are_in_neither_the_table_nor_the_cube(make_job: MakeJob, write_samples: WriteSamples) -> None:
    path = write_samples(count=1500)
    shows, clicks = counts_of(path)
    rate, least = 0.6, 1.5
    expected: dict[int, tuple[int, int]] = {}
    num_evicted = 0
    for epoch in range(2):
        kept = {}
        for sign in shows:
            before = expected.get(sign, (0, 0))
            chance = (mix(sign ^ mix(epoch)) >> 32) / 2**32
            show = int((before[0] + shows[sign]) * rate + chance)
            click = int((before[1] + clicks[sign]) * rate + chance)
            if 0.1 * (show - click) + 1.0 * click >= least:
                kept[sign] = (show, click)
        num_evicted += len(shows) - len(kept)
        expected = kept
    job = make_job(sparse={"decay": {"show_click": rate}, "evict": {"min_score": least}}, train={"epochs": 2})
    summary = train_job(job)
    assert summary.progress.evicted == num_evicted > 20
    assert summary.rows == len(expected) > 20
    assert f"  rows evicted at the ends of epochs: {num_evicted:,}" in summary_lines(summary)
    loaded = load_checkpoint(Run.of(job))
    for sign in shows:
        row = loaded.state.embedding.table.get(sign)
        assert (None if row is None else row[:3]) == ((*expected[sign], 1) if sign in expected else None)
    published = publish_run(Run.of(job))
    assert published.rows == len(expected)
    text = path.read_bytes()
    served = _core.Predictor(str(published.path), str(library_path())).predict(text)
    np.testing.assert_allclose(served, loaded.predict(text), atol=1e-5, rtol=0)


def test_rows_older_than_max_age_are_evicted_once(make_job: MakeJob) -> None:
    job = make_job(sparse={"evict": {"max_age": 2}, "decay": {"show_click": 0.5}})
    embedding = Embedding(job, COLUMNS)
    parser = _core.Parser(json.dumps(job.features()))
    for seen, sign in ((0, 7), (1, 8), (2, 9)):
        batch = parser.parse(b"64 0 %d:0" % sign, labels=True)
        pooled = embedding.pull(batch)
        pooled.grad = pooled.detach() * 0 + 1
        embedding.push(batch, pooled, scale=1.0, seen=seen)
    progress = Progress(epoch=2, unit=0, batches=1, steps=1, samples=1, records=1, bad_records=0)
    assert run_upkeep(job, embedding, progress) == replace(progress, upkept=3)
    assert len(embedding.table) == 3, "an age of two epochs does not exceed max_age"
    later = run_upkeep(job, embedding, replace(progress, epoch=4, upkept=3))
    assert (later.upkept, later.evicted) == (5, 2)
    assert embedding.table.get(7) is embedding.table.get(8) is None
    assert run_upkeep(job, embedding, later) == later, "the upkeep of an epoch runs once"
    row = embedding.table.get(9)
    assert row is not None and row[0] == 16, "show is halved at the end of each of the two epochs"


@pytest.mark.parametrize("stopped", ["evaluation", "between epochs"])
def test_a_stop_around_the_end_of_an_epoch_does_not_repeat_it(
    make_job: MakeJob, write_samples: WriteSamples, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    write_samples(count=600)
    write_samples("eval.txt", count=100, seed=2)
    sparse = {"admission": {"count": 5}, "decay": {"show_click": 0.7}, "evict": {"min_score": 1.0}}

    def job(name: str, epochs: int = 3) -> Any:
        return make_job(name=name, data={"eval": "eval.txt"}, sparse=sparse, train={"epochs": epochs})

    train_job(job("whole"))
    if stopped == "evaluation":
        evaluate = Trainer._evaluate

        def fail(trainer: Trainer) -> Any:
            if trainer.progress.epoch == 1:
                raise KeyboardInterrupt
            return evaluate(trainer)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Trainer, "_evaluate", fail)
            train_job(job("stopped"))
    else:
        train_job(job("stopped", epochs=2))
    summary = train_job(job("stopped"))
    states = []
    for name in ("whole", "stopped"):
        checkpoint = checkpoints.latest(Run.of(job(name)))
        assert checkpoint is not None
        assert checkpoint.progress.evicted == summary.progress.evicted > 0
        states.append([(checkpoint.path / file).read_bytes() for file in ("table/part-00000", "dense.bin")])
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("sparse", "message"),
    [
        ({"admission": {"count": -1}}, "sparse.admission.count: expected at least 0, got -1"),
        ({"admission": 10}, "sparse.admission: expected a mapping"),
        ({"admission": {"columns": []}}, "sparse.admission.columns: "),
        ({"decay": {"show_click": 1.5}}, "sparse.decay.show_click: expected at most 1, got 1.5"),
        ({"decay": {"show_clik": 0.9}}, "sparse.decay.show_clik: unknown key, did you mean `show_click`?"),
        ({"evict": {"min_score": -1}}, "sparse.evict.min_score: expected at least 0, got -1"),
        ({"evict": {"max_age": 20_000}}, "sparse.evict.max_age: expected at most 16383, got 20000"),
    ],
)
def test_settings_out_of_range_are_refused(make_job: MakeJob, sparse: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(sparse=sparse)
    assert message in str(caught.value)


def test_late_columns_must_be_columns_of_the_model(make_job: MakeJob) -> None:
    assert late_columns(make_job(), COLUMNS) == {"deep"}
    assert late_columns(make_job(sparse={"admission": {"columns": ["wide"]}}), COLUMNS) == {"wide"}
    with pytest.raises(ConfigError) as caught:
        late_columns(make_job(sparse={"admission": {"columns": ["depp"]}}), COLUMNS)
    assert str(caught.value) == (
        "job.yaml: sparse.admission.columns: expected columns of `wide_deep`, which has `wide`, `deep`; got `depp`"
    )
    assert late_columns(make_job(), COLUMNS[1:]) == set()
    with pytest.raises(ConfigError, match="has the one column `deep`, which is not delayed by default"):
        late_columns(make_job(sparse={"admission": {"count": 2}}), COLUMNS[1:])
