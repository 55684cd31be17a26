"""Values of slots to signs, by docs/formats/features.md."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from elasticrec.audit.numbers import f32, finite
from elasticrec.config.columns import BucketSlot, DenseColumn, Slot
from elasticrec.config.data import Data

# What a value adds to its sample: signs, or of a slot that is cut (slot, sign).
Item = Any
Items = tuple[Item, ...]

NOTHING: Items = ()
# Texts of one column, or of one format without columns, that are kept in mind.
_MOST_KNOWN = 2**16
# A logarithm of another library may differ by so much.
_LAST_BIT = 2.0**-22


class Known(dict[bytes, Items]):
    """What texts add, found out once; forgotten when there are too many."""

    def __init__(self, find: Callable[[bytes], Items]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, text: bytes) -> Items:
        if len(self) >= _MOST_KNOWN:
            self.clear()
        found = self[text] = self._find(text)
        return found


def xxh3(content: bytes, seed: int = 0) -> int:
    """XXH3-64."""
    return xxhash.xxh3_64_intdigest(content, seed)


def in_share(hash: int, ratio: float) -> bool:
    """Whether a record with this hash is in the share that is held out: by the bits that a f64 has."""
    return float(hash >> 11) < ratio * 2.0**53


class SlotSigns:
    """The signs of one slot."""

    def __init__(self, slot: Slot, data: Data) -> None:
        self.name = slot.name
        self.column = slot.column or slot.name
        self.sequence = slot.sequence
        self._separator = slot.separator.encode() if slot.separator else None
        self._seed = xxh3((slot.share or slot.name).encode())
        self._modulo = data.modulo
        self._separate = data.separate_slots
        self._padding = None if data.padding is None else data.padding.encode()
        self._padding_sign = int(data.padding) if data.format == "slots" and data.padding is not None else None
        self._nulls = {b"", *(text.encode() for text in (data.columns.null if data.columns else ()))}

    def of_text(self, text: bytes) -> Items:
        """A field, which may be nothing or several values."""
        if text in self._nulls:
            return NOTHING
        if self._separator is None:
            return self.of_value(text)
        pieces = [piece for piece in text.split(self._separator) if piece]
        return tuple(item for piece in pieces for item in self.of_value(piece))

    def of_value(self, value: bytes) -> Items:
        """A value as it stands."""
        return NOTHING if value == self._padding else self._item(xxh3(value, self._seed))

    def of_sign(self, sign: int) -> Items:
        """A sign of slot text."""
        if sign == self._padding_sign:
            return NOTHING
        return self._item(xxh3(sign.to_bytes(8, "little"), self._seed) if self._separate else sign)

    def of_bucket(self, bucket: int) -> Items:
        """The bucket of a dense value."""
        return self._item(xxh3(bucket.to_bytes(8, "little", signed=True), self._seed))

    def _item(self, sign: int) -> Items:
        if self._modulo is not None:
            sign %= self._modulo
        return (sign,) if self.sequence is None else ((self, sign),)


class DenseSigns:
    """A dense column: its number must be one, and may be a bucket."""

    def __init__(self, column: DenseColumn, slots: dict[str, tuple[SlotSigns, int]]) -> None:
        self.name = column.name
        self.column = column.column or column.name
        self._kind = column.normalize
        self._bounds = (column.min, column.max)
        self._slot: SlotSigns | None = None
        self._steps = 0
        if column.name in slots:
            self._slot, self._steps = slots[column.name]
        self.num_edges = 0
        """Different values that a last bit puts into another bucket."""

    def of_number(self, value: float | None) -> Items:
        """What a number of 32 bits adds to its sample."""
        normalized = finite(self._normalize(finite(value)))
        if self._slot is None:
            return NOTHING
        exact = normalized * self._steps
        bucket = min(max(math.floor(f32(exact)), -(2**63)), 2**63 - 1)
        if self._kind == "log" and exact:
            self.num_edges += math.floor(exact * (1 - _LAST_BIT)) != math.floor(exact * (1 + _LAST_BIT))
        return self._slot.of_bucket(bucket)

    def reading(self, read: Callable[[bytes], float | None]) -> Callable[[bytes], Items]:
        """As `of_number`, of a text."""
        return lambda text: self.of_number(read(text))

    def _normalize(self, value: float) -> float:
        if self._kind == "log":
            return math.copysign(f32(math.log1p(abs(value))), value)
        if self._kind == "minmax":
            with np.errstate(over="ignore", invalid="ignore"):
                low, high, x = (np.float32(number) for number in (*self._bounds, value))
                return float(np.clip((x - low) / (high - low), np.float32(0), np.float32(1)))
        return value


class Features:
    """What a job makes of its data."""

    def __init__(self, data: Data) -> None:
        self.slots = [SlotSigns(slot, data) for slot in data.slots]
        buckets = {
            slot.buckets.dense: (SlotSigns(slot, data), slot.buckets.steps)
            for slot in data.inputs
            if isinstance(slot, BucketSlot)
        }
        self.dense = [DenseSigns(column, buckets) for column in data.dense]
        self.labels = list(data.labels)
        # a slot is known by its name and by that of its column, which goes first
        self.by_name = {slot.name.encode(): slot for slot in self.slots}
        self.by_name |= {slot.column.encode(): slot for slot in self.slots}
        self.has_sequence = any(slot.sequence is not None for slot in self.slots)

    def settle(self, items: list[Item]) -> list[int]:
        """The signs of a sample: of a sequence the last ones."""
        if not self.has_sequence:
            return items
        signs: list[int] = []
        sequences: dict[SlotSigns, list[int]] = {}
        for item in items:
            if isinstance(item, int):
                signs.append(item)
            else:
                sequences.setdefault(item[0], []).append(item[1])
        for slot, found in sequences.items():
            signs += found[-(slot.sequence or 0) :]
        return signs
