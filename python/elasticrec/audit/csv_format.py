"""CSV lines to samples; fields are quoted as in RFC 4180, within one line."""

import re
from collections.abc import Callable

from elasticrec.audit.line_formats import Sample
from elasticrec.audit.signs import NOTHING, Features, Item, ItemCache, Items
from elasticrec.audit.values import BadRecordError, OddError, check_weight, label_of, seconds_of, trimmed_f32_of
from elasticrec.config.columns import Columns


class CsvFormat:
    """CSV lines with the fields of `columns.names`."""

    def __init__(self, features: Features, columns: Columns) -> None:
        self._features = features
        self._names = [name.encode() for name in columns.names]
        self._header = columns.header
        self._delimiter = columns.delimiter.encode()
        self._nulls = {b"", *(text.encode() for text in columns.null)}
        other = rb"[^%s]" % re.escape(self._delimiter)
        # A quoted field with text after it, a quoted field without an end, or a plain field.
        self._quoted = re.compile(rb'"((?:[^"]|"")*)"(?!")(%s*)|"((?:[^"]|"")*)$|(%s*)' % (other, other))
        self._columns: list[tuple[int, ItemCache]] = []
        for slot in features.slots:
            self._use(slot.column, slot.of_text)
        for column in features.dense:
            self._use(column.column, self._number(column.items_from(trimmed_f32_of)))
        for label in features.labels[1:]:
            self._use(label, self._label)
        if columns.weight is not None:
            self._use(columns.weight, self._weight)
        self._time = self._index(columns.time) if columns.time is not None else None
        if columns.time is not None:
            self._use(columns.time, self._check_time)
        self._click = self._index(features.labels[0])

    def is_record(self, line: bytes) -> bool:
        """Return whether a line is a record: not blank and not a header; a line of tabs is a bad record."""
        if not line.strip(b" \t"):
            return b"\t" in line
        if not self._header or not line.removeprefix(b'"').startswith(self._names[0]):
            return True
        try:
            return self._split(line) != self._names
        except BadRecordError:
            return True

    def time_of(self, line: bytes) -> float | None:
        """Return the time of a line, or None."""
        if self._time is None:
            return None
        try:
            fields = self._split(line)
        except OddError:
            raise
        except BadRecordError:
            return None
        return seconds_of(fields[self._time]) if self._time < len(fields) else None

    def parse(self, line: bytes) -> Sample:
        """Return the sample of a line."""
        fields = self._split(line)
        if len(fields) != len(self._names):
            raise BadRecordError
        label = fields[self._click]
        if label in self._nulls:
            raise BadRecordError
        click = int(label_of(label) >= 0.5)
        items: list[Item] = []
        for at, cache in self._columns:
            items += cache[fields[at]]
        return 1, click, items

    def _index(self, column: str) -> int:
        return self._names.index(column.encode())

    def _use(self, column: str, find: Callable[[bytes], Items]) -> None:
        self._columns.append((self._index(column), ItemCache(find)))

    def _number(self, read: Callable[[bytes], Items]) -> Callable[[bytes], Items]:
        return lambda text: NOTHING if text in self._nulls else read(text)

    def _label(self, text: bytes) -> Items:
        if text in self._nulls:
            raise BadRecordError
        label_of(text)
        return NOTHING

    def _weight(self, text: bytes) -> Items:
        check_weight(trimmed_f32_of(text))
        return NOTHING

    def _check_time(self, text: bytes) -> Items:
        if seconds_of(text) is None:
            raise BadRecordError
        return NOTHING

    def _split(self, line: bytes) -> list[bytes]:
        if b'"' not in line:
            return line.split(self._delimiter)
        if line.count(b'"') % 2:
            raise BadRecordError
        if b"\r" in line:
            raise OddError("a quoted line with a carriage return in it")
        fields, at = [], 0
        while True:
            match = self._quoted.match(line, at)
            assert match is not None, "the last alternative matches anything"
            quoted, rest, unclosed, plain = match.groups()
            if plain is not None:
                fields.append(plain)
            else:
                fields.append((quoted if quoted is not None else unclosed).replace(b'""', b'"') + (rest or b""))
            at = match.end() + 1
            if at > len(line):
                return fields
