"""Chunks of raw values to files of a format: what conversions write."""

import csv
import io
import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, date, datetime
from pathlib import Path
from typing import IO, Any, Protocol

from elasticrec.config.columns import DenseColumn, Slot
from elasticrec.config.fields import show
from elasticrec.data.output import open_text
from elasticrec.data.rows import Chunk, Table, column_of
from elasticrec.errors import ConfigError, SampleError

_LINE_END = re.compile(r"[\r\n]")
_SPACE = re.compile(r"\s")


class Target(Protocol):
    """A file that is being written."""

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""


class CsvTarget:
    """CSV with a header; lists have a separator between their values."""

    def __init__(self, path: Path, named: Path, table: Table, separator: str, stack: ExitStack) -> None:
        self._table = table
        self._separator = separator
        self._file: IO[bytes] = stack.enter_context(open_text(path, named))
        self._delimiter = delimiter_of(named)
        nested = {name for name, kind in table.types.items() if "list" in str(kind) or "struct" in str(kind)}
        self._names = [name for name in table.columns() if name not in nested]
        self._put([self._names])

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""
        columns = []
        for name in self._names:
            is_list = name in self._table.lists
            columns.append([self._joined(name, values) if is_list else _text(values) for values in chunk[name]])
            if _LINE_END.search("".join(columns[-1])):
                culprit = next(value for value in columns[-1] if _LINE_END.search(value))
                raise SampleError(f"value {show(culprit)}: expected no line end in it, a sample is one line")
        self._put(zip(*columns, strict=True))

    def _joined(self, name: str, values: Sequence[str] | None) -> str:
        for value in values or ():
            if self._separator in value:
                raise SampleError(
                    f"slot `{name}`: value {show(value)} has the separator {show(self._separator)} in it; "
                    "give another one with --separator"
                )
        return self._separator.join(values or ())

    def _put(self, rows: Any) -> None:
        out = io.StringIO()
        csv.writer(out, delimiter=self._delimiter, lineterminator="\n").writerows(rows)
        self._file.write(out.getvalue().encode("utf-8", "surrogateescape"))


def delimiter_of(named: Path) -> str:
    """Tabs for `.tsv`, commas for all else."""
    return "\t" if ".tsv" in named.suffixes else ","


def _text(value: Any) -> str:
    if type(value) is str:
        return value
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return str(value)


class ParquetTarget:
    """Parquet: lists as lists, numbers as doubles, times as timestamps."""

    def __init__(self, path: Path, table: Table, stack: ExitStack) -> None:
        self._path = path
        self._table = table
        self._stack = stack
        self._writer: Any = None

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            self._schema = self._schema_of(chunk)
            self._writer = self._stack.enter_context(pq.ParquetWriter(self._path, self._schema))
        table = self._table
        numbers = {*table.labels, *(column_of(column) for column in table.dense), table.weight}
        arrays = []
        for field in self._schema:
            values: list[Any] = chunk[field.name]
            if field.name in numbers:
                values = [None if value is None else _float(value) for value in values]
            elif field.name == table.time:
                values = [_time(value) for value in values]
            try:
                arrays.append(pa.array(values, field.type))
            except UnicodeEncodeError:
                raise SampleError(f"column `{field.name}`: expected UTF-8 text, as Parquet has no other") from None
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))

    def _schema_of(self, chunk: Chunk) -> Any:
        import pyarrow as pa

        table = self._table
        slots = {column_of(slot) for slot in table.slots}
        types: dict[str, Any] = {}
        for name in table.columns():
            if name in slots:
                types[name] = pa.list_(pa.string()) if name in table.lists else pa.string()
            elif name == table.time:
                is_stamp = any(isinstance(_time(value), datetime) for value in chunk[name])
                types[name] = pa.timestamp("us", tz="UTC") if is_stamp else pa.float64()
            else:
                types[name] = table.types.get(name, pa.string()) if name in table.others else pa.float64()
        return pa.schema(types)


def _float(value: Any) -> float:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return float(value.lower() == "true")
    return float(value)


def _time(value: Any) -> Any:
    """A time as a number of seconds, or as a date and time in UTC."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            value = datetime.fromisoformat(value)
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=UTC)
    return value


class PaddleRecTarget:
    """PaddleRec text `click:0 dense:0.05 … slot:value …`."""

    def __init__(self, path: Path, named: Path, table: Table, stack: ExitStack) -> None:
        self._table = table
        self._file: IO[bytes] = stack.enter_context(open_text(path, named))
        self._families = families_of(table.dense)

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""
        table = self._table
        if table.weight is not None and any(float(weight) != 1 for weight in chunk[table.weight]):
            raise SampleError(f"`{table.weight}`: format `paddlerec` has no weights, expected 1 for each sample")
        # by column all fields of it, each with a space before it
        columns: list[Any] = [[f" {label}:{_text(value)}" for value in chunk[label]] for label in table.labels]
        for name, members in self._families.items():
            rows = zip(*(chunk[column] for column in members), strict=True)
            columns.append([_dense_fields(name, list(values)) for values in rows])
        columns += [
            _slot_fields(slot.name, chunk[column_of(slot)], column_of(slot) in table.lists) for slot in table.slots
        ]
        lines = "\n".join("".join(fields)[1:] for fields in zip(*columns, strict=True))
        self._file.write(f"{lines}\n".encode("utf-8", "surrogateescape") if lines else b"")


def _dense_fields(name: str, values: list[Any]) -> str:
    while values and values[-1] is None:
        values.pop()
    # those between others have a place to fill; 0 is what a missing one reads as
    return "".join([f" {name}:{'0' if value is None else _text(value)}" for value in values])


def _slot_fields(name: str, column: list[Any], is_list: bool) -> list[str]:
    values = (
        [value for row in column for value in row or ()]
        if is_list
        else [value for value in column if value is not None]
    )
    if "" in values or _SPACE.search("".join(values)):
        culprit = next(value for value in values if not value or _SPACE.search(value))
        raise SampleError(f"slot `{name}`: value {show(culprit)}: format `paddlerec` has no spaces in values")
    if is_list:
        return ["".join([f" {name}:{value}" for value in row or ()]) for row in column]
    return ["" if value is None else f" {name}:{value}" for value in column]


def families_of(dense: Sequence[DenseColumn]) -> dict[str, list[str]]:
    """The columns of each dense name: `d.0`, `d.1` and so on are the values of one name that repeats."""
    families: dict[str, list[str]] = {}
    for column in dense:
        name, _, place = column.name.rpartition(".")
        if name and not (place.isdecimal() and int(place) == len(families.get(name, ()))):
            raise ConfigError(
                f"dense column `{column.name}`: expected a name without a point, or `{name}.0`, `{name}.1` … in order"
            )
        # where another value stands behind it a missing one is written as 0, which is something else to these two
        odd = "minmax" if column.normalize == "minmax" else "buckets" if column.buckets else None
        if name and odd:
            raise ConfigError(f"dense column `{column.name}`: `{odd}` of a missing value has no place in `paddlerec`")
        families.setdefault(name or column.name, []).append(column_of(column))
    return families


class JsonTarget:
    """JSON lines: values by the names of the job; what is missing is left out."""

    def __init__(self, path: Path, named: Path, table: Table, stack: ExitStack) -> None:
        self._table = table
        self._file: IO[bytes] = stack.enter_context(open_text(path, named))

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""
        table = self._table
        columns: dict[str, list[Any]] = {name: list(map(_float, chunk[name])) for name in table.labels}
        if table.weight is not None:
            columns["weight"] = list(map(_float, chunk[table.weight]))
        for slot in table.slots:
            columns[slot.name] = chunk[column_of(slot)]
        for column in table.dense:
            columns[column.name] = [None if value is None else float(value) for value in chunk[column_of(column)]]
        if table.time is not None:
            columns.setdefault(table.time, list(map(_time, chunk[table.time])))
        for name in table.others:
            columns.setdefault(name, chunk[name])
        names = list(columns)
        lines = []
        for row in zip(*columns.values(), strict=True):
            sample = {name: value for name, value in zip(names, row, strict=True) if value is not None and value != []}
            lines.append(json.dumps(sample, ensure_ascii=False, default=_text) + "\n")
        self._file.write("".join(lines).encode("utf-8", "surrogateescape"))


def slot_item(slot: Slot, default_pooling: str, **more: Any) -> Any:
    """A slot as it stands in a job."""
    keys = {"share": slot.share, "sequence": slot.sequence, **more}
    keys["pooling"] = None if slot.pooling == default_pooling else slot.pooling
    given = {key: value for key, value in keys.items() if value is not None}
    return {"name": slot.name, **given} if given else slot.name


def dense_item(column: DenseColumn, default: str) -> Any:
    """A dense column as it stands in a job."""
    keys: dict[str, Any] = {
        "column": column.column,
        "min": column.min,
        "max": column.max,
        "buckets": column.buckets or None,
    }
    keys["normalize"] = None if column.normalize == default else column.normalize
    given = {key: value for key, value in keys.items() if value is not None}
    return {"name": column.name, **given} if given else column.name
