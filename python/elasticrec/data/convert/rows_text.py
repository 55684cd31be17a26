"""Chunks of raw values from lines: slot text, PaddleRec text, Criteo rows and CSV."""

import csv
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticrec.config.columns import Slot
from elasticrec.config.data import CRITEO_DENSE, CRITEO_SLOTS
from elasticrec.data.convert.input_data import InputData
from elasticrec.data.convert.rows import CHUNK_ROWS, BadRecords, Chunk, Schema, column_of, split_text
from elasticrec.data.raw_lines import lines_of, record_batches


class _LineRows(ABC):
    """Reads a text format: the lines that the parser accepts."""

    def __init__(self, data: InputData) -> None:
        self.schema = Schema.of(data.job)
        self.bad = BadRecords()
        self._job = data.job
        self._parser = data.line_parser()

    def read(self, path: Path) -> Iterator[Chunk]:
        """Yield the samples of a file."""
        for batch in record_batches(path, self._parser, batch_size=CHUNK_ROWS):
            text, bad = batch.good(self._parser)
            self.bad.add(len(batch), bad)
            # Bytes that are not UTF-8 are preserved.
            yield self._chunk([line.decode("utf-8", "surrogateescape") for line in lines_of(text)])

    @abstractmethod
    def _chunk(self, lines: list[str]) -> Chunk:
        """Return the raw values of lines."""


class CsvRows(_LineRows):
    """Reads CSV."""

    def __init__(self, data: InputData) -> None:
        super().__init__(data)
        columns = data.job.data.columns
        assert columns is not None
        self._columns = columns
        self.schema.weight, self.schema.time = columns.weight, columns.time
        self.schema.lists = {column_of(slot) for slot in self.schema.slots if slot.separator}
        used = set(self.schema.columns())
        self.schema.others = [name for name in columns.names if name not in used]

    def _chunk(self, lines: list[str]) -> Chunk:
        rows = csv.reader(lines, delimiter=self._columns.delimiter)
        chunk = _by_column(list(self._columns.names), list(rows))
        nulls = {"", *self._columns.null}
        for item in self.schema.features():
            name = column_of(item)
            chunk[name] = [None if value in nulls else value for value in chunk[name]]
            if isinstance(item, Slot) and item.separator:
                separator = item.separator
                chunk[name] = [None if value is None else split_text(value, separator) for value in chunk[name]]
        return chunk


class CriteoRows(_LineRows):
    """Reads Criteo rows."""

    def _chunk(self, lines: list[str]) -> Chunk:
        names = [self._job.data.labels[0], *CRITEO_DENSE, *CRITEO_SLOTS]
        chunk = _by_column(names, [line.split("\t") for line in lines])
        return {name: [value or None for value in chunk[name]] for name in self.schema.columns()}


class _FieldRows(_LineRows):
    """Reads lines of `name:value` or `value:name` fields, in which slots have lists of values."""

    def __init__(self, data: InputData) -> None:
        super().__init__(data)
        self.schema.lists = {column_of(slot) for slot in self.schema.slots}
        # Lines may refer to a slot by its name or by its column.
        self._slots = {name: column_of(slot) for slot in self.schema.slots for name in (slot.name, column_of(slot))}

    def _chunk(self, lines: list[str]) -> Chunk:
        chunk: Chunk = {name: [] for name in self.schema.columns()}
        for line in lines:
            row = self._row(line)
            for name, values in chunk.items():
                values.append(row.get(name))
        return chunk

    @abstractmethod
    def _row(self, line: str) -> dict[str, Any]:
        """Return the raw values of a line by column."""


class PaddleRecRows(_FieldRows):
    """Reads PaddleRec text."""

    def __init__(self, data: InputData) -> None:
        super().__init__(data)
        self._dense: dict[str, list[str]] = {}
        for column in self.schema.dense:
            name = column.name.rpartition(".")[0] or column.name
            self._dense.setdefault(name, []).append(column_of(column))

    def _row(self, line: str) -> dict[str, Any]:
        row: dict[str, Any] = {name: [] for name in self.schema.lists}
        num_seen = dict.fromkeys(self._dense, 0)
        for name, _, value in (part.partition(":") for part in line.split()):
            if name in self._slots:
                row[self._slots[name]].append(value)
            elif name in self._dense:
                row[self._dense[name][num_seen[name]]] = value
                num_seen[name] += 1
            else:
                row[name] = value
        return row


class SlotTextRows(_FieldRows):
    """Reads slot text, with its shows as the weight."""

    def __init__(self, data: InputData) -> None:
        super().__init__(data)
        self.schema.weight = "show"

    def _row(self, line: str) -> dict[str, Any]:
        first, *more = self.schema.labels
        show, click, *parts = line.split()
        row: dict[str, Any] = {name: [] for name in self.schema.lists}
        row |= {"show": int(show), first: int(click) / int(show)}
        for part in parts:
            sign, colon, name = part.rpartition(":")
            if colon and name in self._slots:
                # The parser ignores leading zeros.
                row[self._slots[name]].append(str(int(sign)) if sign[0] == "0" else sign)
            elif not colon and (label := part.partition("="))[0] in more:
                row[label[0]] = int(label[2]) / int(show)
        return row


def _by_column(names: list[str], rows: list[list[str]]) -> Chunk:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return {name: list(values) for name, values in zip(names, columns, strict=True)}
