"""Meetings of `half_async`: after every merge group a trainer waits until the others have reached the same point.

Trainers with a unit take part: a trainer whose lease has expired, or that is idle, does not delay the others.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass
class MeetingFigures:
    """Figures for the status and the metrics."""

    attended: int = 0
    """Meetings, summed over all trainers."""
    most_ahead: int = 0
    """The largest lead of a trainer over another participant, in meetings."""


class Meetings:
    """Counts the meetings that each trainer has reached."""

    def __init__(self) -> None:
        self._attended: dict[int, int] = {}
        self.figures = MeetingFigures()

    def restore(self, trainer: int, number: int) -> None:
        """Set the number of meetings of a trainer that registered with an earlier coordinator."""
        self._attended.setdefault(trainer, number)

    def join(self, trainer: int, present: Collection[int]) -> int:
        """Let a trainer with a new unit take part, at the number of the slowest other trainer or its own if higher."""
        others = [self._attended[one] for one in present if one != trainer and one in self._attended]
        own = self._attended.get(trainer, max(self._attended.values(), default=0) if not others else 0)
        self._attended[trainer] = max(own, min(others, default=own))
        return self._attended[trainer]

    def arrive(self, trainer: int, number: int, present: Collection[int]) -> bool:
        """Record that a trainer has reached its meeting `number`; return whether all participants have."""
        before = self._attended.get(trainer, 0)
        if number > before:
            self._attended[trainer] = number
            self.figures.attended += 1
        numbers = [self._attended[one] for one in {*present, trainer} if one in self._attended]
        self.figures.most_ahead = max(self.figures.most_ahead, max(numbers) - min(numbers))
        return min(numbers) >= number

    def forget(self, trainer: int) -> None:
        """Remove a trainer that has left."""
        self._attended.pop(trainer, None)
