"""Signs of slot text that stand in several slots, and so would share rows: what `check` warns of."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.data.lines import some_spans, spread
from elasticrec.data.stats.arrays import by_slot
from elasticrec.data.units import is_compressed

# Share of the distinct signs above which it is no accident.
MAX_SHARE = 0.01
_NUM_FILES = 8
_FILE_BYTES = 2**20
_BATCH_SIZE = 4096


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


def find_collisions(job: Job) -> Collisions | None:
    """Look at some megabytes of slot text; None where signs of several slots cannot meet."""
    data = job.data
    if data.format != "slots" or data.separate_slots or len(data.slots) < 2:
        return None
    groups = {slot.name: slot.share or slot.name for slot in data.slots}
    names = list(dict.fromkeys(groups.values()))
    signs: dict[str, list[npt.NDArray[np.uint64]]] = {name: [] for name in names}
    for batch in _batches(job):
        for slot, part in zip(data.slots, by_slot(batch, len(data.slots)), strict=True):
            signs[groups[slot.name]].append(np.unique(part.signs))
    distinct = {name: np.unique(np.concatenate(parts)) for name, parts in signs.items() if parts}
    if not distinct:
        return Collisions(0, 0, [])
    values, counts = np.unique(np.concatenate(list(distinct.values())), return_counts=True)
    shared = values[counts > 1]
    concerned = {name: int(np.isin(own, shared).sum()) for name, own in distinct.items()}
    worst = sorted((name for name in names if concerned.get(name)), key=lambda name: -concerned[name])
    return Collisions(len(values), len(shared), worst)


def _batches(job: Job) -> Iterator[_core.Batch]:
    # as they stand in the data: a modulo makes signs meet on purpose
    features = {key: value for key, value in job.features().items() if key != "modulo"}
    parser = _core.Parser(json.dumps(features))
    cut = _core.Cut(batch_size=_BATCH_SIZE, shuffle=False, seed=0, skip_batches=0, piece_bytes=_FILE_BYTES, select=None)
    for path in spread(match_files(job, "train"), _NUM_FILES):
        reader = _core.BatchReader(parser, _units(path), cut, labels=True, workers=1)
        try:
            num_bytes = 0
            for batch in reader:
                yield batch
                num_bytes += batch.signs.nbytes + batch.offsets.nbytes
                if num_bytes > 4 * _FILE_BYTES:
                    break
        finally:
            reader.close()


def _units(path: Path) -> list[tuple[int, str, int, int, int, int, int]]:
    stat = path.stat()
    spans = None if is_compressed(path) else some_spans(path, _FILE_BYTES)
    return [
        (id, str(path), start, end, 0, stat.st_size, stat.st_mtime_ns)
        for id, (start, end) in enumerate(spans or [(0, stat.st_size)])
    ]


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
