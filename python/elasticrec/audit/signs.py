"""Conversion of values of slots and dense columns to signs, as in docs/formats/features.md."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from elasticrec.audit.values import check_finite, f32
from elasticrec.config.columns import BucketSlot, DenseColumn, Slot
from elasticrec.config.data import Data

# An item is a sign, or (slot, sign) for a sequence, which keeps only its last signs.
Item = Any
Items = tuple[Item, ...]

NOTHING: Items = ()
# Maximum number of texts in a cache.
_MAX_CACHED = 2**16
# Relative error between two implementations of the logarithm.
_LAST_BIT = 2.0**-22


class ItemCache(dict[bytes, Items]):
    """A cache of the items of texts; it is emptied when it is full."""

    def __init__(self, find: Callable[[bytes], Items]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, text: bytes) -> Items:
        if len(self) >= _MAX_CACHED:
            self.clear()
        items = self[text] = self._find(text)
        return items


def xxh3(content: bytes, seed: int = 0) -> int:
    """Return the XXH3-64 hash."""
    return xxhash.xxh3_64_intdigest(content, seed)


def in_share(hash: int, ratio: float) -> bool:
    """Return whether a record with this hash is held out; the comparison has the precision of a 64-bit float."""
    return float(hash >> 11) < ratio * 2.0**53


class SlotSigns:
    """Computes the signs of a slot."""

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
        """Return the items of a field with no value, one value or several values."""
        if text in self._nulls:
            return NOTHING
        if self._separator is None:
            return self.of_value(text)
        pieces = [piece for piece in text.split(self._separator) if piece]
        return tuple(item for piece in pieces for item in self.of_value(piece))

    def of_value(self, value: bytes) -> Items:
        """Return the items of a value."""
        return NOTHING if value == self._padding else self._item(xxh3(value, self._seed))

    def of_sign(self, sign: int) -> Items:
        """Return the items of a sign in slot text."""
        if sign == self._padding_sign:
            return NOTHING
        return self._item(xxh3(sign.to_bytes(8, "little"), self._seed) if self._separate else sign)

    def of_bucket(self, bucket: int) -> Items:
        """Return the items of the bucket of a dense value."""
        return self._item(xxh3(bucket.to_bytes(8, "little", signed=True), self._seed))

    def _item(self, sign: int) -> Items:
        if self._modulo is not None:
            sign %= self._modulo
        return (sign,) if self.sequence is None else ((self, sign),)


class DenseSigns:
    """Checks the numbers of a dense column, and computes signs if it has buckets."""

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
        """Distinct values whose bucket depends on the last bit of a logarithm."""

    def of_number(self, value: float | None) -> Items:
        """Return the items of a 32-bit number."""
        normalized = check_finite(self._normalize(check_finite(value)))
        if self._slot is None:
            return NOTHING
        exact = normalized * self._steps
        bucket = min(max(math.floor(f32(exact)), -(2**63)), 2**63 - 1)
        if self._kind == "log" and exact:
            self.num_edges += math.floor(exact * (1 - _LAST_BIT)) != math.floor(exact * (1 + _LAST_BIT))
        return self._slot.of_bucket(bucket)

    def items_from(self, read: Callable[[bytes], float | None]) -> Callable[[bytes], Items]:
        """Return a function that computes the items of a text, which `read` turns into a number."""
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
    """The slots, dense columns and labels of a job."""

    def __init__(self, data: Data) -> None:
        self.slots = [SlotSigns(slot, data) for slot in data.slots]
        buckets = {
            slot.buckets.dense: (SlotSigns(slot, data), slot.buckets.steps)
            for slot in data.inputs
            if isinstance(slot, BucketSlot)
        }
        self.dense = [DenseSigns(column, buckets) for column in data.dense]
        self.labels = list(data.labels)
        # A slot is found by its name or its column; the column has precedence.
        self.by_name = {slot.name.encode(): slot for slot in self.slots}
        self.by_name |= {slot.column.encode(): slot for slot in self.slots}
        self.has_sequence = any(slot.sequence is not None for slot in self.slots)

    def signs_of(self, items: list[Item]) -> list[int]:
        """Return the signs of the items of a sample; a sequence keeps only its last signs."""
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
