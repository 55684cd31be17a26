"""What a table must hold after some passes: counts are added up, decayed and evicted as docs/formats/table.md says."""

from dataclasses import dataclass

import numpy as np

from elasticrec.audit.counts import Counts, Numbers
from elasticrec.audit.hours import Place
from elasticrec.audit.part import mix
from elasticrec.config.sparse import Sparse

_MOST = 2**32 - 1


@dataclass(frozen=True)
class ExpectedRows:
    """Rows with the pass in which they were seen last."""

    counts: Counts
    seen: Numbers

    @classmethod
    def start(cls, counts: Counts) -> "ExpectedRows":
        """The rows before the first pass, which begins the time anew."""
        return cls(counts, np.zeros(len(counts), np.int64))

    def after_pass(self, number: int, counts: Counts, sparse: Sparse, place: Place) -> "ExpectedRows":
        """The rows after a pass that adds `counts`, and its end."""
        total = Counts.sum([self.counts, counts])
        seen = np.zeros(len(total), np.int64)
        seen[np.searchsorted(total.signs, self.counts.signs)] = self.seen
        at = np.searchsorted(total.signs, counts.signs)
        # of an hour that came late nothing goes back
        seen[at] = np.maximum(seen[at], place.seen)
        shows, clicks = np.minimum(total.shows, _MOST), np.minimum(total.clicks, _MOST)
        if not place.ends:
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
            kept &= np.maximum(place.seen - seen, 0) <= evict.max_age
        return ExpectedRows(Counts(total.signs[kept], shows[kept], clicks[kept]), seen[kept])
