"""Expected rows of a table after some passes: counts are added, decayed and evicted as in docs/formats/table.md."""

from dataclasses import dataclass

import numpy as np

from elasticrec.audit.counts import Counts, Numbers
from elasticrec.audit.hours import PassTime
from elasticrec.audit.part import mix
from elasticrec.config.sparse import Sparse

_MAX_COUNT = 2**32 - 1


@dataclass(frozen=True)
class ExpectedRows:
    """Rows, with the data time at which each was last seen."""

    counts: Counts
    seen: Numbers

    @classmethod
    def start(cls, counts: Counts) -> "ExpectedRows":
        """Return the rows before the first pass; their data time starts at 0."""
        return cls(counts, np.zeros(len(counts), np.int64))

    def after_pass(self, number: int, counts: Counts, sparse: Sparse, time: PassTime) -> "ExpectedRows":
        """Return the rows after a pass that adds `counts`."""
        total = Counts.sum([self.counts, counts])
        seen = np.zeros(len(total), np.int64)
        seen[np.searchsorted(total.signs, self.counts.signs)] = self.seen
        at = np.searchsorted(total.signs, counts.signs)
        # A late hour does not make a row look older.
        seen[at] = np.maximum(seen[at], time.seen)
        shows, clicks = np.minimum(total.shows, _MAX_COUNT), np.minimum(total.clicks, _MAX_COUNT)
        if not time.ends:
            return ExpectedRows(Counts(total.signs, shows, clicks), seen)
        rate = sparse.decay.show_click
        if rate < 1:
            step = mix(np.array([number], np.uint64))
            chance = (mix(total.signs ^ step) >> np.uint64(32)).astype(np.float64) / 2.0**32
            shows, clicks = (
                np.minimum(np.floor(count.astype(np.float64) * rate + chance).astype(np.int64), count)
                for count in (shows, clicks)
            )
        kept = np.ones(len(total), np.bool_)
        evict = sparse.evict
        if evict.min_score is not None:
            without = np.maximum(shows - clicks, 0).astype(np.float64)
            score = evict.nonclk_coeff * without + evict.click_coeff * clicks.astype(np.float64)
            kept &= score >= evict.min_score
        if evict.max_age is not None:
            kept &= np.maximum(time.seen - seen, 0) <= evict.max_age
        return ExpectedRows(Counts(total.signs[kept], shows[kept], clicks[kept]), seen[kept])
