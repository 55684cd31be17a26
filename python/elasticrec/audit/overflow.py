"""Full partitions: compares the counts that they report as lost with the counts that are missing."""

import numpy as np
import numpy.typing as npt

from elasticrec.audit.counts import Counts
from elasticrec.audit.part import partition_of
from elasticrec.config.sparse import Sparse

# Number of rows that are described.
_SHOWN = 5


class Overflow:
    """Compares full partitions: no count may be too high, and missing counts must equal the reported losses.

    Losses are not checked if rows decay or are evicted.
    """

    def __init__(self, partitions: dict[int, dict[str, int]], sparse: Sparse) -> None:
        self.partitions = partitions
        self.problems: list[str] = []
        self._num_partitions = sparse.partitions
        evict = sparse.evict
        self._forgets = sparse.decay.show_click < 1 or evict.min_score is not None or evict.max_age is not None

    def leave_out(self, expected: Counts, got: Counts) -> tuple[Counts, Counts]:
        """Compare the rows of full partitions, and return the other rows for an exact comparison."""
        in_expected, in_got = self._is_full(expected), self._is_full(got)
        self._compare(_select(expected, in_expected), _select(got, in_got))
        return _select(expected, ~in_expected), _select(got, ~in_got)

    def _is_full(self, counts: Counts) -> npt.NDArray[np.bool_]:
        full = np.array(sorted(self.partitions), np.uint32)
        return np.isin(partition_of(counts.signs, self._num_partitions), full)

    def _compare(self, expected: Counts, got: Counts) -> None:
        position = np.searchsorted(expected.signs, got.signs)
        clipped = np.minimum(position, max(len(expected) - 1, 0))
        is_known = expected.signs[clipped] == got.signs if len(expected) else np.zeros(len(got), np.bool_)
        shows = np.where(is_known, expected.shows[clipped], 0) if len(expected) else np.zeros(len(got), np.int64)
        clicks = np.where(is_known, expected.clicks[clipped], 0) if len(expected) else np.zeros(len(got), np.int64)
        for row in np.flatnonzero(~is_known | (got.shows > shows) | (got.clicks > clicks))[:_SHOWN]:
            self.problems.append(
                f"sign {got.signs[row]}: expected at most show {shows[row]} and click {clicks[row]}, even though its "
                f"partition was full, got {got.shows[row]} and {got.clicks[row]}"
            )
        if self._forgets:
            return
        for partition, lost in sorted(self.partitions.items()):
            if lost["evicted"]:
                continue
            missing = [_sums(counts, partition, self._num_partitions) for counts in (expected, got)]
            difference = (missing[0][0] - missing[1][0], missing[0][1] - missing[1][1])
            if difference != (lost["shows"], lost["clicks"]):
                self.problems.append(
                    f"partition {partition} was full: expected {lost['shows']} lost shows and {lost['clicks']} lost "
                    f"clicks, got {difference[0]} and {difference[1]}"
                )

    def note(self) -> str:
        """Return a note about the counts that are not exact."""
        total = {key: sum(lost[key] for lost in self.partitions.values()) for key in ("signs", "shows", "evicted")}
        return (
            f"not exact: {len(self.partitions):,} partitions were full (train.ps.memory_bytes): {total['shows']:,} "
            f"shows of {total['signs']:,} pushes of new signs are not counted, "
            f"{total['evicted']:,} rows were evicted to make room"
        )


def _select(counts: Counts, chosen: npt.NDArray[np.bool_]) -> Counts:
    return Counts(counts.signs[chosen], counts.shows[chosen], counts.clicks[chosen])


def _sums(counts: Counts, partition: int, num_partitions: int) -> tuple[int, int]:
    chosen = _select(counts, partition_of(counts.signs, num_partitions) == partition)
    return int(chosen.shows.sum()), int(chosen.clicks.sum())
