"""Roll back to a version: at once if the store still holds it, else as soon as the store has loaded it."""

import logging
import time
from dataclasses import dataclass, field

from elasticrec.errors import UnavailableError
from elasticrec.publish.rollout.decide import Decision, Replica, RolloutState
from elasticrec.publish.rollout.deliver import Replicas
from elasticrec.publish.rollout.patience import Patience
from elasticrec.repository.repository import Current, Repository

# Assumed loading speed until a replica has reported its own.
_DEFAULT_BYTES_PER_S = 200e6
_POLL_S = 0.1

logger = logging.getLogger(__name__)


@dataclass
class Rollback:
    """A rollback of one model that has an online store. It offers only the requested version."""

    repository: Repository
    replicas: Replicas
    min_ready: int | None
    patience: Patience = field(default_factory=Patience)
    _last_text: str | None = None
    _has_notified: bool = False

    def roll_back(self, number: int, wait_s: float) -> Current:
        """Hold a version and wait until it is current. After a timeout the rollout completes the rollback."""
        self.repository.rollback(number, is_loaded=False)
        end = time.monotonic() + wait_s
        while True:
            state = self.repository.state()
            if state is not None and state.version == number:
                return state
            if state is None or state.wanted != number:
                raise UnavailableError(
                    f"{self.repository.location}: the rollback to version {number} was cancelled "
                    f"by another rollback or by `models resume`"
                )
            decision = self._step(state, number)
            if decision.offer is not None:
                continue
            if time.monotonic() >= end:
                raise UnavailableError(
                    f"{self.repository.location}: version {number} is not current after {wait_s:g} s; "
                    f"the rollout offers it once the store has loaded it: {'; '.join(decision.late[:3])}"
                )
            time.sleep(_POLL_S)

    def _step(self, state: Current, number: int) -> Decision:
        """Offer the version if the store holds it, else ask the replicas to load it."""
        shards = tuple(tuple(replicas) for replicas in self.replicas.poll())
        decision = self.patience.decide(
            RolloutState(shards, state.version, (), is_held=True, wanted=number), self.min_ready
        )
        if decision.offer == number:
            # A cancelled rollback is not completed: the next step sees it.
            self.repository.complete_rollback(number)
            return decision
        if not self._has_notified:
            self._has_notified = True
            replicas = [replica for shard in shards for replica in shard]
            logger.info("loading %d, about %.0f s", number, self._estimate_s(number, replicas))
            self.replicas.notify([one for one in replicas if one.is_there and number not in one.versions])
        if decision.text != self._last_text:
            self._last_text = decision.text
            logger.info(decision.text)
        return decision

    def _estimate_s(self, number: int, replicas: list[Replica]) -> float:
        """Return the estimated time for a replica to load a version and all of its chain."""
        speeds = [replica.bytes_per_s for replica in replicas if replica.bytes_per_s]
        num_bytes = sum(version.num_bytes for version in self.repository.chain(number))
        return max(num_bytes / min(speeds, default=_DEFAULT_BYTES_PER_S), 1.0)
