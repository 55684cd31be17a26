"""Deltas and other row types, from the repository to a score: served scores equal those of the checkpoint."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import _core, cli
from elasticrec.config import Job
from elasticrec.publish.local import publish_run
from elasticrec.repository.find import find_version
from elasticrec.repository.repository import Repository
from elasticrec.repository.verify import verify
from elasticrec.repository.version import Version
from elasticrec.run import Run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.training.loop import train_job
from elasticrec.training.predict import CheckpointModel, load_checkpoint
from support.deltas import publish_delta
from support.small import MakeJob, WriteSamples


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTICREC_CACHE", str(tmp_path / "cache"))


def local() -> Repository:
    return Repository.open("models", "small")


def signs_of(*files: str) -> set[int]:
    lines = [line for file in files for line in Path(file).read_text().splitlines()]
    return {int(field.split(":")[0]) for line in lines for field in line.split()[2:]}


def offer_delta(loaded: CheckpointModel, parent: int, signs: set[int], removed: set[int] | None = None) -> Version:
    removed = removed or set()
    num_rows = len((signs_of("train.txt") | signs) - removed)
    version = publish_delta(local(), loaded, parent, signs, removed, num_rows)
    local().offer(version.number)
    return version


def scores_of(model: str, text: bytes) -> Any:
    return _core.Predictor(str(find_version(model)[0]), str(library_path())).predict(text)


@pytest.fixture
def trained(make_job: MakeJob, write_samples: WriteSamples) -> Job:
    """A trained job whose checkpoint is published as version 1; `learn_more` trains it further."""
    write_samples(count=300)
    write_samples("later.txt", count=300, seed=3)
    job = make_job(data={"train": ["train.txt"]})
    train_job(job)
    publish_run(Run.of(job))
    return job


def learn_more(job: Job, make_job: MakeJob) -> CheckpointModel:
    later = make_job(
        name="later", data={"train": ["later.txt"]}, train={"warm_start": "small"}, publish={"model": "small"}
    )
    train_job(later)
    return load_checkpoint(Run.of(later))


def test_a_delta_scores_like_its_checkpoint(
    trained: Job, make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = learn_more(trained, make_job)
    version = offer_delta(loaded, 1, signs_of("later.txt"))
    assert (version.number, version.manifest["base"], version.manifest["parent"]) == (2, 1, 1)
    assert verify(local(), 2) == []
    text = b"".join(Path(name).read_bytes() for name in ("train.txt", "later.txt"))
    np.testing.assert_allclose(scores_of("models/small", text), loaded.predict(text), atol=1e-5)
    # the version before is unchanged
    np.testing.assert_allclose(
        scores_of("models/small:1", text), load_checkpoint(Run.of(trained)).predict(text), atol=1e-5
    )
    assert np.abs(scores_of("models/small:1", text) - scores_of("models/small:2", text)).max() > 0.01
    # a pack gives the same scores
    assert cli.main(["models", "pack", "small", "small.tar.gz"]) == 0
    np.testing.assert_allclose(scores_of("small.tar.gz", text), loaded.predict(text), atol=1e-5)

    line = text.splitlines()[-1].decode()
    capsys.readouterr()
    assert cli.main(["explain", line, "--model", "small", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    score = loaded.predict(line.encode())[0, 0]
    assert explained["scores"]["click"] == pytest.approx(score, abs=1e-5)
    for slot in explained["slots"]:
        for sign in slot["signs"]:
            row = loaded.state.embedding.table.get(sign["sign"])
            assert row is not None
            np.testing.assert_array_equal(np.float32(sign["weights"]), np.float32(row[3]))


def test_rows_removed_by_a_delta_read_as_zero(
    trained: Job, make_job: MakeJob, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = learn_more(trained, make_job)
    before, later = signs_of("train.txt"), signs_of("later.txt")
    removed = set(sorted(before - later)[:5])
    assert len(removed) == 5
    offer_delta(loaded, 1, later, removed)
    assert cli.main(["models", "diff", "small:1", "small:2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == {
        "added": len(later - before),
        "removed": 5,
        "changed": len(later & before),
        "equal": len(before - later) - 5,
    }
    assert cli.main(["explain", f"1 0 {min(removed)}:0", "--model", "small"]) == 0
    assert f"{min(removed)}: no row, reads as zero" in capsys.readouterr().out
    assert cli.main(["models", "diff", "small:1", "small:2"]) == 0
    assert "5 removed" in capsys.readouterr().out


def test_a_delta_without_its_parent_is_not_served(trained: Job, make_job: MakeJob) -> None:
    loaded = learn_more(trained, make_job)
    for parent in (1, 2):
        offer_delta(loaded, parent, signs_of("later.txt"))
    path, _ = find_version("models/small:3")
    local().remove("1/deltas/2")
    with pytest.raises(Exception, match="version 2"):
        find_version("models/small:3")
    with pytest.raises(Exception, match="2"):
        _core.Predictor(str(path), str(library_path()))


@pytest.mark.parametrize(("row_type", "error"), [("f16", 2e-3), ("int8", 3e-2)])
def test_smaller_rows_score_nearly_the_same(
    make_job: MakeJob, write_samples: WriteSamples, row_type: str, error: float
) -> None:
    write_samples(count=600)
    job = make_job(publish={"row_type": row_type})
    train_job(job)
    published = publish_run(Run.of(job))
    manifest = local().version(1).manifest
    assert (manifest["format"], manifest["table"]["row_type"]) == (2, row_type)
    text = Path("train.txt").read_bytes()
    expected = load_checkpoint(Run.of(job)).predict(text)
    scores = _core.Predictor(str(published.path), str(library_path())).predict(text)
    assert 0 < np.abs(scores - expected).max() < error


def test_the_row_type_option_of_the_command_line(trained: Job, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["publish", "small", "--row-type", "f16"]) == 0
    assert local().version(2).manifest["table"]["row_type"] == "f16"
    capsys.readouterr()
    assert cli.main(["publish", "small", "--row-type", "f64"]) == 2
    assert capsys.readouterr().err == "error: --row-type: expected `f32`, `f16`, `int8`, got `f64`\n"


def test_the_chosen_labels_are_served(make_job: MakeJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [f"{1 + at % 3} {at % 2} buy={at % 2 * (at % 5 == 0)} {at % 40}:0 {100 + at % 7}:1" for at in range(400)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    job = make_job(data={"labels": ["click", "buy"]}, model={"kind": "mmoe"}, publish={"outputs": ["buy"]})
    train_job(job)
    publish_run(Run.of(job))
    text = Path("train.txt").read_bytes()
    expected = load_checkpoint(Run.of(job)).predict(text)[:, 1:]
    np.testing.assert_allclose(scores_of("models/small", text), expected, atol=1e-5)
    assert cli.main(["explain", lines[0], "--model", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == {"buy": pytest.approx(expected[0, 0], abs=1e-5)}
