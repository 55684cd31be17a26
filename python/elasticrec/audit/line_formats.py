"""Lines of slot text, PaddleRec text and Criteo rows to samples."""

from array import array
from collections import Counter
from typing import Protocol

import numpy as np

from elasticrec.audit.counts import Counts
from elasticrec.audit.signs import NOTHING, Features, Item, ItemCache, Items
from elasticrec.audit.values import BadRecordError, f32_of, label_of, trimmed_f32_of

# Show, click, and the items of all values.
Sample = tuple[int, int, list[Item]]

_TABS = bytes.maketrans(b"\t", b" ")
_CRITEO_FIELDS = 40


class LineFormat(Protocol):
    """A format of lines."""

    def is_record(self, line: bytes) -> bool:
        """Return whether a line is a record."""

    def time_of(self, line: bytes) -> float | None:
        """Return the time of a line, or None."""

    def parse(self, line: bytes) -> Sample | None:
        """Return the sample of a line, or None if it is skipped; raise `BadRecordError` if it is bad."""


class PlainLines:
    """Base of the formats without columns."""

    def is_record(self, line: bytes) -> bool:
        """Return whether a line is not blank."""
        return bool(line.strip(b" \t"))

    def time_of(self, line: bytes) -> float | None:
        """Return None: these formats have no time."""
        return None


def _fields(line: bytes) -> list[bytes]:
    return [field for field in line.translate(_TABS).split(b" ") if field]


def _u64(text: bytes) -> int:
    if not (text.isdigit() and len(text) <= 20 and (number := int(text)) < 2**64):
        raise BadRecordError
    return number


class SlotTextFormat(PlainLines):
    """Lines `show click [label=count …] sign:slot …`."""

    def __init__(self, features: Features) -> None:
        self._features = features
        self._cache = ItemCache(self._token)
        self._more = {label.encode() for label in features.labels[1:]}

    def parse(self, line: bytes) -> Sample:
        """Return the sample of a line."""
        fields = _fields(line)
        if len(fields) < 2:
            raise BadRecordError
        show, click = _u64(fields[0]), _u64(fields[1])
        if not 1 <= show < 2**32 or click > show:
            raise BadRecordError
        items: list[Item] = []
        cache, num_labels = self._cache, 1
        for field in fields[2:]:
            if b":" in field:
                items += cache[field]
            else:
                num_labels += self._label(field, show)
        if num_labels != len(self._features.labels):
            raise BadRecordError
        return show, click, items

    def count(self, lines: list[bytes]) -> Counts | None:
        """Count many lines together, much faster than with `parse`; return None if `parse` must decide.

        Tokens of lines with equal show and click are counted as texts and parsed once.
        """
        if self._more or self._features.has_sequence:
            return None
        tails: dict[tuple[bytes, bytes], list[bytes]] = {}
        for line in lines:
            show, _, rest = line.partition(b" ")
            click, _, tail = rest.partition(b" ")
            tails.setdefault((show, click), []).append(tail)
        signs, shows, clicks = array("Q"), array("q"), array("q")
        try:
            for (show, click), some in tails.items():
                if not (show.isdigit() and click.isdigit()):
                    return None
                # Check show and click by parsing a line without signs.
                self.parse(show + b" " + click)
                tokens = Counter(b" ".join(some).translate(_TABS).split(b" "))
                tokens.pop(b"", None)
                for token, number in tokens.items():
                    for sign in self._cache[token] if b":" in token else self._refuse():
                        signs.append(sign)
                        shows.append(int(show) * number)
                        clicks.append(int(click) * number)
        except (BadRecordError, OverflowError):
            return None
        return Counts.of(np.array(signs, np.uint64), np.array(shows, np.int64), np.array(clicks, np.int64))

    @staticmethod
    def _refuse() -> Items:
        raise BadRecordError

    def _token(self, field: bytes) -> Items:
        sign, _, name = field.rpartition(b":")
        number = _u64(sign)
        if not name:
            raise BadRecordError
        slot = self._features.by_name.get(name)
        return NOTHING if slot is None else slot.of_sign(number)

    def _label(self, field: bytes, show: int) -> bool:
        name, equals, count = field.partition(b"=")
        if not equals:
            raise BadRecordError
        if name not in self._more:
            return False
        if _u64(count) > show:
            raise BadRecordError
        return True


class PaddleRecFormat(PlainLines):
    """Lines `name:value …`."""

    def __init__(self, features: Features) -> None:
        self._features = features
        self._cache = ItemCache(self._token)
        self._labels = {label.encode(): at for at, label in enumerate(features.labels)}
        self._dense: dict[bytes, list[ItemCache]] = {}
        for column in features.dense:
            base, dot, _ = column.name.rpartition(".")
            numbers = ItemCache(column.items_from(trimmed_f32_of))
            self._dense.setdefault((base if dot else column.name).encode(), []).append(numbers)

    def parse(self, line: bytes) -> Sample:
        """Return the sample of a line."""
        items: list[Item] = []
        last_index: dict[bytes, int] = {}
        num_labels = click = 0
        for field in _fields(line):
            name, _, value = field.partition(b":")
            if name in self._features.by_name:
                items += self._cache[field]
            elif not value:
                raise BadRecordError
            elif name in self._labels:
                label = label_of(value)
                num_labels += 1
                click = int(label >= 0.5) if self._labels[name] == 0 else click
            elif name in self._dense:
                index = last_index[name] = last_index.get(name, -1) + 1
                if index >= len(self._dense[name]):
                    raise BadRecordError
                items += self._dense[name][index][value]
        if num_labels != len(self._labels):
            raise BadRecordError
        return 1, click, items

    def _token(self, field: bytes) -> Items:
        name, _, value = field.partition(b":")
        if not value:
            raise BadRecordError
        return self._features.by_name[name].of_value(value)


class CriteoFormat(PlainLines):
    """Rows of a label, 13 numbers and 26 categories, separated by tabs."""

    def __init__(self, features: Features) -> None:
        self._columns: list[tuple[int, ItemCache]] = []
        for column in features.dense:
            self._columns.append((int(column.name[1:]), ItemCache(column.items_from(f32_of))))
        for slot in features.slots:
            self._columns.append((13 + int(slot.name[1:]), ItemCache(slot.of_value)))

    def parse(self, line: bytes) -> Sample:
        """Return the sample of a line."""
        fields = line.split(b"\t")
        if len(fields) != _CRITEO_FIELDS or fields[0] not in (b"0", b"1"):
            raise BadRecordError
        items: list[Item] = []
        for at, cache in self._columns:
            if field := fields[at]:
                items += cache[field]
        return 1, int(fields[0]), items
