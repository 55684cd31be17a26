"""Where the store of a model is, as its roll-out last wrote it down: a rollback by hand asks the same replicas."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.publish.rollout.decide import Replica
from elasticrec.publish.rollout.replicas import StoreReplicas
from elasticrec.repository.repository import DAMAGES, STORE, Repository
from elasticrec.repository.storage import join


@dataclass(frozen=True)
class KnownStore:
    """The replicas of each shard, and how many must have a version."""

    shards: list[list[str]]
    min_ready: int | None


@dataclass
class Remembered:
    """The replicas of a store, which is written down once each shard has answered: no typo of an address is."""

    repository: Repository
    replicas: StoreReplicas
    min_ready: int | None
    say: Callable[[str], None]
    _is_done: bool = False
    _problem: str | None = None

    def look(self) -> Sequence[Sequence[Replica]]:
        """All replicas, by shard."""
        shards = self.replicas.look()
        if not self._is_done and all(any(replica.is_there for replica in shard) for shard in shards):
            self._remember()
        return shards

    def notice(self, replicas: Sequence[Replica]) -> None:
        """Have them look at the repository now."""
        self.replicas.notice(replicas)

    def _remember(self) -> None:
        try:
            remember(self.repository, self.replicas.addresses, self.min_ready)
            self._is_done = True
        except (ElasticRecError, OSError) as error:
            # the roll-out goes on; the next look tries again
            if str(error) != self._problem:
                self._problem = str(error)
                self.say(f"a rollback by hand will not find the store: {error}")


def remember(repository: Repository, addresses: Sequence[Sequence[str]], min_ready: int | None) -> None:
    """Write down where the store is, unless it stands there."""
    found = KnownStore([list(replicas) for replicas in addresses], min_ready)
    if recall(repository) != found:
        repository.storage.write(STORE, json.dumps(asdict(found)).encode())


def recall(repository: Repository) -> KnownStore | None:
    """What was written down last; nothing for a model without a store."""
    try:
        content = repository.storage.read(STORE)
    except FileNotFoundError:
        return None
    try:
        found = json.loads(content)
        shards = [[str(address) for address in replicas] for replicas in found["shards"]]
        return KnownStore(shards, None if found["min_ready"] is None else int(found["min_ready"]))
    except DAMAGES:
        where = join(repository.place, STORE)
        raise ModelError(
            f'{where}: expected {{"shards": [["host:port"]], "min_ready": null}}, the file is damaged; remove it'
        ) from None
