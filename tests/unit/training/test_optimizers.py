"""Sparse optimizers in a job: their settings, and the same bits after a resume."""

from pathlib import Path

import pytest

from elasticrec.config.sparse import SETTINGS
from elasticrec.errors import ConfigError
from elasticrec.run import Run
from elasticrec.training import checkpoint as checkpoints
from elasticrec.training.loop import train_job
from support.small import MakeJob, WriteSamples


@pytest.mark.parametrize("kind", SETTINGS)
def test_omitted_settings_have_the_defaults_of_their_kind(make_job: MakeJob, kind: str) -> None:
    optimizer = make_job(sparse={"optimizer": {"kind": kind}}).sparse.optimizer
    assert optimizer.model_dump() == {"kind": kind, **SETTINGS[kind]}
    changed = make_job(sparse={"optimizer": {"kind": kind, "learning_rate": 0.5}}).sparse.optimizer
    assert changed.model_dump() == {"kind": kind, **SETTINGS[kind], "learning_rate": 0.5}


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"kind": "adagrad", "beta1": 0.9}, "`beta1` is not a setting of `adagrad`, expected `learning_rate`,"),
        ({"kind": "sgd", "l1": 0.1}, "`l1` is not a setting of `sgd`, expected `learning_rate`"),
        ({"kind": "adam", "beta2": 1.0}, "sparse.optimizer.beta2: expected less than 1, got 1"),
        ({"kind": "adamw"}, "sparse.optimizer.kind: expected `sgd`, `adagrad`,"),
        ({"learningrate": 1}, "sparse.optimizer.learningrate: unknown key, did you mean `learning_rate`?"),
    ],
)
def test_unknown_settings_are_refused(make_job: MakeJob, optimizer: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_job(sparse={"optimizer": optimizer})
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_optimizer_resumes_bit_for_bit(
    make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(count=2000)
    job = make_job(sparse={"optimizer": {"kind": kind}}, train={"epochs": 2})
    train_job(job)
    other = make_job(name="resumed", sparse={"optimizer": {"kind": kind}}, train={"epochs": 1})
    train_job(other)
    train_job(make_job(name="resumed", sparse={"optimizer": {"kind": kind}}, train={"epochs": 2}))
    states = []
    for name in (job, other):
        checkpoint = checkpoints.latest(Run.of(name))
        assert checkpoint is not None
        states.append([(checkpoint.path / file).read_bytes() for file in ("table/part-00000", "dense.bin")])
    assert states[0] == states[1]
