"""Publish while training in one process: at the end of each pass, or every few seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elasticrec.config import Job
from elasticrec.errors import ElasticRecError
from elasticrec.publish.content import job_repository
from elasticrec.publish.graph import cached_graph
from elasticrec.publish.local import VersionSource, WrittenRows
from elasticrec.publish.local_versions import LocalVersions
from elasticrec.publish.offer import PublishResult
from elasticrec.repository.repository import Repository
from elasticrec.training.hook import Hook, NoHook
from elasticrec.training.loop import Trainer


@contextmanager
def open_publisher(job: Job) -> Iterator[Hook]:
    """Yield the hook that publishes during a training; the model's repository is locked until the block ends."""
    if job.publish.every is None:
        yield NoHook()
        return
    repository = job_repository(job)
    with repository.locked():
        yield LivePublisher(job, repository)


class LivePublisher:
    """Publishes the parameters of a training in progress. Changes of a failed publish go into the next one."""

    def __init__(self, job: Job, repository: Repository, clock: Callable[[], float] = time.monotonic) -> None:
        every = job.publish.every
        self._every_s = every if isinstance(every, float) else None
        self._versions, self._clock = LocalVersions(repository, job.publish.base_every), clock
        self._graph = b""
        self._last_s = clock()
        # Positions (see `_position`) before the first batch and at the last publish.
        self._started: tuple[int, int] | None = None
        self._published: tuple[int, int] | None = None

    def begin(self, trainer: Trainer) -> None:
        """Export the untrained network, so that a model that cannot be exported fails now and not after hours."""
        self._graph = cached_graph(trainer.job, trainer.scorer, trainer.state.dense, trainer.run.graphs)
        self._started = _position(trainer)
        self._last_s = self._clock()

    def between(self, trainer: Trainer) -> None:
        """Publish if `publish.every` seconds have passed."""
        if self._every_s is not None and self._clock() - self._last_s >= self._every_s:
            self._publish(trainer)

    def end_pass(self, trainer: Trainer) -> None:
        """Publish if versions are published by pass."""
        if self._every_s is None:
            self._publish(trainer)

    def end(self, trainer: Trainer) -> None:
        """Publish changes since the last version."""
        if self._started in (None, _position(trainer)):
            # Nothing was left to train, but an earlier process may have died before its last publish.
            if not self._is_last_missing(trainer):
                return
            self.begin(trainer)
        if self._published != _position(trainer):
            self._publish(trainer)

    def _is_last_missing(self, trainer: Trainer) -> bool:
        try:
            return self._versions.is_last_missing(_version_source(trainer))
        except (ElasticRecError, OSError) as error:
            trainer.reporter.say(f"publish: the repository cannot be used: {error}")
            return False

    def _publish(self, trainer: Trainer) -> None:
        if not trainer.progress.steps:
            return
        started = self._clock()
        try:
            with trainer.clock.stage("publish"):
                published, delta = self._versions.publish(_version_source(trainer), self._graph)
        except (ElasticRecError, OSError) as error:
            trainer.reporter.say(f"publish failed: {error}; the next version will include its changes")
        else:
            if not published.offer.has_failed:
                # After a failed offer the end of the training publishes again, and offers that version.
                self._published = _position(trainer)
            trainer.reporter.say(
                f"published {published.location}: {_describe_rows(published, delta)}, {published.num_bytes:,} bytes, "
                f"{self._clock() - started:.1f} s; {published.offer.summary}"
            )
            if published.offer.collect_error:
                trainer.reporter.say(f"old versions were not removed: {published.offer.collect_error}")
        # Reset the timer after a failure too, so that a full disk is not retried after every batch.
        self._last_s = self._clock()


def _version_source(trainer: Trainer) -> VersionSource:
    checkpoint = f"step-{trainer.progress.steps:012d}"
    metrics = trainer.metrics()
    return VersionSource(trainer.job, trainer.run, checkpoint, trainer.scorer, trainer.state, trainer.progress, metrics)


def _position(trainer: Trainer) -> tuple[int, int]:
    """Return the counts of steps and evictions: rows change if and only if one of them does."""
    return trainer.progress.steps, trainer.progress.evicted


def _describe_rows(published: PublishResult, delta: WrittenRows | None) -> str:
    if delta is None:
        return f"{published.rows:,} rows"
    whole = f", {delta.whole} partitions whole" if delta.whole else ""
    return f"{delta.changed:,} rows changed, {delta.removed:,} removed{whole}, of {published.rows:,}"
