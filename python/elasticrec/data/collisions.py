"""Signs of slot text that occur in several slots and therefore share rows."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.stats.arrays import split_by_slot

# Up to this share of the distinct signs, collisions are attributed to chance.
MAX_SHARE = 0.01


@dataclass(frozen=True)
class Collisions:
    """Signs that several slots share, in the inspected training data."""

    num_signs: int
    """Distinct signs."""
    num_shared: int
    """Distinct signs that occur in several slots."""
    slots: list[str]
    """Slots with shared signs, most shared signs first."""

    @property
    def share(self) -> float:
        """Return the share of the distinct signs that occur in several slots."""
        return self.num_shared / max(self.num_signs, 1)


class CollisionCounter:
    """Collects the signs of each slot, if signs of different slots can collide in the job."""

    def __init__(self, job: Job) -> None:
        data = job.data
        self.can_collide = data.format == "slots" and not data.separate_slots and len(data.slots) > 1
        self._groups = [slot.share or slot.name for slot in data.slots]
        self._signs: dict[str, list[npt.NDArray[np.uint64]]] = {name: [] for name in self._groups}

    def add(self, batch: _core.Batch) -> None:
        """Add the signs of a batch."""
        if self.can_collide:
            for name, part in zip(self._groups, split_by_slot(batch, len(self._groups)), strict=True):
                self._signs[name].append(np.unique(part.signs))

    def collisions(self) -> Collisions | None:
        """Return the collisions; None if signs of different slots cannot collide."""
        if not self.can_collide:
            return None
        distinct = {name: np.unique(np.concatenate(parts)) for name, parts in self._signs.items() if parts}
        if not distinct:
            return Collisions(0, 0, [])
        values, counts = np.unique(np.concatenate(list(distinct.values())), return_counts=True)
        shared = values[counts > 1]
        num_by_slot = {name: int(np.isin(own, shared).sum()) for name, own in distinct.items()}
        worst = sorted((name for name in distinct if num_by_slot[name]), key=lambda name: -num_by_slot[name])
        return Collisions(len(values), len(shared), worst)


def collision_warning(job: Job, collisions: Collisions | None) -> str | None:
    """Return a warning if slots share more signs than chance explains, or None."""
    if collisions is None or collisions.share <= MAX_SHARE:
        return None
    shown = ", ".join(f"`{name}`" for name in collisions.slots[:8])
    more = f" and {len(collisions.slots) - 8} more" if len(collisions.slots) > 8 else ""
    return (
        f"{job.source}: data.slots: {collisions.share:.1%} of {collisions.num_signs:,} inspected signs occur in "
        f"several slots ({shown}{more}) and share rows; `data.separate_slots: true` gives each slot its own rows"
    )
