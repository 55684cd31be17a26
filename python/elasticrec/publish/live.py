"""Publishing from a training in one process: by epoch, by hour, or after so many seconds."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elasticrec.config import Job
from elasticrec.errors import ElasticRecError
from elasticrec.publish.graph import graph_of
from elasticrec.publish.local import Cut, Published, Rows, check_row_type, graphs_of, open_repository
from elasticrec.publish.local_versions import LocalVersions
from elasticrec.repository.repository import Repository
from elasticrec.training.hook import Hook, NoHook
from elasticrec.training.loop import Trainer


@contextmanager
def publishing(job: Job) -> Iterator[Hook]:
    """What a training of the job calls between its steps; it holds the model's repository meanwhile."""
    if job.publish.every is None:
        yield NoHook()
        return
    check_row_type(job)
    repository = open_repository(job)
    with repository.locked():
        yield LivePublisher(job, repository)


class LivePublisher:
    """Publishes the parameters of a training at work. A publish that fails is told, and comes with the next one."""

    def __init__(self, job: Job, repository: Repository, clock: Callable[[], float] = time.monotonic) -> None:
        every = job.publish.every
        self._every_s = every if isinstance(every, float) else None
        self._versions, self._clock = LocalVersions(repository, job.publish.base_every), clock
        self._graph = b""
        self._last_s = clock()
        # What had been learned and let go before the first batch, and of the last version.
        self._started: tuple[int, int] | None = None
        self._published: tuple[int, int] | None = None

    def begin(self, trainer: Trainer) -> None:
        """Export the untrained network: a model that cannot be published fails now, not after hours."""
        self._graph = graph_of(trainer.job, trainer.scorer, trainer.state.dense, graphs_of(trainer.run))
        self._started = _come_to(trainer)
        self._last_s = self._clock()

    def between(self, trainer: Trainer) -> None:
        """Publish if that is due."""
        if self._every_s is not None and self._clock() - self._last_s >= self._every_s:
            self._publish(trainer)

    def end_pass(self, trainer: Trainer) -> None:
        """Publish what the pass came to."""
        if self._every_s is None:
            self._publish(trainer)

    def end(self, trainer: Trainer) -> None:
        """Publish what was learned or evicted since the last time."""
        if self._started in (None, _come_to(trainer)):
            # nothing was left to train, but an earlier process may have died before its last version
            if not self._is_lacking(trainer):
                return
            self.begin(trainer)
        if self._published != _come_to(trainer):
            self._publish(trainer)

    def _is_lacking(self, trainer: Trainer) -> bool:
        try:
            return self._versions.lacks(_cut_of(trainer), trainer.reporter.say)
        except (ElasticRecError, OSError) as error:
            trainer.reporter.say(f"publish: the repository cannot be used: {error}")
            return False

    def _publish(self, trainer: Trainer) -> None:
        if not trainer.progress.steps:
            return
        started = self._clock()
        try:
            with trainer.clock.stage("publish"):
                published, delta = self._versions.publish(_cut_of(trainer), self._graph)
        except (ElasticRecError, OSError) as error:
            trainer.reporter.say(f"publish failed: {error}; the next one carries what it had")
        else:
            self._published = _come_to(trainer)
            trainer.reporter.say(
                f"published {published.place}: {_words(published, delta)}, {published.num_bytes:,} bytes, "
                f"{self._clock() - started:.1f} s; {published.outcome.words}"
            )
            if published.outcome.problem:
                trainer.reporter.say(f"old versions stay: {published.outcome.problem}")
        # also after a failure: a disk that is full is not tried after every batch
        self._last_s = self._clock()


def _cut_of(trainer: Trainer) -> Cut:
    checkpoint = f"step-{trainer.progress.steps:012d}"
    metrics = trainer.metrics()
    return Cut(trainer.job, trainer.run, checkpoint, trainer.scorer, trainer.state, trainer.progress, metrics)


def _come_to(trainer: Trainer) -> tuple[int, int]:
    """What changes rows: steps, and evictions, which come behind the last step of an epoch."""
    return trainer.progress.steps, trainer.progress.evicted


def _words(published: Published, delta: Rows | None) -> str:
    if delta is None:
        return f"{published.rows:,} rows"
    whole = f", {delta.whole} partitions whole" if delta.whole else ""
    return f"{delta.changed:,} rows changed, {delta.removed:,} removed{whole}, of {published.rows:,}"
