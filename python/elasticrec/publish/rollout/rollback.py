"""A rollback: at once where the store still has the version, else as soon as it has loaded it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticrec.errors import UnavailableError
from elasticrec.publish.rollout.decide import Decision, Replica, Seen
from elasticrec.publish.rollout.deliver import Replicas
from elasticrec.publish.rollout.patience import Patience
from elasticrec.repository.repository import Current, Repository

# Bytes a second that a replica loads at least, as long as none has told how fast it was.
_SLOW_BYTES_PER_S = 200e6
_LOOK_S = 0.1


@dataclass
class Rollback:
    """A rollback of one model whose rows a store holds. It offers the version that was asked for, or nothing."""

    repository: Repository
    replicas: Replicas
    min_ready: int | None
    say: Callable[[str], None]
    patience: Patience = field(default_factory=Patience)
    _said: str | None = None
    _noticed: bool = False

    def to(self, number: int, patience_s: float) -> Current:
        """Hold a version and wait until it is offered; who waits no longer leaves the rest to the roll-out."""
        self.repository.rollback(number, is_loaded=False)
        end = time.monotonic() + patience_s
        while True:
            state = self.repository.state()
            if state is not None and state.version == number:
                return state
            if state is None or state.wanted != number:
                raise UnavailableError(
                    f"{self.repository.place}: the rollback to version {number} was given up: another one, "
                    f"or `models resume`, came in between"
                )
            decision = self._step(state, number)
            if decision.offer is not None:
                continue
            if time.monotonic() >= end:
                raise UnavailableError(
                    f"{self.repository.place}: version {number} is not offered after {patience_s:g} s, "
                    f"it will be when the store has it: {'; '.join(decision.late[:3])}"
                )
            time.sleep(_LOOK_S)

    def _step(self, state: Current, number: int) -> Decision:
        """Offer the version if the store has it, else have it loaded."""
        shards = tuple(tuple(replicas) for replicas in self.replicas.look())
        decision = self.patience.decide(Seen(shards, state.version, (), is_held=True, wanted=number), self.min_ready)
        if decision.offer == number:
            # it is not, if it is wanted no more: the next look sees that
            self.repository.complete_rollback(number)
            return decision
        if not self._noticed:
            self._noticed = True
            everyone = [replica for shard in shards for replica in shard]
            self.say(f"loading {number}, about {self._estimate_s(number, everyone):.0f} s")
            self.replicas.notice([one for one in everyone if one.is_there and number not in one.versions])
        if decision.text != self._said:
            self._said = decision.text
            self.say(decision.text)
        return decision

    def _estimate_s(self, number: int, replicas: list[Replica]) -> float:
        """How long a replica that has nothing of a version needs for it; their speed is that of whole versions."""
        speeds = [replica.bytes_per_s for replica in replicas if replica.bytes_per_s]
        num_bytes = sum(version.num_bytes for version in self.repository.chain(number))
        return max(num_bytes / min(speeds, default=_SLOW_BYTES_PER_S), 1.0)
