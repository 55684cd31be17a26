"""Record the addresses of a model's store in the repository, so that `models rollback` asks the same replicas."""

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.net.logs import RepeatFilter
from elasticrec.publish.rollout.decide import Replica
from elasticrec.publish.rollout.replicas import StoreReplicas
from elasticrec.repository.repository import JSON_ERRORS, STORE, Repository
from elasticrec.repository.storage import join

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KnownStore:
    """Addresses of the replicas of each shard, and how many of them must hold a version."""

    shards: list[list[str]]
    min_ready: int | None


@dataclass
class RecordingReplicas:
    """Replicas of a store, recorded in the repository once every shard has answered, so that no typo is recorded."""

    repository: Repository
    replicas: StoreReplicas
    min_ready: int | None
    prefix: str = ""
    """Text before each log line."""
    _is_recorded: bool = False
    _problems: RepeatFilter = field(default_factory=lambda: RepeatFilter(logger.warning))

    def poll(self) -> Sequence[Sequence[Replica]]:
        """Return the state of all replicas, by shard."""
        shards = self.replicas.poll()
        if not self._is_recorded and all(any(replica.is_there for replica in shard) for shard in shards):
            self._record()
        return shards

    def notify(self, replicas: Sequence[Replica]) -> None:
        """Ask replicas to check the repository now."""
        self.replicas.notify(replicas)

    def _record(self) -> None:
        try:
            record_store(self.repository, self.replicas.addresses, self.min_ready)
            self._is_recorded = True
        except (ElasticRecError, OSError) as error:
            # The rollout continues; the next check tries again.
            self._problems.write(
                f"{self.prefix}cannot record the addresses of the store, `models rollback` will not find it: {error}"
            )


def record_store(repository: Repository, addresses: Sequence[Sequence[str]], min_ready: int | None) -> None:
    """Record the addresses of the store, unless they are unchanged."""
    found = KnownStore([list(replicas) for replicas in addresses], min_ready)
    if read_known_store(repository) != found:
        repository.storage.write(STORE, json.dumps(asdict(found)).encode())


def read_known_store(repository: Repository) -> KnownStore | None:
    """Return the recorded store, or None for a model without one."""
    try:
        content = repository.storage.read(STORE)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(content)
        shards = [[str(address) for address in replicas] for replicas in found["shards"]]
        return KnownStore(shards, None if found["min_ready"] is None else int(found["min_ready"]))
    except JSON_ERRORS:
        where = join(repository.location, STORE)
        raise ModelError(
            f'{where}: expected {{"shards": [["host:port"]], "min_ready": null}}, the file is damaged; remove it'
        ) from None
