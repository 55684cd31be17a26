"""CSV: a line to a sample, fields quoted as in RFC 4180 but within one line."""

import re
from collections.abc import Callable

from elasticrec.audit.lines import Sample
from elasticrec.audit.numbers import BadRecordError, OddError, label_of, seconds_of, trimmed_f32_of, weight
from elasticrec.audit.signs import NOTHING, Features, Item, Items, Known
from elasticrec.config.columns import Columns


class Csv:
    """Fields in the order of `columns.names`."""

    def __init__(self, features: Features, columns: Columns) -> None:
        self._features = features
        self._names = [name.encode() for name in columns.names]
        self._header = columns.header
        self._delimiter = columns.delimiter.encode()
        self._nulls = {b"", *(text.encode() for text in columns.null)}
        other = rb"[^%s]" % re.escape(self._delimiter)
        # quoted with whatever stands behind it, quoted up to the end, plain
        self._quoted = re.compile(rb'"((?:[^"]|"")*)"(?!")(%s*)|"((?:[^"]|"")*)$|(%s*)' % (other, other))
        self._columns: list[tuple[int, Known]] = []
        for slot in features.slots:
            self._use(slot.column, slot.of_text)
        for column in features.dense:
            self._use(column.column, self._number(column.reading(trimmed_f32_of)))
        for label in features.labels[1:]:
            self._use(label, self._label)
        if columns.weight is not None:
            self._use(columns.weight, self._weight)
        self._time = self._place(columns.time) if columns.time is not None else None
        if columns.time is not None:
            self._use(columns.time, self._moment)
        self._click = self._place(features.labels[0])

    def is_record(self, line: bytes) -> bool:
        """All but blank lines and headers; a row of tabs is bad, not blank."""
        if not line.strip(b" \t"):
            return b"\t" in line
        if not self._header or not line.removeprefix(b'"').startswith(self._names[0]):
            return True
        try:
            return self._split(line) != self._names
        except BadRecordError:
            return True

    def time_of(self, line: bytes) -> float | None:
        """When a line was logged."""
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
        """The sample of a line."""
        fields = self._split(line)
        if len(fields) != len(self._names):
            raise BadRecordError
        label = fields[self._click]
        if label in self._nulls:
            raise BadRecordError
        click = int(label_of(label) >= 0.5)
        items: list[Item] = []
        for at, known in self._columns:
            items += known[fields[at]]
        return 1, click, items

    def _place(self, column: str) -> int:
        return self._names.index(column.encode())

    def _use(self, column: str, find: Callable[[bytes], Items]) -> None:
        self._columns.append((self._place(column), Known(find)))

    def _number(self, read: Callable[[bytes], Items]) -> Callable[[bytes], Items]:
        return lambda text: NOTHING if text in self._nulls else read(text)

    def _label(self, text: bytes) -> Items:
        if text in self._nulls:
            raise BadRecordError
        label_of(text)
        return NOTHING

    def _weight(self, text: bytes) -> Items:
        weight(trimmed_f32_of(text))
        return NOTHING

    def _moment(self, text: bytes) -> Items:
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
            assert match is not None, "the last alternative takes anything"
            quoted, rest, unclosed, plain = match.groups()
            if plain is not None:
                fields.append(plain)
            else:
                fields.append((quoted if quoted is not None else unclosed).replace(b'""', b'"') + (rest or b""))
            at = match.end() + 1
            if at > len(line):
                return fields
