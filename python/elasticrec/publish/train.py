"""Train in one process, publish versions, and roll them out if the job names an online store."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from elasticrec.config import Job
from elasticrec.publish.live import open_publisher
from elasticrec.publish.rollout.background import Rollout, background_rollout
from elasticrec.training.event import Callback
from elasticrec.training.hook import Hook
from elasticrec.training.loop import Trainer, train_job
from elasticrec.training.report import Summary


def train_and_publish(
    job: Job, *, fresh: bool = False, callback: Callback | None = None, stream: TextIO | None = None
) -> Summary:
    """Train a job in this process, publish as set by `publish.every`, and roll out to `cube.addresses`."""
    with open_publisher(job) as publisher, with_rollout(job, publisher) as hook:
        return train_job(job, fresh=fresh, callback=callback, stream=stream, hook=hook)


@contextmanager
def with_rollout(job: Job, publisher: Hook) -> Iterator[Hook]:
    """Yield the publisher, with a rollout beside it if the job names an online store."""
    if job.publish.every is None or not job.cube.addresses:
        yield publisher
        return
    with ExitStack() as stack:
        yield _PublisherWithStore(job, publisher, stack)


class _PublisherWithStore:
    """Publishes, and runs a rollout until the stack is closed."""

    def __init__(self, job: Job, publisher: Hook, stack: ExitStack) -> None:
        self._job, self._publisher, self._stack = job, publisher, stack
        self._rollout: Rollout | None = None

    def begin(self, trainer: Trainer) -> None:
        """Start the rollout after the model was exported successfully."""
        self._publisher.begin(trainer)
        self._rollout = self._stack.enter_context(background_rollout(self._job))

    def between(self, trainer: Trainer) -> None:
        """Publish if due."""
        self._publisher.between(trainer)

    def end_pass(self, trainer: Trainer) -> None:
        """Publish at the end of a pass."""
        self._publisher.end_pass(trainer)

    def end(self, trainer: Trainer) -> None:
        """Publish remaining changes, and wait until the store has loaded them."""
        self._publisher.end(trainer)
        if self._rollout is not None:
            self._rollout.finish()
