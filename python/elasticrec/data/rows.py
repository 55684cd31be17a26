"""Files of any format to chunks of raw values by column, before anything is hashed: what conversions read."""

import csv
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticrec.config import Job
from elasticrec.config.columns import DenseColumn, Slot
from elasticrec.config.data import CRITEO_DENSE, CRITEO_SLOTS
from elasticrec.config.fields import show_names
from elasticrec.data.lines import any_parser, lines_of, record_batches, some_lines
from elasticrec.data.reader import SHOWN_BAD, Reader
from elasticrec.data.source import Source
from elasticrec.errors import ConfigError, SampleError
from elasticrec.user_code import line_of, load_class, told_with_line

CHUNK_ROWS = 8192

# By column one value a row: a text, a number, a list of texts, or None.
Chunk = dict[str, list[Any]]


@dataclass
class Table:
    """What the columns of chunks are."""

    labels: list[str]
    slots: list[Slot]
    dense: list[DenseColumn]
    weight: str | None = None
    time: str | None = None
    lists: set[str] = field(default_factory=set)
    """Columns of slots that have lists of values."""
    others: list[str] = field(default_factory=list)
    """Columns that the job does not use."""
    types: dict[str, Any] = field(default_factory=dict)
    """Arrow types of the others, where they have one."""

    def columns(self) -> list[str]:
        """All columns, each once."""
        names = [*self.labels, *(name for name in (self.weight, self.time) if name)]
        names += [column_of(item) for item in self.features()]
        return list(dict.fromkeys([*names, *self.others]))

    def features(self) -> list[Slot | DenseColumn]:
        """Slots and dense columns."""
        return [*self.slots, *self.dense]

    def check(self, where: str) -> None:
        """Refuse a column that is two things: it can have only one type."""
        names = [column_of(item) for item in self.features()]
        names += [*self.labels, *(name for name in (self.weight, self.time) if name)]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{where}: data.columns: column `{name}` has two uses, a conversion takes one")


def column_of(item: Slot | DenseColumn) -> str:
    """The column that a slot or dense value is read from."""
    return item.column or item.name


@dataclass
class Bad:
    """Records that are no samples: counted, the first few described."""

    num_records: int = 0
    num_bad: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, num_records: int, bad: list[str]) -> None:
        """Count the records of a chunk."""
        self.num_records += num_records
        self.num_bad += len(bad)
        self.shown += bad[: SHOWN_BAD - len(self.shown)]

    def check(self, job: Job) -> None:
        """Refuse data that is bad past the share that the job allows."""
        most = job.data.max_bad_ratio
        if self.num_bad > most * max(self.num_records, 1):
            lines = [f"{self.num_bad:,} of {self.num_records:,} records are bad, data.max_bad_ratio is {most:g}"]
            raise SampleError("\n".join([*lines, *self.shown]))


class RowReader:
    """Reads files of one format as chunks."""

    def __init__(self, source: Source) -> None:
        self.bad = Bad()
        self._job = source.job
        self._make: Callable[[list[str]], Chunk] | None = None
        data = source.job.data
        self.table = Table(list(data.labels), list(data.slots), list(data.dense))
        self._parser = source.line_parser()
        self._lines: Callable[[str], dict[str, Any] | None] | None = None
        if source.is_json:
            self._open_json(source)
        elif data.reader is not None:
            self._open_reader(source, data.reader)
        elif data.format == "parquet":
            self._open_parquet(source)
        elif data.format == "csv":
            self._open_csv()
        else:
            makers = {"slots": self._slot_text, "paddlerec": self._paddlerec, "criteo": self._criteo}
            self._make = makers[data.format]
            self.table.lists = set() if data.format == "criteo" else {column_of(slot) for slot in data.slots}
            if data.format == "slots":
                self.table.weight = "show"
        self.table.check(source.job.source)

    def read(self, path: Path) -> Iterator[Chunk]:
        """The samples of a file."""
        if self._lines is not None:
            yield from self._read_lines(path, self._lines)
        elif self._make is None:
            yield from self._read_parquet(path)
        else:
            for batch in record_batches(path, self._parser, batch_size=CHUNK_ROWS):
                text, bad = batch.good(self._parser)
                self.bad.add(len(batch), bad)
                # bytes that are no UTF-8 go through as they are
                yield self._make([line.decode("utf-8", "surrogateescape") for line in lines_of(text)])

    # CSV

    def _open_csv(self) -> None:
        columns = self._job.data.columns
        assert columns is not None
        self.table.weight, self.table.time = columns.weight, columns.time
        self.table.lists = {column_of(slot) for slot in self.table.slots if slot.separator}
        used = set(self.table.columns())
        self.table.others = [name for name in columns.names if name not in used]
        self._make = self._csv

    def _csv(self, lines: list[str]) -> Chunk:
        columns = self._job.data.columns
        assert columns is not None
        rows = csv.reader(lines, delimiter=columns.delimiter)
        chunk = _columns(list(columns.names), list(rows))
        nulls = {"", *columns.null}
        for item in self.table.features():
            name = column_of(item)
            chunk[name] = [None if value in nulls else value for value in chunk[name]]
            if isinstance(item, Slot) and item.separator:
                separator = item.separator
                chunk[name] = [None if value is None else _pieces(value, separator) for value in chunk[name]]
        return chunk

    # Criteo, PaddleRec, slot text

    def _criteo(self, lines: list[str]) -> Chunk:
        names = [self._job.data.labels[0], *CRITEO_DENSE, *CRITEO_SLOTS]
        chunk = _columns(names, [line.split("\t") for line in lines])
        return {name: [value or None for value in chunk[name]] for name in self.table.columns()}

    def _paddlerec(self, lines: list[str]) -> Chunk:
        chunk: Chunk = {name: [] for name in self.table.columns()}
        slots = {name: column_of(slot) for slot in self.table.slots for name in (slot.name, column_of(slot))}
        families: dict[str, list[str]] = {}
        for column in self.table.dense:
            families.setdefault(column.name.rpartition(".")[0] or column.name, []).append(column_of(column))
        for line in lines:
            row: dict[str, Any] = {name: [] for name in self.table.lists}
            seen = dict.fromkeys(families, 0)
            for name, _, value in (part.partition(":") for part in line.split()):
                if name in slots:
                    row[slots[name]].append(value)
                elif name in families:
                    row[families[name][seen[name]]] = value
                    seen[name] += 1
                else:
                    row[name] = value
            for name, values in chunk.items():
                values.append(row.get(name))
        return chunk

    def _slot_text(self, lines: list[str]) -> Chunk:
        first, *more = self.table.labels
        chunk: Chunk = {name: [] for name in self.table.columns()}
        slots = {name: column_of(slot) for slot in self.table.slots for name in (slot.name, column_of(slot))}
        for line in lines:
            show, click, *parts = line.split()
            row: dict[str, Any] = {name: [] for name in self.table.lists}
            row |= {"show": int(show), first: int(click) / int(show)}
            for part in parts:
                sign, colon, name = part.rpartition(":")
                if colon and name in slots:
                    # as the parser reads it: without leading zeros
                    row[slots[name]].append(str(int(sign)) if sign[0] == "0" else sign)
                elif not colon and (label := part.partition("="))[0] in more:
                    row[label[0]] = int(label[2]) / int(show)
            for name, values in chunk.items():
                values.append(row.get(name))
        return chunk

    # JSON lines, and readers of the user's own

    def _open_json(self, source: Source) -> None:
        from elasticrec.data.sniff_table import flatten

        found = source.found
        assert found is not None
        roles, paths = found.roles, found.paths
        self.table.labels = found.labels
        self.table.slots = [Slot(name=slot.name, pooling="sum") for slot in roles.slots]
        self.table.dense = [DenseColumn(name=column.name, normalize="log") for column in roles.dense]
        self.table.weight = roles.weight
        self.table.lists = {slot.name for slot in roles.slots if slot.note}

        def parse(line: str) -> dict[str, Any]:
            row = dict(flatten(json.loads(line)))
            values = {name: row.get(path) for name, (path, _) in paths.items()}
            for name, (_, separator) in paths.items():
                text = values[name]
                if separator is not None and isinstance(text, str):
                    values[name] = _pieces(text, separator)
            return values | {name: row.get(name) for name in (*found.labels, *([roles.weight] if roles.weight else []))}

        self._set_lines(source, parse)

    def _open_reader(self, source: Source, spec: str) -> None:
        path = Path(spec.rpartition(":")[0])
        made = load_class(spec)
        with told_with_line(path):
            reader: Reader = made()

        def parse(line: str) -> dict[str, Any] | None:
            try:
                sample = reader.parse(line)
            except Exception as error:
                raise SampleError(line_of(error, path)) from None
            return None if sample is None else dict(sample)

        self._set_lines(source, parse)

    def _set_lines(self, source: Source, parse: Callable[[str], dict[str, Any] | None]) -> None:
        """Find out, from some lines, which slots have lists and whether samples have a weight."""
        self._lines = parse
        rows = []
        for line in some_lines(source.files[0], 1000, 2**20):
            try:
                rows.append(parse(line.decode()) or {})
            except (ValueError, SampleError):
                continue
        names = {slot.name for slot in self.table.slots}
        self.table.lists |= {name for row in rows for name in names if isinstance(row.get(name), list | tuple)}
        if any(row.get("weight") is not None for row in rows):
            self.table.weight = "weight"

    def _read_lines(self, path: Path, parse: Callable[[str], dict[str, Any] | None]) -> Iterator[Chunk]:
        for batch in record_batches(path, any_parser(), batch_size=CHUNK_ROWS):
            chunk: Chunk = {name: [] for name in self.table.columns()}
            bad, num_records = [], 0
            for index in range(len(batch)):
                try:
                    row = parse(batch[index].decode("utf-8"))
                    if row is None:
                        continue
                    values = self._checked(row)
                except (ValueError, AttributeError, SampleError) as error:
                    bad.append(f"{batch.place(index)}: {error}")
                else:
                    for name, column in chunk.items():
                        column.append(values[name])
                num_records += 1
            self.bad.add(num_records, bad)
            yield chunk

    def _checked(self, row: dict[str, Any]) -> dict[str, Any]:
        """The values of a sample in the types of chunks."""
        table = self.table
        if table.weight is None and row.get("weight") is not None:
            raise SampleError("weight: expected none as in the first samples, got one")
        values: dict[str, Any] = {}
        for slot in table.slots:
            values[slot.name] = _categories(slot.name, row.get(slot.name), slot.name in table.lists)
        for column in table.dense:
            values[column.name] = _number("dense", column.name, row.get(column.name))
        for label in table.labels:
            values[label] = _label(label, row.get(label))
        if table.weight is not None:
            weight = _number("weight", table.weight, row.get(table.weight, 1))
            values[table.weight] = 1.0 if weight is None else weight
        return values

    # Parquet

    def _open_parquet(self, source: Source) -> None:
        import pyarrow as pa

        from elasticrec.data.parquet import open_file

        columns = source.job.data.columns
        assert columns is not None
        self.table.weight, self.table.time = columns.weight, columns.time
        schema = open_file(source.files[0]).schema_arrow
        missing = [name for name in self.table.columns() if name not in schema.names]
        if missing:
            raise SampleError(f"{source.files[0]}: expected a column `{missing[0]}`, got {show_names(schema.names)}")
        for slot in self.table.slots:
            kind = schema.field(column_of(slot)).type
            if slot.separator or pa.types.is_list(kind) or pa.types.is_large_list(kind):
                self.table.lists.add(column_of(slot))
        used = set(self.table.columns())
        self.table.others = [name for name in schema.names if name not in used]
        self.table.types = {name: schema.field(name).type for name in self.table.others}

    def _read_parquet(self, path: Path) -> Iterator[Chunk]:
        from elasticrec.data.parquet import open_file

        first = 0
        for batch in open_file(path).iter_batches(batch_size=CHUNK_ROWS, columns=self.table.columns()):
            bad: dict[int, str] = {}
            chunk = {name: self._parquet_column(name, batch.column(name), bad) for name in self.table.columns()}
            if bad:
                chunk = {name: [v for at, v in enumerate(values) if at not in bad] for name, values in chunk.items()}
            self.bad.add(batch.num_rows, [f"{path}: row {first + at}: {bad[at]}" for at in sorted(bad)])
            first += batch.num_rows
            yield chunk

    def _parquet_column(self, name: str, column: Any, bad: dict[int, str]) -> list[Any]:
        """A column in the types of chunks; rows that are no samples go into `bad`."""
        table, values = self.table, column.to_pylist()
        slot = next((slot for slot in table.slots if column_of(slot) == name), None)
        if slot is not None:
            return self._parquet_slot(slot, values)
        dense = next((item for item in table.dense if column_of(item) == name), None)
        if dense is None and name not in (*table.labels, table.weight):
            return list(values)
        for at, value in enumerate(values):
            # numbers that are fine need no closer look
            if name in table.labels or value is None or not (type(value) is float and -math.inf < value < math.inf):
                try:
                    values[at] = _parquet_number(name, value, table)
                except SampleError as error:
                    bad.setdefault(at, str(error))
            elif name == table.weight and value <= 0:
                bad.setdefault(at, f"weight: expected a number above 0, got {value}")
        return list(values)

    def _parquet_slot(self, slot: Slot, values: list[Any]) -> list[Any]:
        columns = self._job.data.columns
        assert columns is not None
        nulls = {None, "", *columns.null}
        if column_of(slot) not in self.table.lists:
            return [None if value in nulls else _parquet_text(value) for value in values]
        rows = []
        for value in values:
            texts = [
                _parquet_text(item) for item in (value if isinstance(value, list) else [value]) if item not in nulls
            ]
            if slot.separator:
                texts = [piece for text in texts for piece in _pieces(text, slot.separator)]
            rows.append(texts)
        return rows


def _parquet_text(value: Any) -> str:
    return value if type(value) is str else str(value).lower() if isinstance(value, bool) else str(value)


def _parquet_number(name: str, value: Any, table: Table) -> float | None:
    if name in table.labels:
        return _label(name, value)
    number = _number("weight" if name == table.weight else "dense", name, value)
    if name == table.weight and (number is None or number <= 0):
        raise SampleError(f"weight: expected a number above 0, got {'nothing' if number is None else number}")
    return number


def _columns(names: list[str], rows: list[list[str]]) -> Chunk:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
    return {name: list(values) for name, values in zip(names, columns, strict=True)}


def _pieces(text: str, separator: str) -> list[str]:
    return [piece for piece in text.split(separator) if piece]


def _number(kind: str, name: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise SampleError(f"{kind} `{name}`: expected a number, got {value!r}") from None
    if not math.isfinite(number):
        got = "NaN" if math.isnan(number) else number
        raise SampleError(f"{kind} `{name}`: expected a finite number, got {got}")
    return number


def _label(name: str, value: Any) -> float:
    number = _number("label", name, value)
    if number is None or not 0 <= number <= 1:
        raise SampleError(
            f"label `{name}`: expected a number from 0 to 1, got {'nothing' if number is None else number}"
        )
    return number


def _categories(name: str, value: Any, is_list: bool) -> Any:
    """A value of a slot, or several, as texts."""
    if isinstance(value, list | tuple):
        if not is_list:
            raise SampleError(f"slot `{name}`: expected one value as in the first samples, got a list")
        return [_category(name, item) for item in value if item is not None]
    if value is None or value == "":
        return [] if is_list else None
    return [_category(name, value)] if is_list else _category(name, value)


def _category(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise SampleError(f"slot `{name}`: expected a string or a whole number, got {type(value).__name__}")
