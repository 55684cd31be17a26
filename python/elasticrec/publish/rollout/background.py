"""The roll-out beside a coordinator: versions of its job reach the store that the job names."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elasticrec.config import Job
from elasticrec.errors import ElasticRecError
from elasticrec.net.security import check_addresses, store_security
from elasticrec.publish.rollout.deliver import Delivery
from elasticrec.publish.rollout.known_store import Remembered
from elasticrec.publish.rollout.replicas import StoreReplicas
from elasticrec.repository.repository import Repository

# After the end of a run its last version has so long to reach the store.
_LAST_S = 30.0


class Rollout:
    """The roll-out on a thread of its own."""

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._stop = threading.Event()
        self._thread = threading.Thread(target=delivery.run, args=(self._stop.wait,), name="deliver", daemon=True)
        self._thread.start()

    def describe(self) -> dict[str, Any]:
        """For the status."""
        return self._delivery.describe()

    def end(self) -> None:
        """Leave the versions as they are."""
        self._stop.set()
        self._thread.join()

    def finish(self) -> None:
        """Wait for the last version, but not for ever."""
        self.end()
        _finish(self._delivery)


@contextmanager
def delivering(job: Job, say: Callable[[str], None]) -> Iterator[Rollout | None]:
    """Roll versions out while the block runs; nothing without a store."""
    if not job.cube.addresses:
        yield None
        return
    insecure = job.train.ps.insecure or job.cube.insecure
    repository = Repository.open(job.publish.repository, job.publish.model, insecure=insecure)
    security = store_security(job.cube, ca=None)
    check_addresses(security, job.cube.addresses)
    replicas = StoreReplicas(repository.name, job.cube.addresses, security)

    def tell(text: str) -> None:
        say(f"store: {text}")

    cube = job.cube
    remembered = Remembered(repository, replicas, cube.min_ready, tell)
    rollout = Rollout(Delivery(repository, remembered, job.publish.gate, tell, cube.min_ready, cube.poll_s))
    try:
        yield rollout
    finally:
        rollout.end()


def _finish(delivery: Delivery) -> None:
    """Until the newest version is offered, or it takes too long."""
    end = time.monotonic() + _LAST_S
    while time.monotonic() < end:
        try:
            decision = delivery.step()
            if decision.target is None or decision.target == delivery.repository.current():
                return
        except (ElasticRecError, OSError) as error:
            delivery.say(str(error))
        time.sleep(0.1)
    delivery.say("the last version is not offered yet: `elasticrec deliver` goes on with it")
