"""Parameters to a version: the graph, the flat weights, the cube, the manifest last; then the gate and the offer."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.config.publish import ROW_TYPES
from elasticrec.durable import write_synced
from elasticrec.errors import ConfigError
from elasticrec.manifest import FileEntry
from elasticrec.publish.content import NO_CHANGES, Changes, Network, Source, VersionTemplate
from elasticrec.publish.export import input_names
from elasticrec.publish.graph import graph_of
from elasticrec.publish.offer import Outcome, offer_version
from elasticrec.repository.repository import Draft, Repository
from elasticrec.repository.storage import join
from elasticrec.repository.version import DENSE_FILE, GRAPH_FILE, READER_FILE, Content, Version, part_name
from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress, State
from elasticrec.training.network import Scorer
from elasticrec.training.predict import load_checkpoint

CUBE_FILE = part_name(0)


@dataclass(frozen=True)
class Cut:
    """What a version is made of: parameters, and where they come from."""

    job: Job
    run: Run
    checkpoint: str
    scorer: Scorer
    state: State
    progress: Progress
    metrics: dict[str, Any]
    publish: dict[str, Any] | None = None
    """Of a training at work: whose publish it is."""

    @property
    def dense(self) -> bytes:
        """The flat weights of the network."""
        return self.state.dense.values.numpy().tobytes()


@dataclass(frozen=True)
class Rows:
    """The rows of a version as they were written: all of them, or of a delta what changed."""

    file: FileEntry
    changed: int = 0
    removed: int = 0
    whole: int = 0
    """Partitions of a delta that are whole in it."""


@dataclass(frozen=True)
class Published:
    """A version that was written, and what became of it."""

    model: str
    version: int
    place: str
    """Path or URL."""
    rows: int
    num_bytes: int
    outcome: Outcome

    @property
    def path(self) -> Path:
        """Its directory, where the repository is on a disk of this machine."""
        return Path(self.place)


def until(progress: Progress) -> str | None:
    """The last hour that was trained whole."""
    passes = [entry for entry in progress.hours if "skipped" not in entry][: progress.epoch]
    return next((entry["hour"] for entry in reversed(passes) if entry["hour"] is not None), None)


def open_repository(job: Job) -> Repository:
    """Where the versions of a job go."""
    return Repository.open(job.publish.repository, job.publish.model, insecure=job.train.ps.insecure)


def graphs_of(run: Run) -> Path:
    """Where the graph of a run is kept for its next version."""
    return run.path / "graphs"


def publish_run(run: Run, *, best: bool = False, row_type: str | None = None) -> Published:
    """Publish the newest or the best checkpoint of a run and offer it, with rows as its job says or as asked."""
    loaded = load_checkpoint(run, best=best)
    checkpoint = loaded.checkpoint
    job = loaded.job if row_type is None else with_row_type(loaded.job, row_type)
    check_row_type(job)
    # before anything is written: what cannot be exported leaves no trace
    graph = graph_of(job, loaded.scorer, loaded.state.dense, graphs_of(run))
    metrics = checkpoint.manifest["metrics"]
    cut = Cut(job, run, checkpoint.name, loaded.scorer, loaded.state, checkpoint.progress, metrics)
    repository = open_repository(job)
    with repository.locked():
        return publish_base(repository, cut, graph)


def publish_base(repository: Repository, cut: Cut, graph: bytes) -> Published:
    """Write a whole version and offer it; the caller holds the repository."""
    with repository.begin() as draft:
        version = commit_cut(draft, cut, graph, write_all(cut, draft))
    return offer_cut(repository, version, cut)


def commit_cut(draft: Draft, cut: Cut, graph: bytes, rows: Rows) -> Version:
    """Make a version of rows that are written: the network beside them, the manifest last."""
    files = {CUBE_FILE: rows.file, DENSE_FILE: FileEntry(*write_synced(draft.directory / DENSE_FILE, cut.dense))}
    if draft.base is None:
        files[GRAPH_FILE] = FileEntry(*write_synced(draft.directory / GRAPH_FILE, graph))
    if (source := cut.job.reader_source()) is not None:
        # in each delta too: a small file, and the next training may have another
        files[READER_FILE] = FileEntry(*write_synced(draft.directory / READER_FILE, source))
    content = content_of(cut, Changes(rows.changed, rows.removed))
    return draft.repository.commit(draft, content, files)


def offer_cut(repository: Repository, version: Version, cut: Cut) -> Published:
    """Offer a version that was committed, if it is as it has to be."""
    outcome = offer_version(
        repository,
        version,
        cut.job.publish,
        dense=cut.dense,
        has_store=bool(cut.job.cube.addresses),
    )
    place = join(repository.place, version.name)
    return Published(repository.name, version.number, place, version.rows, version.num_bytes, outcome)


def content_of(cut: Cut, changes: Changes = NO_CHANGES) -> Content:
    """Return the manifest's content, except for the version number and the files."""
    model = cut.scorer.model
    network = Network(
        columns=[{"name": column.name, "width": column.width} for column in model.columns],
        inputs=input_names(model.shape),
        tensors=[tensor.to_dict() for tensor in cut.state.dense.tensors],
    )
    source = Source(
        run=cut.run.name,
        checkpoint=cut.checkpoint,
        rows=len(cut.state.embedding.table),
        metrics=cut.metrics,
        samples=cut.progress.samples,
        epoch=cut.progress.epoch,
        until=until(cut.progress),
        publish=cut.publish,
    )
    return VersionTemplate.of(cut.job, network).content(source, cut.job.publish.row_type, changes)


def with_row_type(job: Job, row_type: str) -> Job:
    """The same job with another type of rows."""
    if row_type not in ROW_TYPES:
        raise ConfigError(f"--row-type: expected {', '.join(f'`{one}`' for one in ROW_TYPES)}, got `{row_type}`")
    return job.model_copy(update={"publish": job.publish.model_copy(update={"row_type": row_type})})


def check_row_type(job: Job) -> None:
    """Refuse a type of rows that this build does not write, before anything is."""
    if job.publish.row_type != "f32" and not _writes_row_types():
        raise ConfigError(
            f"{job.source}: publish.row_type: expected `f32`, all that this build writes, got `{job.publish.row_type}`"
        )


def _writes_row_types() -> bool:
    return "row_type" in (getattr(_core.Table.write_cube, "__text_signature__", None) or "")


def write_all(cut: Cut, draft: Draft) -> Rows:
    """Write the rows of a base, without a list of what changes from then on."""
    path = str(draft.directory / CUBE_FILE)
    return Rows(FileEntry(*cut.state.embedding.table.write_cube(path, row_type=cut.job.publish.row_type)))
