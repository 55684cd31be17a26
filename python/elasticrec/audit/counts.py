"""Show and click of each sign, in numpy arrays that are merged in bounded memory."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Signs = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

# Signs of samples to collect before they are sorted into the counts.
_MAX_PENDING = 2**21


@dataclass(frozen=True)
class Counts:
    """Distinct signs in increasing order, with their shows and clicks."""

    signs: Signs
    shows: Numbers
    clicks: Numbers

    @classmethod
    def of(cls, signs: Signs, shows: Numbers, clicks: Numbers) -> "Counts":
        """Return the counts of signs in any order; shows and clicks of repeated signs are added."""
        order = np.argsort(signs, kind="stable")
        ordered = signs[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(signs) else order
        if not len(signs):
            return cls(signs, shows, clicks)
        return cls(ordered[starts], np.add.reduceat(shows[order], starts), np.add.reduceat(clicks[order], starts))

    @classmethod
    def none(cls) -> "Counts":
        """Return empty counts."""
        return cls(np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))

    @classmethod
    def sum(cls, parts: Sequence["Counts"]) -> "Counts":
        """Return the sum of several counts."""
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
    """Adds up samples, one by one or many at once."""

    def __init__(self) -> None:
        self.num_samples = 0
        self._signs = array("Q")
        self._samples: list[tuple[int, int, int]] = []
        self._done: list[Counts] = []

    def add(self, show: int, click: int, signs: list[int]) -> None:
        """Add a sample; every occurrence of a sign counts."""
        self.num_samples += 1
        self._signs.extend(signs)
        self._samples.append((show, click, len(signs)))
        if len(self._signs) >= _MAX_PENDING:
            self._sort_in()

    def add_counts(self, num_samples: int, counts: Counts) -> None:
        """Add samples that were counted elsewhere."""
        self.num_samples += num_samples
        self._push(counts)

    def counts(self) -> Counts:
        """Return the counts of all samples so far."""
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
        """Merge parts of similar size, so that each sign is sorted only a few times."""
        self._done.append(counts)
        while len(self._done) > 1 and len(self._done[-2]) <= 2 * len(self._done[-1]):
            last = self._done.pop()
            self._done[-1] = Counts.sum([self._done[-1], last])
