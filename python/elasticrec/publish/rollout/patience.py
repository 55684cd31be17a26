"""Limit how long a rollout waits for replicas that are still loading a version."""

import time
from collections.abc import Callable

from elasticrec.publish.rollout.decide import Decision, RolloutState, decide

# Waiting keeps a version available if the first replica that loaded it dies.
PATIENCE_S = 30.0


class Patience:
    """Delays an offer that is already possible, up to `PATIENCE_S`, until replicas that are still loading are ready."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # When an offer first became possible.
        self._since: float | None = None

    def decide(self, state: RolloutState, min_ready: int | None) -> Decision:
        """Return the next step of the rollout."""
        patient, at_once = decide(state, min_ready, is_patient=True), decide(state, min_ready)
        if patient.offer is not None or at_once.offer is None:
            self._since = None
            return patient
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since < PATIENCE_S:
            return patient
        self._since = None
        return at_once
