"""Signs of slot text that stand in several slots, and so would share rows."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.stats.arrays import by_slot

# Share of the distinct signs above which it is no accident.
MAX_SHARE = 0.01


@dataclass(frozen=True)
class Collisions:
    """What a look at the training data found."""

    num_signs: int
    """Distinct signs that were seen."""
    num_shared: int
    """Those of them that stand in several slots."""
    slots: list[str]
    """The slots concerned, those with most of them first."""

    @property
    def share(self) -> float:
        """The share of the signs that stand in several slots."""
        return self.num_shared / max(self.num_signs, 1)


class SignsOfSlots:
    """Gathers the signs of slot text by slot; nothing where signs of several slots cannot meet."""

    def __init__(self, job: Job) -> None:
        data = job.data
        self.can_meet = data.format == "slots" and not data.separate_slots and len(data.slots) > 1
        self._groups = [slot.share or slot.name for slot in data.slots]
        self._signs: dict[str, list[npt.NDArray[np.uint64]]] = {name: [] for name in self._groups}

    def add(self, batch: _core.Batch) -> None:
        """Take the signs of a batch."""
        if self.can_meet:
            for name, part in zip(self._groups, by_slot(batch, len(self._groups)), strict=True):
                self._signs[name].append(np.unique(part.signs))

    def collisions(self) -> Collisions | None:
        """What was found; None where signs of several slots cannot meet."""
        if not self.can_meet:
            return None
        distinct = {name: np.unique(np.concatenate(parts)) for name, parts in self._signs.items() if parts}
        if not distinct:
            return Collisions(0, 0, [])
        values, counts = np.unique(np.concatenate(list(distinct.values())), return_counts=True)
        shared = values[counts > 1]
        concerned = {name: int(np.isin(own, shared).sum()) for name, own in distinct.items()}
        worst = sorted((name for name in distinct if concerned[name]), key=lambda name: -concerned[name])
        return Collisions(len(values), len(shared), worst)


def warning(job: Job, found: Collisions | None) -> str | None:
    """The warning of a job whose slots share signs that they should not, if it is one."""
    if found is None or found.share <= MAX_SHARE:
        return None
    shown = ", ".join(f"`{name}`" for name in found.slots[:8])
    more = f" and {len(found.slots) - 8} more" if len(found.slots) > 8 else ""
    return (
        f"{job.source}: data.slots: {found.share:.1%} of {found.num_signs:,} distinct signs looked at occur in several "
        f"slots ({shown}{more}) and share their rows; `data.separate_slots: true` gives each slot rows of its own"
    )
