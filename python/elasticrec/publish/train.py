"""A training in one process: it publishes, and rolls its versions out if the job names a store."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

from elasticrec.config import Job
from elasticrec.publish.live import publishing
from elasticrec.publish.rollout.background import Rollout, delivering
from elasticrec.training.event import Callback
from elasticrec.training.hook import Hook
from elasticrec.training.loop import Trainer, train_job
from elasticrec.training.report import Summary


def train_and_publish(
    job: Job, *, fresh: bool = False, callback: Callback | None = None, stream: TextIO | None = None
) -> Summary:
    """Train a job in this process, publish as `publish.every` says, and roll out to `cube.addresses`."""
    with publishing(job) as publisher, rolling_out(job, publisher) as hook:
        return train_job(job, fresh=fresh, callback=callback, stream=stream, hook=hook)


@contextmanager
def rolling_out(job: Job, publisher: Hook) -> Iterator[Hook]:
    """The publisher and, if its versions go to a store, the roll-out beside it."""
    if job.publish.every is None or not job.cube.addresses:
        yield publisher
        return
    with ExitStack() as stack:
        yield _PublisherWithStore(job, publisher, stack)


class _PublisherWithStore:
    """What the roll-out says on its thread is said by the training's own, which has the terminal."""

    def __init__(self, job: Job, publisher: Hook, stack: ExitStack) -> None:
        self._job, self._publisher, self._stack = job, publisher, stack
        self._said: deque[str] = deque()
        self._rollout: Rollout | None = None

    def begin(self, trainer: Trainer) -> None:
        """Start the roll-out once the model is known to be one that can be published."""
        self._publisher.begin(trainer)
        own = threading.get_ident()

        def say(text: str) -> None:
            self._said.append(text)
            if threading.get_ident() == own:
                self._tell(trainer)

        self._rollout = self._stack.enter_context(delivering(self._job, say))

    def between(self, trainer: Trainer) -> None:
        """Say what was said, and publish if that is due."""
        self._tell(trainer)
        self._publisher.between(trainer)

    def end_pass(self, trainer: Trainer) -> None:
        """Publish what the pass came to."""
        self._publisher.end_pass(trainer)
        self._tell(trainer)

    def end(self, trainer: Trainer) -> None:
        """Publish what is left, and wait until the store has it."""
        self._publisher.end(trainer)
        if self._rollout is not None:
            self._rollout.finish()
        self._tell(trainer)

    def _tell(self, trainer: Trainer) -> None:
        while self._said:
            trainer.reporter.say(self._said.popleft())
