"""Show and click of each sign: numpy arrays, gathered piece by piece in bounded memory."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Signs = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

# Signs of samples that wait to be sorted into the counts.
_WAITING = 2**21


@dataclass(frozen=True)
class Counts:
    """Each sign once, in increasing order."""

    signs: Signs
    shows: Numbers
    clicks: Numbers

    @classmethod
    def of(cls, signs: Signs, shows: Numbers, clicks: Numbers) -> "Counts":
        """Signs in any order, with repeats, whose shows and clicks are added up."""
        order = np.argsort(signs, kind="stable")
        ordered = signs[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(signs) else order
        if not len(signs):
            return cls(signs, shows, clicks)
        return cls(ordered[starts], np.add.reduceat(shows[order], starts), np.add.reduceat(clicks[order], starts))

    @classmethod
    def none(cls) -> "Counts":
        """No sign at all."""
        return cls(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def sum(cls, parts: Sequence["Counts"]) -> "Counts":
        """The counts of several parts of the data."""
        if not parts:
            return cls.none()
        return cls.of(
            np.concatenate([part.signs for part in parts]),
            np.concatenate([part.shows for part in parts]),
            np.concatenate([part.clicks for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.signs)


class Tally:
    """Takes samples one by one, or many at once."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._signs = array("Q")
        self._samples: list[tuple[int, int, int]] = []
        self._done: list[Counts] = []

    def add(self, show: int, click: int, signs: list[int]) -> None:
        """A sample; every occurrence of a sign counts."""
        self.num_samples += 1
        self._signs.extend(signs)
        self._samples.append((show, click, len(signs)))
        if len(self._signs) >= _WAITING:
            self._sort_in()

    def add_counts(self, num_samples: int, counts: Counts) -> None:
        """Samples that were counted elsewhere."""
        self.num_samples += num_samples
        self._push(counts)

    def counts(self) -> Counts:
        """All so far."""
        self._sort_in()
        self._done = [Counts.sum(self._done)]
        return self._done[0]

    def _sort_in(self) -> None:
        if not self._samples:
            return
        shows, clicks, lengths = np.array(self._samples, np.int64).T
        signs = np.frombuffer(self._signs, np.uint64) if self._signs else np.empty(0, np.uint64)
        self._push(Counts.of(signs, np.repeat(shows, lengths), np.repeat(clicks, lengths)))
        self._signs, self._samples = array("Q"), []

    def _push(self, counts: Counts) -> None:
        """Parts of like size are joined: each sign is sorted a few times however much data there is."""
        self._done.append(counts)
        while len(self._done) > 1 and len(self._done[-2]) <= 2 * len(self._done[-1]):
            last = self._done.pop()
            self._done[-1] = Counts.sum([self._done[-1], last])
