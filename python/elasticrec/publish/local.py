"""Publish from one process: write graph, flat weights and cube, commit the manifest, then pass the gate and offer."""

from dataclasses import dataclass
from typing import Any

from elasticrec.config import Job
from elasticrec.config.publish import ROW_TYPES
from elasticrec.errors import ConfigError
from elasticrec.manifest import FileEntry
from elasticrec.publish.content import NO_CHANGES, Changes, Provenance, VersionTemplate, job_repository
from elasticrec.publish.export import describe_network
from elasticrec.publish.graph import cached_graph
from elasticrec.publish.offer import PublishResult, offer_version
from elasticrec.repository.repository import Draft, Repository
from elasticrec.repository.storage import join
from elasticrec.repository.version import Content, Version, part_name
from elasticrec.run import Run
from elasticrec.training.checkpoint import Progress, State
from elasticrec.training.network import Scorer
from elasticrec.training.predict import load_checkpoint

CUBE_FILE = part_name(0)


@dataclass(frozen=True)
class VersionSource:
    """The trained parameters that a version is written from, and their origin."""

    job: Job
    run: Run
    checkpoint: str
    """Name of the checkpoint, or the step of a training in progress."""
    scorer: Scorer
    state: State
    progress: Progress
    metrics: dict[str, Any]
    publish: dict[str, Any] | None = None
    """Run, name and number of deltas of a publish by a training in progress."""

    @property
    def dense(self) -> bytes:
        """The flat weights of the network."""
        return self.state.dense.values.numpy().tobytes()


@dataclass(frozen=True)
class WrittenRows:
    """The part file that was written: all rows of a base, or the changed rows of a delta."""

    file: FileEntry
    changed: int = 0
    removed: int = 0
    whole: int = 0
    """Partitions that a delta holds completely."""


def last_complete_hour(progress: Progress) -> str | None:
    """Return the last hour that was trained completely, or None."""
    passes = [entry for entry in progress.hours if "skipped" not in entry][: progress.epoch]
    return next((entry["hour"] for entry in reversed(passes) if entry["hour"] is not None), None)


def publish_run(run: Run, *, best: bool = False, row_type: str | None = None) -> PublishResult:
    """Publish the newest or the best checkpoint of a run and offer it; `row_type` overrides the job's."""
    loaded = load_checkpoint(run, best=best)
    checkpoint = loaded.checkpoint
    job = loaded.job if row_type is None else with_row_type(loaded.job, row_type)
    # Export first: a model that cannot be exported leaves no files behind.
    graph = cached_graph(job, loaded.scorer, loaded.state.dense, run.graphs)
    metrics = checkpoint.manifest["metrics"]
    source = VersionSource(job, run, checkpoint.name, loaded.scorer, loaded.state, checkpoint.progress, metrics)
    repository = job_repository(job)
    with repository.locked():
        return publish_base(repository, source, graph)


def publish_base(repository: Repository, source: VersionSource, graph: bytes) -> PublishResult:
    """Write a base and offer it. The caller holds the repository's lock."""
    with repository.begin() as draft:
        version = commit_version(draft, source, graph, write_base_rows(source, draft))
    return offer_committed(repository, version, source)


def commit_version(draft: Draft, source: VersionSource, graph: bytes, rows: WrittenRows) -> Version:
    """Commit a version whose rows are written: add the network's files, then write the manifest."""
    files = {CUBE_FILE: rows.file, **draft.write_network(source.dense, graph, source.job.reader_source())}
    content = version_content(source, Changes(rows.changed, rows.removed))
    return draft.repository.commit(draft, content, files)


def offer_committed(repository: Repository, version: Version, source: VersionSource) -> PublishResult:
    """Offer a committed version if it passes the gate."""
    offer = offer_version(
        repository,
        version,
        source.job.publish,
        dense=source.dense,
        has_store=bool(source.job.cube.addresses),
    )
    location = join(repository.location, version.name)
    return PublishResult(repository.name, version.number, location, version.rows, version.num_bytes, offer)


def version_content(source: VersionSource, changes: Changes = NO_CHANGES) -> Content:
    """Return the manifest's content, except for the version number and the files."""
    network = describe_network(source.scorer.model, source.state.dense.tensors)
    provenance = Provenance(
        run=source.run.name,
        checkpoint=source.checkpoint,
        rows=len(source.state.embedding.table),
        metrics=source.metrics,
        samples=source.progress.samples,
        epoch=source.progress.epoch,
        until=last_complete_hour(source.progress),
        publish=source.publish,
    )
    return VersionTemplate.of(source.job, network).content(provenance, source.job.publish.row_type, changes)


def with_row_type(job: Job, row_type: str) -> Job:
    """Return the job with another row type."""
    if row_type not in ROW_TYPES:
        raise ConfigError(f"--row-type: expected {', '.join(f'`{one}`' for one in ROW_TYPES)}, got `{row_type}`")
    return job.model_copy(update={"publish": job.publish.model_copy(update={"row_type": row_type})})


def write_base_rows(source: VersionSource, draft: Draft) -> WrittenRows:
    """Write the rows of a base, without tracking later changes."""
    path = str(draft.directory / CUBE_FILE)
    return WrittenRows(FileEntry(*source.state.embedding.table.write_cube(path, row_type=source.job.publish.row_type)))
