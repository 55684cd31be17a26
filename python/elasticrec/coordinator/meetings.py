"""Meetings of `half_async`: after every merge group a trainer waits until the others are as far as it is.

Who takes part is who has a unit: a trainer whose lease lapsed, or that has nothing to do, holds nobody up.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass
class MeetingFigures:
    """What happened."""

    attended: int = 0
    """By all trainers together."""
    most_ahead: int = 0
    """The most meetings that a trainer was ahead of another one that took part."""


class Meetings:
    """How many meetings each trainer has attended."""

    def __init__(self) -> None:
        self._attended: dict[int, int] = {}
        self.figures = MeetingFigures()

    def know(self, trainer: int, number: int) -> None:
        """A trainer that a coordinator before this one knew has attended so many."""
        self._attended.setdefault(trainer, number)

    def join(self, trainer: int, present: Collection[int]) -> int:
        """A trainer got a unit: it is as far as the last of the others, or as far as it was."""
        others = [self._attended[one] for one in present if one != trainer and one in self._attended]
        own = self._attended.get(trainer, max(self._attended.values(), default=0) if not others else 0)
        self._attended[trainer] = max(own, min(others, default=own))
        return self._attended[trainer]

    def arrive(self, trainer: int, number: int, present: Collection[int]) -> bool:
        """A trainer comes to its meeting `number`, or still waits there; whether all who take part are there."""
        before = self._attended.get(trainer, 0)
        if number > before:
            self._attended[trainer] = number
            self.figures.attended += 1
        numbers = [self._attended[one] for one in {*present, trainer} if one in self._attended]
        self.figures.most_ahead = max(self.figures.most_ahead, max(numbers) - min(numbers))
        return min(numbers) >= number

    def forget(self, trainer: int) -> None:
        """A trainer is gone for good."""
        self._attended.pop(trainer, None)
