"""Writes the golden cubes of every row type: python tests/contract/golden/make_cubes.py

cubes-<layout>/<row type>/base            part file of a base
cubes-<layout>/<row type>/delta           part file of a delta on it
cubes-<layout>/<row type>/expected.json   rows by sign, of both versions, as they are read

They are written once, by the release that brings a layout or a row type, and never again: later ones read these.
"""

import json
import sys
from pathlib import Path

import numpy as np

from elasticrec import _core

GOLDEN = Path(__file__).parent / "cubes-1"
COLUMNS = [("wide", 1), ("deep", 3), ("side", 2)]
NUM_PARTITIONS = 4
# The partition of each sign among 4; the smallest and the largest are there.
PARTITIONS = {0: 0, 1: 2, 2: 0, 7: 1, 2**63: 2, 2**64 - 1: 1, 5: 3}
# Signs of the base; the delta changes some, removes one, and replaces partition 1 whole.
BASE = [0, 1, 7, 2**63, 2**64 - 1]
CHANGED = [1, 2, 5, 7]
REMOVED = [0]
WHOLE = 1


def rows_of(signs: list[int], version: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Values that no row type but f32 keeps to the last bit."""
    rows = [[np.sin(sign % 1009 + 10 * version + i) * 10.0 ** (i - 2) for i in range(6)] for sign in signs]
    return np.array(rows, np.float32).reshape(len(signs), 6)


def signs_in(signs: list[int], partition: int) -> list[int]:
    """Those of a partition."""
    return [sign for sign in signs if PARTITIONS[sign] == partition]


def make(directory: Path, row_type: str) -> None:
    """Write the two files, and the values that this version reads from them."""
    directory.mkdir(parents=True)
    base, delta = str(directory / "base"), str(directory / "delta")
    writer = _core.CubeWriter(base, COLUMNS, row_type=row_type, num_partitions=NUM_PARTITIONS)
    for partition in range(NUM_PARTITIONS):
        signs = signs_in(BASE, partition)
        writer.add(partition, np.array(signs, np.uint64), rows_of(signs, 1))
    writer.finish()
    changes = _core.DeltaWriter(delta, COLUMNS, row_type=row_type, num_partitions=NUM_PARTITIONS)
    for partition in range(NUM_PARTITIONS):
        signs, removed = signs_in(CHANGED, partition), signs_in(REMOVED, partition)
        gone = np.array(removed, np.uint64)
        changes.add(partition, np.array(signs, np.uint64), rows_of(signs, 2), gone, is_whole=partition == WHOLE)
    changes.finish()
    expected = {}
    for name, view in (("base", _core.CubeView([base])), ("delta", _core.CubeView([base], [[delta]]))):
        batches = [(signs.tolist(), rows.tolist()) for signs, rows in view.items()]
        expected[name] = {str(sign): row for signs, rows in batches for sign, row in zip(signs, rows, strict=True)}
    (directory / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def main() -> None:
    """Write the files that do not exist yet."""
    row_types = [row_type for row_type in ("f32", "f16", "int8") if not (GOLDEN / row_type).exists()]
    if not row_types:
        sys.exit(f"{GOLDEN}: all are there already; golden files are written once")
    for row_type in row_types:
        make(GOLDEN / row_type, row_type)


if __name__ == "__main__":
    main()
