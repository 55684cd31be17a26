"""Versions of a running job in a real repository: committed by their manifest, offered, found after a crash."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.config.publish import Publish
from elasticrec.errors import ConfigError, ModelError
from elasticrec.net.messages import PublishPart
from elasticrec.publish.content import PublishedVersion, VersionTemplate
from elasticrec.publish.servers.prepare import versions_of
from elasticrec.publish.servers.target import LostParentError, ShardDraft, ShardParts
from elasticrec.publish.servers.versions import RunInfo, RunVersions
from elasticrec.repository.repository import Repository
from elasticrec.roles.coordinator import prepare
from elasticrec.run import Run
from support.small import MakeJob, WriteSamples
from support.versions import FEATURES, read_current, write_version

TEMPLATE = VersionTemplate(
    key="job-1",
    features=FEATURES,
    partitions=4,
    columns=[{"name": "wide", "width": 1}],
    inputs=["pooled"],
    tensors=[{"name": "w", "shape": [4], "offset": 0}],
    labels=None,
)
FACTS = {"passes": 1, "until": "2026-01-01T05", "train": [{"auc": 0.7, "samples": 9}]}
DENSE = np.arange(4, dtype=np.float32)


# the network depends on values, so its graph cannot be exported
UNEXPORTABLE_MODEL = """
import torch

from elasticrec.models import Column, Model


class Odd(Model):
    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        self.out = torch.nn.Linear(shape.num_slots * options.dim, shape.num_labels)

    def forward(self, columns, dense):
        x = self.out(columns["deep"].flatten(1))
        return x * torch.linalg.eigvals(x @ x.T).real.sum()
"""


class Setup:
    """A run of two shards and its model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.repository = Repository.open(directory / "models", "m")
        TEMPLATE.write(directory, b"the graph")
        self.versions = self.start()

    def start(self, run_id: str = "run-1", **publish: Any) -> RunVersions:
        info = RunInfo("small", run_id, self.directory, Publish(model="m", **publish), has_store=False)
        return RunVersions(Repository.open(self.directory / "models", "m"), info)

    def write(self, draft: ShardDraft, name: str, parent: PublishedVersion | None, dense: Any = DENSE) -> ShardParts:
        """Write the files of both shards to the draft; return their parts."""
        parts = {}
        for index in (0, 1):
            written = {}
            contents = {"cube": f"rows of {name}".encode(), "dense": dense[2 * index : 2 * index + 2].tobytes()}
            for kind, content in contents.items():
                path = draft.cube(index) if kind == "cube" else draft.dense(index)
                path.write_bytes(content)
                written[kind] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            fields = {"publish": name, "incarnation": index, "state": "written", "rows": 50, "changed": 3, "removed": 1}
            parts[index] = PublishPart.model_validate({**fields, "samples": 300, **written})
        return ShardParts(name, parent, parts, {0: range(2), 1: range(2, 4)}, FACTS)

    def publish(self, name: str, parent: PublishedVersion | None = None, dense: Any = DENSE) -> PublishedVersion:
        draft = self.versions.begin(parent)
        return self.versions.commit(draft, self.write(draft, name, parent, dense))


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


def test_a_base_and_its_deltas(setup: Setup) -> None:
    assert setup.versions.claim() is None
    first = setup.publish("a")
    second = setup.publish("b", first)
    third = setup.publish("c", second)
    assert [one.num_deltas for one in (first, second, third)] == [0, 1, 2]
    assert third.offer == "offered" and not third.is_refused
    base, delta = (setup.repository.version(number) for number in (1, 3))
    assert sorted(base.files) == ["cube/part-00000", "cube/part-00001", "dense.bin", "graph.onnx"]
    assert sorted(delta.files) == ["cube/part-00000", "cube/part-00001", "dense.bin"]
    assert (delta.base, delta.parent, delta.rows) == (1, 2, 100)
    assert delta.manifest["table"]["changed"] == 6 and delta.manifest["table"]["removed"] == 2
    ranges = {"cube/part-00000": [0, 2], "cube/part-00001": [2, 4]}
    assert base.manifest["table"]["parts"] == delta.manifest["table"]["parts"] == ranges
    assert delta.manifest["metrics"]["train"] == FACTS["train"]
    data = delta.manifest["data"]
    assert data["publish"] == {"run": "run-1", "name": "c", "deltas": 2}
    assert (data["samples"], data["epoch"], data["until"]) == (300, 1, "2026-01-01T05")
    path = setup.repository.storage.path_of(delta.name)
    assert path is not None and (path / "dense.bin").read_bytes() == DENSE.tobytes()
    assert sorted(one.name for one in path.iterdir()) == ["cube", "dense.bin", "manifest.json"]
    assert read_current(setup.directory / "models/m")["version"] == 3


def test_every_version_carries_the_reader(setup: Setup) -> None:
    replace(TEMPLATE, reader="reader.py:Mine").write(setup.directory, b"the graph", b"class Mine: ...")
    setup.versions = setup.start()
    setup.versions.claim()
    setup.publish("b", setup.publish("a"))
    for number in (1, 2):
        version = setup.repository.version(number)
        path = setup.repository.storage.path_of(version.name)
        assert path is not None and (path / "reader.py").read_bytes() == b"class Mine: ..."
        assert "reader.py" in version.files and version.manifest["data"]["reader"] == "reader.py:Mine"
    # a job without a reader writes no reader file
    TEMPLATE.write(setup.directory, b"the graph")
    assert not (setup.directory / "reader.py").exists()


def test_a_new_coordinator_finds_the_last_version_of_its_run(setup: Setup) -> None:
    setup.versions.claim()
    setup.publish("b", setup.publish("a"))
    setup.versions.close()
    # another process has published since
    write_version(setup.repository)
    last = setup.start().claim()
    assert last is not None and (last.number, last.publish, last.num_deltas) == (2, "b", 1)
    assert setup.start("run-2").claim() is None


@pytest.mark.parametrize(
    ("changes", "graph", "publish"),
    [
        ({}, b"the graph", {"row_type": "f16"}),
        ({}, b"another graph", {}),
        ({"labels": ["click"]}, b"the graph", {}),
        ({"partitions": 8}, b"the graph", {}),
        ({"columns": [{"name": "wide", "width": 2}]}, b"the graph", {}),
        ({"tensors": [{"name": "w", "shape": [2, 2], "offset": 0}]}, b"the graph", {}),
        ({"inputs": ["pooled", "dense"]}, b"the graph", {}),
    ],
)
def test_a_run_resumed_with_another_layout_begins_with_a_base(
    setup: Setup, changes: dict[str, Any], graph: bytes, publish: dict[str, Any]
) -> None:
    setup.versions.claim()
    setup.publish("b", setup.publish("a"))
    setup.versions.close()
    replace(TEMPLATE, **changes).write(setup.directory, graph)
    setup.versions = setup.start(**publish)
    assert setup.versions.claim() is None
    setup.publish("c", None)
    assert setup.repository.chain(3)[0].number == 3
    setup.versions.close()
    last = setup.start(**publish).claim()
    assert last is not None and last.number == 3


def test_a_version_committed_before_a_crash_is_offered(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.versions.claim()
    setup.publish("a")

    def die(self: Repository, number: int) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Repository, "offer", die)
        with pytest.raises(KeyboardInterrupt):
            setup.publish("b")
    assert read_current(setup.directory / "models/m")["version"] == 1
    setup.versions.close()
    last = setup.start().claim()
    assert last is not None and (last.publish, last.offer) == ("b", "offered")
    assert read_current(setup.directory / "models/m")["version"] == 2


def test_a_broken_chain_is_not_continued(setup: Setup) -> None:
    setup.versions.claim()
    first = setup.publish("a")
    second = setup.publish("b", first)
    setup.publish("c", second)
    setup.repository.remove("1/deltas/2")
    with pytest.raises(LostParentError, match="its parent, version 2, is missing"):
        setup.versions.begin(PublishedVersion(3, "c", 2))
    with pytest.raises(LostParentError, match="no version 2"):
        setup.versions.begin(second)
    last = setup.versions.claim()
    assert last is not None and last.publish == "a"


def test_an_abandoned_draft_is_removed_unless_it_is_a_version(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.versions.claim()
    draft = setup.versions.begin(None)
    setup.write(draft, "a", None)
    setup.versions.abandon(draft)
    assert not draft.path.exists()

    # after the manifest is written, the version exists despite an error
    monkeypatch.setattr("elasticrec.repository.repository.sync_directory", lambda path: None)
    draft = setup.versions.begin(None)
    content = setup.write(draft, "b", None)
    write = Repository.open(setup.directory / "models", "m").storage.__class__.write

    def write_and_fail(self: Any, name: str, found: bytes) -> None:
        write(self, name, found)
        if name.endswith("manifest.json"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(setup.repository.storage.__class__, "write", write_and_fail)
    with pytest.raises(OSError, match="Input/output error"):
        setup.versions.commit(draft, content)
    monkeypatch.undo()
    setup.versions.abandon(draft)
    last = setup.versions.claim()
    assert last is not None and last.publish == "b"


def test_a_full_disk_leaves_no_version(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.versions.claim()
    first = setup.publish("a")

    def fail(self: Any, name: str, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    draft = setup.versions.begin(first)
    with monkeypatch.context() as patch:
        patch.setattr(setup.repository.storage.__class__, "write", fail)
        with pytest.raises(OSError, match="No space left"):
            setup.versions.commit(draft, setup.write(draft, "b", first))
    setup.versions.abandon(draft)
    assert setup.repository.versions() == [1]
    assert setup.publish("c", first).num_deltas == 1


def test_dense_values_that_differ_from_the_report_are_rejected(setup: Setup) -> None:
    setup.versions.claim()
    draft = setup.versions.begin(None)
    content = setup.write(draft, "a", None)
    draft.dense(1).write_bytes(b"12345678")
    with pytest.raises(ModelError, match=r"\.dense-00001: size or sha-256 differs from the report of shard 1"):
        setup.versions.commit(draft, content)


def test_the_gate_keeps_a_version_and_does_not_offer_it(setup: Setup) -> None:
    setup.versions.claim()
    setup.publish("a")
    wrong = DENSE.copy()
    wrong[2] = np.nan
    found = setup.publish("b", dense=wrong)
    assert found.is_refused and found.offer == "not offered: dense weights: `w` has values that are not finite"
    assert read_current(setup.directory / "models/m")["version"] == 1
    assert setup.repository.versions() == [1, 2]


def test_a_rollback_holds_the_current_version(setup: Setup) -> None:
    setup.versions.claim()
    first = setup.publish("a")
    setup.publish("b", first)
    setup.repository.rollback(1)
    found = setup.publish("c", first)
    assert not found.is_refused and "a rollback holds the model" in found.offer
    assert read_current(setup.directory / "models/m")["version"] == 1


def test_two_runs_cannot_publish_the_same_model(setup: Setup) -> None:
    setup.versions.claim()
    other = setup.start("run-2")
    with pytest.raises(ConfigError, match="another process is publishing it"):
        other.claim()
    setup.versions.close()
    assert other.claim() is None
    other.close()


def test_the_template_is_exported_once_before_the_first_batch(
    make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples()
    run = Run(tmp_path / "runs/small")
    run.path.mkdir(parents=True)
    job_without_publish = make_job(train={"mode": "ps"})
    prepare(job_without_publish, run)
    assert versions_of(job_without_publish, run, "r") is None and not (run.path / "start/version.json").exists()
    # a run that has started may turn publishing on
    job = make_job(train={"mode": "ps"}, publish={"every": "30s"})
    prepare(job, run)
    template = VersionTemplate.read(run.path / "start")
    assert template.partitions == 4 and [column["name"] for column in template.columns] == ["wide", "deep"]
    assert (run.path / "start/graph.onnx").stat().st_size > 0
    assert versions_of(job, run, "r") is not None
    monkeypatch.setattr("elasticrec.publish.graph.export_graph", lambda *_: pytest.fail("exported twice"))
    prepare(job, run)


def test_another_negative_rate_gives_another_graph(
    make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples()
    run = Run(tmp_path / "runs/small")
    run.path.mkdir(parents=True)
    graphs = []
    for rate in (1.0, 0.1):
        prepare(make_job(train={"mode": "ps"}, publish={"every": "30s"}, data={"negative_rate": rate}), run)
        graphs.append((run.path / "start/graph.onnx").read_bytes())
    assert graphs[0] != graphs[1]


def test_a_model_that_cannot_be_exported_fails_before_the_first_batch(
    make_job: MakeJob, write_samples: WriteSamples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_samples()
    (tmp_path / "odd.py").write_text(UNEXPORTABLE_MODEL)
    run = Run(tmp_path / "runs/small")
    run.path.mkdir(parents=True)
    job = make_job(train={"mode": "ps"}, publish={"every": "epoch"}, model={"kind": "odd.py:Odd", "hidden": [8]})
    with pytest.raises(ModelError, match="cannot be exported to ONNX"):
        prepare(job, run)
