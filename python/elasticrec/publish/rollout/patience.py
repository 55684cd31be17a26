"""Patience with replicas that are about to have a version."""

import time
from collections.abc import Callable

from elasticrec.publish.rollout.decide import Decision, Seen, decide

# If the one that has a version first died at once, nobody would have it.
PATIENCE_S = 30.0


class Patience:
    """Waits for replicas that are about to have a version once it could be offered without them, but not for ever."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Since when something could be offered.
        self._since: float | None = None

    def decide(self, seen: Seen, min_ready: int | None) -> Decision:
        """The next step of the roll-out."""
        patient, at_once = decide(seen, min_ready, is_patient=True), decide(seen, min_ready)
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
