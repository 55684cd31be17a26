"""A publish writes the checkpoint to the repository as a version, and offers it if it passes the gate."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from torch import Tensor

from elasticrec import _core, cli
from elasticrec.config import Job
from elasticrec.errors import ModelError
from elasticrec.manifest import verify_files
from elasticrec.models import ZOO, Inputs, WideDeep
from elasticrec.publish import graph as graphs
from elasticrec.publish.local import publish_run
from elasticrec.repository.find import find_version
from elasticrec.repository.repository import CURRENT, Repository
from elasticrec.repository.verify import verify
from elasticrec.run import Run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.training.loop import train_job
from elasticrec.training.predict import load_checkpoint
from support.disks import fill, small_file_system
from support.object_store import environment, make_bucket, s3_server
from support.small import MakeJob, WriteSamples


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTICREC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def trained(make_job: MakeJob, write_samples: WriteSamples) -> Job:
    write_samples(count=600)
    write_samples("eval.txt", count=200, seed=2)
    job = make_job(data={"eval": "eval.txt"})
    train_job(job)
    return job


def republish(job: Job, **publish: Any) -> Any:
    """Publish the run with other settings than it was trained with."""
    run = Run.of(job)
    changed = json.loads(json.dumps(job.to_dict(references=True)))
    changed["publish"] |= publish
    run.job_path.write_text(json.dumps(changed))
    return publish_run(run)


def local() -> Repository:
    return Repository.open("models", "small")


def test_a_published_version_is_the_checkpoint(trained: Job) -> None:
    run = Run.of(trained)
    published = publish_run(run)
    assert (published.model, published.version, published.path) == ("small", 1, Path("models/small/1"))
    assert published.offer.is_offered
    path, manifest = find_version("models/small")
    assert path == published.path
    assert manifest["format"] == 1
    verify_files(path, manifest)
    assert verify(local(), 1) == []
    assert sorted(manifest["files"]) == ["cube/part-00000", "dense.bin", "graph.onnx"]
    assert published.num_bytes == sum(entry["bytes"] for entry in manifest["files"].values())
    assert published.rows == manifest["table"]["rows"]

    loaded = load_checkpoint(run)
    assert manifest["features"] == trained.features()
    assert manifest["checkpoint"] == loaded.checkpoint.name
    assert manifest["metrics"]["eval"][0]["samples"] == 200
    assert manifest["data"] == {"samples": 600, "epoch": 1, "until": None}
    assert (path / "dense.bin").read_bytes() == loaded.state.dense.values.numpy().tobytes()
    check_cube(loaded.state.embedding.table, path)
    check_scores(trained, path)


def check_cube(table: _core.Table, path: Path) -> None:
    """Check the rows of every sign of the data, and as many absent signs."""
    signs = {
        int(field.split(":")[0]) for line in Path("train.txt").read_text().splitlines() for field in line.split()[2:]
    }
    assert len(signs) == len(table)
    absent = [sign + 5000 for sign in signs] + [2**64 - 1, 2**63]
    rows, found = _core.read_cube([str(path / "cube/part-00000")], [*signs, *absent])
    assert found == len(signs)
    for sign, row in zip(signs, rows, strict=False):
        stored = table.get(sign)
        assert stored is not None
        np.testing.assert_array_equal(row, np.array(stored[3], np.float32))
    assert not rows[len(signs) :].any()


def lines_to_score() -> list[str]:
    return [*Path("eval.txt").read_text().splitlines()[:50], "1 0", "1 0 99999:0 7:2"]


def check_scores(job: Job, path: Path) -> None:
    """Check that the graph, fed with rows of the cube pooled here, gives the scores of `predict`."""
    lines = lines_to_score()
    session = onnxruntime.InferenceSession(path / "graph.onnx", providers=["CPUExecutionProvider"])
    pooled = np.zeros((len(lines), 3, 5), np.float32)
    for at, line in enumerate(lines):
        for field in line.split()[2:]:
            sign, slot = map(int, field.split(":"))
            rows, _ = _core.read_cube([str(path / "cube/part-00000")], [sign])
            pooled[at, slot] += rows[0]
    (scores,) = session.run(["scores"], {"pooled": pooled})
    expected = load_checkpoint(Run.of(job)).predict("\n".join(lines).encode())
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    assert scores.std() > 0.01


def test_the_graph_of_an_unchanged_model_is_exported_once(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    exports = []
    export = graphs.export_graph
    monkeypatch.setattr(graphs, "export_graph", lambda *arguments: exports.append(1) or export(*arguments))
    first = publish_run(Run.of(trained))
    graph = (first.path / "graph.onnx").read_bytes()
    second = publish_run(Run.of(trained))
    assert len(exports) == 1
    assert (second.version, local().current()) == (2, 2)
    for name in ("graph.onnx", "dense.bin", "cube/part-00000"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes(), name
    # a cached graph that is damaged, or of other code, is not used
    (cached,) = Path("runs/small/graphs").iterdir()
    cached.write_bytes(cached.read_bytes()[:-40])
    publish_run(Run.of(trained))
    assert len(exports) == 2

    class Other(WideDeep):
        def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
            return -super().forward(columns, dense_BD)

    monkeypatch.setitem(ZOO, "wide_deep", Other)
    changed_model = publish_run(Run.of(trained))
    assert len(exports) == 3
    assert (changed_model.path / "graph.onnx").read_bytes() != graph
    assert len(list(Path("runs/small/graphs").iterdir())) == 1


def test_a_change_in_an_imported_file_changes_the_graph(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_run(Run.of(trained))
    # a change of the code that the fingerprint does not cover
    forward = WideDeep.forward
    monkeypatch.setattr(WideDeep, "forward", lambda *arguments: 2 * forward(*arguments))
    published = publish_run(Run.of(trained))
    check_scores(trained, published.path)


def test_a_model_that_cannot_be_exported_leaves_no_files(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(WideDeep):
        def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
            logits = super().forward(columns, dense_BD)
            return logits if logits.sum() > 0 else -logits

    with monkeypatch.context() as patch:
        patch.setitem(ZOO, "wide_deep", Branching)
        with pytest.raises(ModelError, match=r"^model: cannot be exported to ONNX: "):
            publish_run(Run.of(trained))
    assert not Path("models").exists()
    publish_run(Run.of(trained))
    before = local().version(1)
    with monkeypatch.context() as patch:
        patch.setitem(ZOO, "wide_deep", Branching)
        with pytest.raises(ModelError):
            publish_run(Run.of(trained))
    assert {path.name for path in Path("models/small").iterdir()} == {".lock", ".state.lock", "1", CURRENT, "NEXT"}
    assert local().version(1) == before


def test_a_failed_publish_is_not_offered(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_run(Run.of(trained))

    def fail(*_: object, **__: object) -> bytes:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("elasticrec.repository.repository.encode_manifest", fail)
        with pytest.raises(OSError, match="No space left"):
            publish_run(Run.of(trained))
    assert (local().versions(), local().current()) == ([1], 1)
    assert {path.name for path in Path("models/small").iterdir()} == {".lock", ".state.lock", "1", CURRENT, "NEXT"}
    # the number of the failed publish is not used again
    assert publish_run(Run.of(trained)).version == 3


def test_a_full_disk_leaves_the_repository_unchanged(trained: Job, tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "4m") as path:
        republish(trained, repository=str(path))
        repository = Repository.open(path, "small")
        before = set(repository.storage.find())
        for leave in (0, 3000, 20_000):
            fill(path / "rest", leave)
            with pytest.raises(OSError, match="No space left"):
                publish_run(Run.of(trained))
            assert set(repository.storage.find()) == before
            (path / "rest").unlink()
        assert verify(repository, publish_run(Run.of(trained)).version) == []


def test_a_run_without_a_checkpoint(make_job: MakeJob) -> None:
    run = Run.create(make_job())
    with pytest.raises(ModelError, match=r"^runs/small: expected a checkpoint, got none; train it first$"):
        publish_run(run)
    assert not Path("models").exists()


def test_the_gate_refuses_a_version_with_a_low_auc(trained: Job, capsys: pytest.CaptureFixture[str]) -> None:
    publish_run(Run.of(trained))
    published = republish(trained, gate={"min_auc": 0.999})
    assert not published.offer.is_offered
    assert published.offer.summary.startswith("not offered: AUC of the evaluation: expected at least 0.999, got 0.")
    assert (local().versions(), local().current()) == ([1, 2], 1)
    assert cli.main(["publish", "small"]) == 1
    output = capsys.readouterr()
    assert output.out.startswith("published models/small/3: version 3 of small, ")
    assert output.err.startswith("warning: not offered: AUC of the evaluation: expected at least 0.999")
    assert republish(trained, gate={"min_auc": 0.5}).offer.is_offered
    assert local().current() == 4


def test_weights_that_are_not_finite_are_not_offered(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    load = load_checkpoint

    def spoiled(*arguments: Any, **options: Any) -> Any:
        loaded = load(*arguments, **options)
        loaded.state.dense.values[3] = float("nan")
        return loaded

    monkeypatch.setattr("elasticrec.publish.local.load_checkpoint", spoiled)
    result = publish_run(Run.of(trained)).offer
    assert result.summary.startswith("not offered: dense weights: `")
    assert local().current() is None
    assert "has values that are not finite" in verify(local(), 1)[0]


def test_a_rollback_and_a_store_block_the_offer(trained: Job) -> None:
    publish_run(Run.of(trained))
    local().rollback(1)
    assert publish_run(Run.of(trained)).offer.summary.startswith("not offered: a rollback holds the model")
    local().resume()
    assert publish_run(Run.of(trained)).offer.is_offered
    run = Run.of(trained)
    changed = json.loads(json.dumps(trained.to_dict(references=True)))
    changed["cube"]["addresses"] = [["127.0.0.1:8600"]]
    run.job_path.write_text(json.dumps(changed))
    assert publish_run(run).offer.summary == "not offered: the store must load it first"
    assert local().current() == 3


def test_old_versions_are_collected(trained: Job) -> None:
    for _ in range(5):
        republish(trained, keep=2)
    assert local().versions() == [4, 5]


def test_the_graph_has_the_selected_labels(make_job: MakeJob, tmp_path: Path) -> None:
    lines = [f"{1 + at % 3} {at % 2} buy={at % 2 * (at % 5 == 0)} {at % 40}:0 {100 + at % 7}:1" for at in range(400)]
    (tmp_path / "train.txt").write_text("\n".join(lines))
    job = make_job(data={"labels": ["click", "buy"]}, model={"kind": "mmoe"}, publish={"outputs": ["buy"]})
    train_job(job)
    published = publish_run(Run.of(job))
    manifest = local().version(1).manifest
    assert (manifest["format"], manifest["graph"]["labels"]) == (2, ["buy"])
    assert manifest["features"]["labels"] == ["click", "buy"]
    session = onnxruntime.InferenceSession(published.path / "graph.onnx", providers=["CPUExecutionProvider"])
    assert session.get_outputs()[0].shape[1] == 1
    # all labels in their order: the same as no `publish.outputs`, so the format stays 1
    assert republish(job, outputs=["click", "buy"]).version == 2
    assert local().version(2).manifest["format"] == 1


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "memory":
        yield "memory://test-publish/models"
        return
    with s3_server() as address:
        for name, value in environment(address).items():
            monkeypatch.setenv(name, value)
        yield f"{make_bucket()}/models"


def test_a_repository_behind_a_url(trained: Job, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    published = republish(trained, repository=url)
    assert (published.location, published.offer.is_offered) == (f"{url}/small/1", True)
    assert verify(Repository.open(url, "small"), 1) == []
    lines = "\n".join(lines_to_score())
    path, _ = find_version(f"{url}/small")
    scores = _core.Predictor(str(path), str(library_path())).predict(lines.encode())
    np.testing.assert_allclose(scores, load_checkpoint(Run.of(trained)).predict(lines.encode()), atol=1e-5)
    assert publish_run(Run.of(trained)).version == 2
    Path("few.txt").write_text(lines)
    for arguments in (
        ["models", "verify", f"{url}/small"],
        ["models", "rollback", f"{url}/small:1"],
        ["models", "list", url],
        ["models", "pack", f"{url}/small", "small.tar.gz"],
        ["predict", "few.txt", "--model", "small.tar.gz"],
        ["predict", "few.txt", "--model", f"{url}/small"],
        ["explain", lines.splitlines()[0], "--model", f"{url}/small:1"],
        ["models", "gc", f"{url}/small", "--keep", "1"],
    ):
        assert cli.main(arguments) == 0, capsys.readouterr().err
    assert "current 1, held by a rollback" in capsys.readouterr().out
