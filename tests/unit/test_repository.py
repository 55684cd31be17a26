"""The model repository, and what a publish leaves in it."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from torch import Tensor

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.errors import ConfigError, ModelError
from elasticrec.manifest import FileEntry, read_manifest, verify_files, write_manifest
from elasticrec.models import ZOO, Inputs, WideDeep
from elasticrec.publish.publish import publish_run
from elasticrec.publish.repository import CURRENT, KIND, Repository, find_version
from elasticrec.run import Run
from elasticrec.training.loop import train_job
from elasticrec.training.predict import load_checkpoint
from small import MakeJob, WriteSamples


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_version(repository: Repository) -> int:
    version, path = repository.begin()
    assert [entry.name for entry in path.iterdir()] == ["cube"]
    (path / "dense.bin").write_bytes(b"")
    write_manifest(path, KIND, {"version": version}, {"dense.bin": FileEntry(0, "")})
    return version


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        find_version(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_versions_count_up_and_the_offered_one_is_current() -> None:
    repository = Repository(Path("models/demo"))
    assert (repository.name, repository.versions(), repository.current()) == ("demo", [], None)
    for number in range(1, 12):
        assert write_version(repository) == number
        repository.offer(number)
        assert json.loads((repository.path / CURRENT).read_bytes()) == {"version": number, "generation": number}
    assert repository.versions() == list(range(1, 12))
    repository.offer(3)
    assert repository.current() == 3
    assert json.loads((repository.path / CURRENT).read_bytes())["generation"] == 12
    # a rollback takes no number away
    assert write_version(repository) == 12


def test_an_incomplete_version_is_no_version_and_its_number_is_used_again() -> None:
    repository = Repository(Path("models/demo"))
    write_version(repository)
    number, path = repository.begin()
    (path / "cube" / "part-00000").write_bytes(b"half")
    assert repository.versions() == [1]
    with pytest.raises(FileNotFoundError):
        repository.offer(number)
    assert not (repository.path / CURRENT).exists()
    assert write_version(repository) == number == 2
    assert not (path / "cube" / "part-00000").exists()


def test_what_is_not_a_version_is_left_alone() -> None:
    repository = Repository(Path("models/demo"))
    write_version(repository)
    for name in ("notes", "1.bak"):
        (repository.path / name).mkdir()
        (repository.path / name / "manifest.json").touch()
    assert repository.versions() == [1]
    assert write_version(repository) == 2


def test_a_version_is_found_by_its_directory_or_by_its_model() -> None:
    repository = Repository(Path("models/demo"))
    for _ in range(2):
        write_version(repository)
    repository.offer(1)
    assert find_version(repository.path)[0] == repository.path / "1"
    path, manifest = find_version(repository.path / "2")
    assert (path, manifest["version"]) == (repository.path / "2", 2)


def test_what_is_not_a_model_is_explained() -> None:
    models = Path("models")
    assert refusal(models / "demo") == (
        "models/demo: no such model, expected <repository>/<model> or <repository>/<model>/<version>"
    )
    models.mkdir()
    assert refusal(models) == "models: not a model, expected `CURRENT` or `manifest.json` in it"
    for name in ("b", "a"):
        repository = Repository(models / name)
        write_version(repository)
        repository.offer(1)
    assert refusal(models) == "models: not a model, expected `CURRENT` or `manifest.json` in it; models in it: a, b"
    write_manifest(models / "a" / "1", "checkpoint", {}, {})
    assert refusal(models / "a") == "models/a/1/manifest.json: kind: expected model, got checkpoint"


@pytest.mark.parametrize(
    "content", [b"", b"3", b"[]", b'{"version": "x", "generation": 1}', b'{"version": 1}', b"\xff"]
)
def test_a_damaged_current_is_refused_and_not_replaced(content: bytes) -> None:
    repository = Repository(Path("models/demo"))
    write_version(repository)
    current = repository.path / CURRENT
    current.write_bytes(content)
    message = (
        'models/demo/CURRENT: expected {"version": N, "generation": N}, the file is damaged; remove it and publish'
    )
    assert refusal(repository.path) == message
    with pytest.raises(ModelError) as caught:
        repository.offer(1)
    assert str(caught.value) == message
    assert current.read_bytes() == content


def test_a_current_that_names_a_version_that_is_gone() -> None:
    repository = Repository(Path("models/demo"))
    write_version(repository)
    repository.offer(1)
    (repository.path / CURRENT).write_bytes(b'{"version": 9, "generation": 1}')
    with pytest.raises(FileNotFoundError, match=r"models/demo/9/manifest\.json"):
        find_version(repository.path)


@pytest.fixture
def trained(make_job: MakeJob, write_samples: WriteSamples) -> Job:
    write_samples(count=600)
    write_samples("eval.txt", count=200, seed=2)
    job = make_job(data={"eval": "eval.txt"})
    train_job(job)
    return job


def test_a_published_version_is_the_checkpoint(trained: Job) -> None:
    run = Run.of(trained)
    published = publish_run(run)
    assert (published.model, published.version, published.path) == ("small", 1, Path("models/small/1"))
    path, manifest = find_version(Path("models/small"))
    assert path == published.path
    verify_files(path, manifest)
    assert sorted(manifest["files"]) == ["cube/part-00000", "dense.bin", "graph.onnx"]
    assert published.num_bytes == sum(entry["bytes"] for entry in manifest["files"].values())
    assert published.rows == manifest["table"]["rows"]

    loaded = load_checkpoint(run)
    assert manifest["features"] == trained.features()
    assert manifest["checkpoint"] == loaded.checkpoint.name
    assert manifest["metrics"]["eval"][0]["samples"] == 200
    assert manifest["data"]["samples"] == 600
    assert (path / "dense.bin").read_bytes() == loaded.state.dense.values.numpy().tobytes()
    check_cube(loaded.state.embedding.table, path)
    check_scores(trained, path)


def check_cube(table: _core.Table, path: Path) -> None:
    """Every sign of the data and as many that are not in it."""
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


def check_scores(job: Job, path: Path) -> None:
    """Rows of the cube, summed by hand, through the graph: the scores of `predict`."""
    lines = [*Path("eval.txt").read_text().splitlines()[:50], "1 0", "1 0 99999:0 7:2"]
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


def test_publishing_again_makes_the_next_version(trained: Job) -> None:
    first = publish_run(Run.of(trained))
    second = publish_run(Run.of(trained))
    assert (second.version, Repository(Path("models/small")).current()) == (2, 2)
    for name in ("graph.onnx", "dense.bin", "cube/part-00000"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes(), name


def test_what_cannot_be_exported_leaves_no_trace(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    class Branching(WideDeep):
        def forward(self, columns: Inputs, dense_BD: Tensor) -> Tensor:  # noqa: N803
            logits = super().forward(columns, dense_BD)
            return logits if logits.sum() > 0 else -logits

    with monkeypatch.context() as patch:
        patch.setitem(ZOO, "wide_deep", Branching)
        with pytest.raises(ModelError, match=r"^model: cannot be exported to ONNX: "):
            publish_run(Run.of(trained))
    assert not Path("models").exists()
    published = publish_run(Run.of(trained))
    before = read_manifest(published.path, KIND)
    with monkeypatch.context() as patch:
        patch.setitem(ZOO, "wide_deep", Branching)
        with pytest.raises(ModelError):
            publish_run(Run.of(trained))
    assert sorted(path.name for path in Path("models/small").iterdir()) == [".lock", "1", CURRENT]
    assert read_manifest(published.path, KIND) == before


def test_a_publish_that_broke_off_is_not_offered(trained: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_run(Run.of(trained))

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("elasticrec.publish.publish.write_manifest", fail)
        with pytest.raises(OSError, match="No space left"):
            publish_run(Run.of(trained))
    repository = Repository(Path("models/small"))
    assert (repository.versions(), repository.current()) == ([1], 1)
    assert publish_run(Run.of(trained)).version == 2


def test_a_run_without_a_checkpoint(make_job: MakeJob) -> None:
    run = Run.create(make_job())
    with pytest.raises(ModelError, match=r"^runs/small: expected a checkpoint, got none; train it first$"):
        publish_run(run)
    assert not Path("models").exists()


def test_one_process_publishes_at_a_time(tmp_path: Path) -> None:
    repository = Repository(tmp_path / "demo")
    with repository.locked():
        with pytest.raises(ConfigError, match="another process is publishing it"), repository.locked():
            pass


def test_a_publish_that_fails_leaves_no_part_of_a_version(
    make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples(count=100)
    job = make_job()
    train_job(job)
    with monkeypatch.context() as patch:
        patch.setattr(
            "elasticrec.publish.publish.write_manifest", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
        )
        with pytest.raises(OSError, match="full"):
            publish_run(Run.of(job))
    assert [path.name for path in Path("models/small").iterdir()] == [".lock"]
    assert publish_run(Run.of(job)).version == 1
