"""Where in the files the samples of a batch stand: read again only for messages."""

import os
from collections.abc import Iterator

from elasticrec import _core
from elasticrec.data.units import Unit


def place_of(batch: _core.Batch, unit: Unit, *, batch_size: int, shuffle: bool) -> str:
    """Such as `logs/part-3.txt: lines 65-128`, or `16 of the lines 1-500` where they were shuffled."""
    told = getattr(batch, "place", None)
    if isinstance(told, str):
        return told
    path = os.path.relpath(unit.path) if unit.path.startswith(os.getcwd() + os.sep) else unit.path
    try:
        lines = list(_record_lines(unit))
    except OSError:
        return f"{path}: bytes {unit.start}-{unit.end}"
    if shuffle:
        return f"{path}: {batch.num_records} of the lines {lines[0]}-{lines[-1]}"
    first = batch.index * batch_size
    return f"{path}: lines {lines[first]}-{lines[first + batch.num_records - 1]}"


def _record_lines(unit: Unit) -> Iterator[int]:
    """Numbers, from 1, of the lines that are not blank and begin inside the unit."""
    at = 0
    with open(unit.path, "rb") as file:
        for number, line in enumerate(file, 1):
            if at >= unit.end:
                return
            if at >= unit.start and line.strip(b" \t\r\n"):
                yield number
            at += len(line)
