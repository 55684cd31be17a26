"""Run a rollout on a thread, beside a coordinator or a training in one process."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

from elasticrec.config import Job
from elasticrec.errors import ElasticRecError
from elasticrec.net.messages import StoreStatus
from elasticrec.net.security import check_addresses, store_security
from elasticrec.publish.content import job_repository
from elasticrec.publish.rollout.deliver import Delivery
from elasticrec.publish.rollout.known_store import RecordingReplicas
from elasticrec.publish.rollout.replicas import StoreReplicas

# Time limit for the last version of a run to reach the store.
_FINISH_TIMEOUT_S = 30.0
# The log lines stand among those of a training.
_PREFIX = "store: "

logger = logging.getLogger(__name__)


class Rollout:
    """A rollout that runs on its own thread."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._stop = threading.Event()
        arguments = delivery.run, self._stop.wait
        self._thread = threading.Thread(target=copy_context().run, args=arguments, name="deliver", daemon=True)
        self._thread.start()

    def describe(self) -> StoreStatus:
        """Return the rollout's progress for the status."""
        return self._delivery.describe()

    def end(self) -> None:
        """Stop the thread."""
        self._stop.set()
        self._thread.join()

    def finish(self) -> None:
        """Stop the thread and wait for the last version, up to a time limit."""
        self.end()
        _finish(self._delivery)


@contextmanager
def background_rollout(job: Job) -> Iterator[Rollout | None]:
    """Roll out new versions until the block ends. Yield None if the job names no store."""
    if not job.cube.addresses:
        yield None
        return
    repository = job_repository(job, insecure=job.cube.insecure)
    security = store_security(job.cube, ca=None)
    check_addresses(security, job.cube.addresses)
    store_replicas = StoreReplicas(repository.name, job.cube.addresses, security)
    cube = job.cube
    replicas = RecordingReplicas(repository, store_replicas, cube.min_ready, _PREFIX)
    rollout = Rollout(Delivery(repository, replicas, job.publish.gate, cube.min_ready, cube.poll_s, prefix=_PREFIX))
    try:
        yield rollout
    finally:
        rollout.end()


def _finish(delivery: Delivery) -> None:
    """Run steps until the newest version is current, or the time limit is reached."""
    end = time.monotonic() + _FINISH_TIMEOUT_S
    while time.monotonic() < end:
        try:
            decision = delivery.step()
            if decision.target is None or decision.target == delivery.repository.current():
                return
        except (ElasticRecError, OSError) as error:
            logger.warning("%s%s", _PREFIX, error)
        time.sleep(0.1)
    logger.warning("%sthe last version is not offered yet: `elasticrec deliver` continues the rollout", _PREFIX)
