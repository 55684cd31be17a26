"""Run a rollout: observe the repository and the store, decide, notify the replicas, and offer the version.

The controller keeps no state: after a restart, or beside a second controller, it continues from what it observes.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from elasticrec.config.publish import Gate
from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.net.messages import RefusedVersion, StoreStatus
from elasticrec.publish.gate import GateCheck
from elasticrec.publish.rollout.decide import Decision, Replica, RolloutState, decide
from elasticrec.publish.rollout.patience import Patience
from elasticrec.repository.repository import Repository

logger = logging.getLogger(__name__)

# First polling interval while replicas are loading a version; it doubles up to `poll_s`.
_FIRST_PAUSE_S = 0.02


class Replicas(Protocol):
    """The replicas of a store."""

    def poll(self) -> Sequence[Sequence[Replica]]:
        """Return the state of all replicas, by shard."""

    def notify(self, replicas: Sequence[Replica]) -> None:
        """Ask replicas to check the repository now."""


@dataclass
class Delivery:
    """The rollout of one model."""

    repository: Repository
    replicas: Replicas
    gate: Gate
    min_ready: int | None = None
    poll_s: float | None = 0.5
    """Seconds between two checks; None for a single check."""
    patience: Patience = field(default_factory=Patience)
    prefix: str = ""
    """Text before each log line."""
    refused: dict[int, list[str]] = field(default_factory=dict)
    """Versions that the gate refused, with the reasons."""
    _passed: dict[int, bool] = field(default_factory=dict)
    _reported: tuple[str, tuple[str, ...]] = ("", ())
    _notified: int | None = None

    def run(self, wait: Callable[[float], bool]) -> None:
        """Run steps until `wait` returns true."""
        assert self.poll_s is not None, "call `step` for a single check"
        poll_s, loading_pause_s, target = self.poll_s, _FIRST_PAUSE_S, None
        while True:
            pause_s = poll_s
            try:
                decision = self.step()
                if decision.target != target:
                    loading_pause_s, target = _FIRST_PAUSE_S, decision.target
                if decision.late:
                    pause_s, loading_pause_s = min(loading_pause_s, poll_s), 2 * loading_pause_s
            except (ElasticRecError, OSError) as error:
                self._report(f"rollout failed, retrying: {error}", ())
            except Exception as error:
                # A bug must not end the rollout.
                self._report(f"rollout failed, retrying: {type(error).__name__}: {error}", ())
            if wait(pause_s):
                return

    def step(self) -> Decision:
        """Reconcile once: observe, decide, offer or notify."""
        state = self._observe()
        decision = self.patience.decide(state, self.min_ready)
        if decision.offer is not None and not self._offer(state, decision.offer):
            # A rollback or another controller was faster: the next step sees it.
            return decision
        late = [one for shard in state.shards for one in shard if one.is_there and decision.target not in one.versions]
        if decision.target is not None and decision.target != self._notified and late:
            self._notified = decision.target
            self.replicas.notify(late)
        self._report(decision.text, decision.late)
        return decision

    def describe(self) -> StoreStatus:
        """Return the last report, for the status."""
        text, late = self._reported
        newest = max(self.refused, default=None)
        refused: RefusedVersion | None = None if newest is None else {"version": newest, "why": self.refused[newest]}
        return {"doing": text or "checking the store", "late": list(late), "refused": refused}

    def preview(self) -> tuple[Decision, tuple[tuple[Replica, ...], ...]]:
        """Return the decision of the next step without acting on it, and the replicas."""
        state = self._observe()
        decision = decide(state, self.min_ready, is_patient=True)
        if decision.offer is not None:
            text = f"version {decision.offer} can be offered: start `elasticrec deliver`"
            decision = decision._replace(text=text)
        return decision, state.shards

    def _observe(self) -> RolloutState:
        found = self.repository.state()
        current = None if found is None else found.version
        shards = tuple(tuple(replicas) for replicas in self.replicas.poll())
        wanted = None if found is None else found.wanted
        is_held = found is not None and found.is_held
        return RolloutState(shards, current, self._offerable(current), is_held, wanted)

    def _offer(self, state: RolloutState, version: int) -> bool:
        """Offer a version. Return whether it is current now."""
        if state.is_held:
            return self.repository.complete_rollback(version)
        return self.repository.offer(version)

    def _offerable(self, current: int | None) -> tuple[int, ...]:
        """Return the versions that may be offered. The gate checks each version newer than the current one once.

        A version that cannot be read is reported and checked again; it does not block newer versions.
        """
        found = []
        for number in self.repository.versions():
            if current is not None and number <= current:
                found.append(number)
                continue
            if number not in self._passed:
                try:
                    reasons = self._refusals(number, current)
                    self._passed[number] = not reasons
                except (ModelError, FileNotFoundError) as error:
                    reasons = [str(error)]
                if reasons and self.refused.get(number) != reasons:
                    self.refused[number] = reasons
                    logger.warning(f"{self.prefix}version {number} is not offered: {'; '.join(reasons)}")
            if self._passed.get(number):
                found.append(number)
        return tuple(found)

    def _refusals(self, number: int, current: int | None) -> list[str]:
        gate_check = GateCheck.against(self.gate, self.repository, current)
        return gate_check.refusals(self.repository.version(number))

    def _report(self, text: str, late: tuple[str, ...]) -> None:
        """Report changes since the last report."""
        if (text, late) == self._reported:
            return
        before, self._reported = self._reported, (text, late)
        if text != before[0]:
            next_check = "" if self.poll_s is None else f"; next check in {self.poll_s:g} s"
            logger.info("%s%s%s", self.prefix, text, next_check)
        for one in late:
            if one not in before[1]:
                logger.info("%slate: %s", self.prefix, one)
