"""Partitions that were full: what they say they did not count is held against what is missing in them."""

import numpy as np
import numpy.typing as npt

from elasticrec.audit.counts import Counts
from elasticrec.audit.part import partition_of
from elasticrec.config.sparse import Sparse

# Rows that are told one by one.
_SHOWN = 5


class Overflow:
    """Such counts are not exact. They must not be too high; what is missing is known as long as rows only come."""

    def __init__(self, partitions: dict[int, dict[str, int]], sparse: Sparse) -> None:
        self.partitions = partitions
        self.problems: list[str] = []
        self._num_partitions = sparse.partitions
        evict = sparse.evict
        self._forgets = sparse.decay.show_click < 1 or evict.min_score is not None or evict.max_age is not None

    def leave_out(self, expected: Counts, got: Counts) -> tuple[Counts, Counts]:
        """What is left to compare exactly; the rows of full partitions are compared here."""
        ours, theirs = self._are_in(expected), self._are_in(got)
        self._compare(_of(expected, ours), _of(got, theirs))
        return _of(expected, ~ours), _of(got, ~theirs)

    def _are_in(self, counts: Counts) -> npt.NDArray[np.bool_]:
        full = np.array(sorted(self.partitions), np.uint32)
        return np.isin(partition_of(counts.signs, self._num_partitions), full)

    def _compare(self, expected: Counts, got: Counts) -> None:
        place = np.searchsorted(expected.signs, got.signs)
        inside = np.minimum(place, max(len(expected) - 1, 0))
        is_known = expected.signs[inside] == got.signs if len(expected) else np.zeros(len(got), np.bool_)
        shows = np.where(is_known, expected.shows[inside], 0) if len(expected) else np.zeros(len(got), np.int64)
        clicks = np.where(is_known, expected.clicks[inside], 0) if len(expected) else np.zeros(len(got), np.int64)
        for row in np.flatnonzero(~is_known | (got.shows > shows) | (got.clicks > clicks))[:_SHOWN]:
            self.problems.append(
                f"sign {got.signs[row]}: expected at most show {shows[row]} and click {clicks[row]}, although its "
                f"partition was full, got {got.shows[row]} and {got.clicks[row]}"
            )
        if self._forgets:
            return
        for partition, told in sorted(self.partitions.items()):
            if told["evicted"]:
                continue
            missing = [_sums(counts, partition, self._num_partitions) for counts in (expected, got)]
            lacks = (missing[0][0] - missing[1][0], missing[0][1] - missing[1][1])
            if lacks != (told["shows"], told["clicks"]):
                self.problems.append(
                    f"partition {partition}: was full: expected shows and clicks {(told['shows'], told['clicks'])} not "
                    f"to be counted, got {lacks}"
                )

    def note(self) -> str:
        """What is not exact."""
        total = {key: sum(told[key] for told in self.partitions.values()) for key in ("signs", "shows", "evicted")}
        return (
            f"not exact: {len(self.partitions):,} partitions were full (train.ps.memory_bytes): {total['shows']:,} "
            f"shows of {total['signs']:,} pushes of new signs are not counted, {total['evicted']:,} rows made room"
        )


def _of(counts: Counts, chosen: npt.NDArray[np.bool_]) -> Counts:
    return Counts(counts.signs[chosen], counts.shows[chosen], counts.clicks[chosen])


def _sums(counts: Counts, partition: int, num_partitions: int) -> tuple[int, int]:
    chosen = _of(counts, partition_of(counts.signs, num_partitions) == partition)
    return int(chosen.shows.sum()), int(chosen.clicks.sum())
