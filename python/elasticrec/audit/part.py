"""An independent reader of part files, from docs/formats/part.md and docs/formats/table.md."""

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from elasticrec.audit.counts import Signs
from elasticrec.errors import ModelError

TABLE_KIND = 1
DENSE_KIND = 3

_HEAD = struct.Struct("<8sII")
_ENTRY = struct.Struct("<IIQQQQQQQ")
_TRAILER = struct.Struct("<8sIIQQQIIQQ")
_LINE = 64
# Show, click and last seen with its flags, after the values of a row.
_TAIL_BYTES = 10


@dataclass(frozen=True)
class Entry:
    """The directory entry of a partition."""

    partition: int
    num_rows: int
    offset: int
    length: int
    checksum: int
    aux: tuple[int, int]


class PartFile:
    """A part file with a valid frame; blocks are checked when they are read."""

    def __init__(self, path: Path, kind: int) -> None:
        self.path = path
        if path.stat().st_size < 2 * _LINE:
            raise self._damaged("too short")
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, np.uint8, "r")
        size = len(self._bytes)
        trailer = _TRAILER.unpack(self._read(size - _LINE, _LINE))
        magic, format, found, meta_at, meta_length, directory_at, num_entries, self.num_partitions, _, checksum = (
            trailer
        )
        if magic != b"ERECPART" or self._read(0, 16) != self._read(size - _LINE, 16):
            raise self._damaged("it does not begin and end with the header of a part file")
        if (format, found) != (1, kind):
            raise ModelError(f"{path}: expected format 1 and kind {kind}, got {format} and {found}")
        if directory_at + _LINE * num_entries + _LINE != size or not _LINE <= meta_at <= directory_at - meta_length:
            raise self._damaged("its trailer does not match its length")
        frame = xxhash.xxh3_64(self._read(0, _LINE))
        frame.update(self._read(meta_at, size - 8 - meta_at))
        if frame.intdigest() != checksum:
            raise self._damaged("the checksum of its frame differs")
        self.meta: Any = json.loads(self._read(meta_at, meta_length))
        self.entries = [self._entry(directory_at + _LINE * at) for at in range(num_entries)]
        end = _LINE
        for entry in self.entries:
            if entry.offset != end:
                raise self._damaged(f"the block of partition {entry.partition} does not follow the block before it")
            end = _round_up(entry.offset + entry.length)
        if end != meta_at or any(self._read(16, 48)):
            raise self._damaged("there are bytes between its blocks")
        partitions = [entry.partition for entry in self.entries]
        if partitions != sorted(set(partitions)) or any(number >= self.num_partitions for number in partitions):
            raise self._damaged("its partitions are not in increasing order")

    def block(self, entry: Entry) -> npt.NDArray[np.uint8]:
        """Return the bytes of a partition after checking them."""
        end = entry.offset + entry.length
        block = self._bytes[entry.offset : end]
        if xxhash.xxh3_64_intdigest(block.data) != entry.checksum:
            raise self._damaged(f"the checksum of partition {entry.partition} differs")
        if self._bytes[end : _round_up(end)].any():
            raise self._damaged(f"the padding of partition {entry.partition} is not zero")
        return block

    def rows(self, entry: Entry) -> npt.NDArray[Any]:
        """Return sign, show and click of the rows of a partition."""
        row_bytes = self.meta["row_bytes"]
        if entry.length != entry.num_rows * row_bytes or row_bytes < 8 + _TAIL_BYTES:
            what = f"expected {entry.num_rows} rows of {row_bytes} bytes, got {entry.length} bytes"
            raise ModelError(f"{self.path}: partition {entry.partition}: {what}")
        show = row_bytes - _TAIL_BYTES
        fields = {
            "names": ["sign", "show", "click"],
            "formats": ["<u8", "<u4", "<u4"],
            "offsets": [0, show, show + 4],
            "itemsize": row_bytes,
        }
        return np.frombuffer(self.block(entry), np.dtype(fields))  # type: ignore[call-overload]

    def _entry(self, at: int) -> Entry:
        partition, _, _, num_rows, offset, length, checksum, *aux = _ENTRY.unpack(self._read(at, _LINE))
        return Entry(partition, num_rows, offset, length, checksum, (aux[0], aux[1]))

    def _read(self, start: int, length: int) -> bytes:
        return self._bytes[start : start + length].tobytes()

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: not a part file, or damaged: {what}")


def _round_up(offset: int) -> int:
    return -(-offset // _LINE) * _LINE


def mix(values: Signs) -> Signs:
    """Return the values after the finalizer of MurmurHash3."""
    mixed: Signs = values ^ (values >> np.uint64(33))
    mixed = mixed * np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed = mixed * np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))


def partition_of(signs: Signs, num_partitions: int) -> Signs:
    """Return (mix(sign) × P) >> 64, computed in halves because numpy has no 128-bit integers."""
    mixed, count, half = mix(signs), np.uint64(num_partitions), np.uint64(32)
    low = (mixed & np.uint64(2**32 - 1)) * count
    return ((mixed >> half) * count + (low >> half)) >> half
