"""Files of each format, written from chunks of raw values."""

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
from elasticrec.data.convert.output import open_text
from elasticrec.data.convert.rows import Chunk, Schema, column_of
from elasticrec.errors import ConfigError, SampleError

_LINE_END = re.compile(r"[\r\n]")
_SPACE = re.compile(r"\s")


class Target(Protocol):
    """A new file of samples."""

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""


class CsvTarget:
    """Writes CSV with a header; values of a list are joined by a separator."""

    def __init__(self, path: Path, named: Path, schema: Schema, separator: str, stack: ExitStack) -> None:
        self._schema = schema
        self._separator = separator
        self._file: IO[bytes] = stack.enter_context(open_text(path, named))
        self._delimiter = delimiter_of(named)
        nested = {name for name, kind in schema.types.items() if "list" in str(kind) or "struct" in str(kind)}
        self._names = [name for name in schema.columns() if name not in nested]
        self._put([self._names])

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""
        columns = []
        for name in self._names:
            is_list = name in self._schema.lists
            columns.append([self._join_values(name, values) if is_list else _text(values) for values in chunk[name]])
            if _LINE_END.search("".join(columns[-1])):
                culprit = next(value for value in columns[-1] if _LINE_END.search(value))
                raise SampleError(f"value {show(culprit)}: expected no line end, as a sample is one line")
        self._put(zip(*columns, strict=True))

    def _join_values(self, name: str, values: Sequence[str] | None) -> str:
        for value in values or ():
            if self._separator in value:
                raise SampleError(
                    f"slot `{name}`: value {show(value)} contains the separator {show(self._separator)}; "
                    "choose another separator with --separator"
                )
        return self._separator.join(values or ())

    def _put(self, rows: Any) -> None:
        out = io.StringIO()
        csv.writer(out, delimiter=self._delimiter, lineterminator="\n").writerows(rows)
        self._file.write(out.getvalue().encode("utf-8", "surrogateescape"))


def delimiter_of(named: Path) -> str:
    """Return a tab for `.tsv`, a comma for other names."""
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
    """Writes Parquet: lists as lists, numbers as doubles, times as timestamps."""

    def __init__(self, path: Path, schema: Schema, stack: ExitStack) -> None:
        self._path = path
        self._schema = schema
        self._stack = stack
        self._writer: Any = None

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self._writer is None:
            self._arrow_schema = self._arrow_schema_of(chunk)
            self._writer = self._stack.enter_context(pq.ParquetWriter(self._path, self._arrow_schema))
        schema = self._schema
        numbers = {*schema.labels, *(column_of(column) for column in schema.dense), schema.weight}
        arrays = []
        for field in self._arrow_schema:
            values: list[Any] = chunk[field.name]
            if field.name in numbers:
                values = [None if value is None else _float(value) for value in values]
            elif field.name == schema.time:
                values = [_time(value) for value in values]
            try:
                arrays.append(pa.array(values, field.type))
            except UnicodeEncodeError:
                raise SampleError(f"column `{field.name}`: expected UTF-8 text for Parquet") from None
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._arrow_schema))

    def _arrow_schema_of(self, chunk: Chunk) -> Any:
        import pyarrow as pa

        schema = self._schema
        slots = {column_of(slot) for slot in schema.slots}
        types: dict[str, Any] = {}
        for name in schema.columns():
            if name in slots:
                types[name] = pa.list_(pa.string()) if name in schema.lists else pa.string()
            elif name == schema.time:
                is_stamp = any(isinstance(_time(value), datetime) for value in chunk[name])
                types[name] = pa.timestamp("us", tz="UTC") if is_stamp else pa.float64()
            else:
                types[name] = schema.types.get(name, pa.string()) if name in schema.others else pa.float64()
        return pa.schema(types)


def _float(value: Any) -> float:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return float(value.lower() == "true")
    return float(value)


def _time(value: Any) -> Any:
    """Return a time as a number of seconds, or as a date and time in UTC."""
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
    """Writes PaddleRec text `click:0 dense:0.05 … slot:value …`."""

    def __init__(self, path: Path, named: Path, schema: Schema, stack: ExitStack) -> None:
        self._schema = schema
        self._file: IO[bytes] = stack.enter_context(open_text(path, named))
        self._families = families_of(schema.dense)

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""
        schema = self._schema
        if schema.weight is not None and any(float(weight) != 1 for weight in chunk[schema.weight]):
            raise SampleError(f"`{schema.weight}`: format `paddlerec` has no weights, expected 1 for each sample")
        # For each column the fields of all rows, each with a space in front.
        columns: list[Any] = [[f" {label}:{_text(value)}" for value in chunk[label]] for label in schema.labels]
        for name, members in self._families.items():
            rows = zip(*(chunk[column] for column in members), strict=True)
            columns.append([_dense_fields(name, list(values)) for values in rows])
        columns += [
            _slot_fields(slot.name, chunk[column_of(slot)], column_of(slot) in schema.lists) for slot in schema.slots
        ]
        lines = "\n".join("".join(fields)[1:] for fields in zip(*columns, strict=True))
        self._file.write(f"{lines}\n".encode("utf-8", "surrogateescape") if lines else b"")


def _dense_fields(name: str, values: list[Any]) -> str:
    while values and values[-1] is None:
        values.pop()
    # A missing value before another one is written as 0, which is how a missing value is read.
    return "".join([f" {name}:{'0' if value is None else _text(value)}" for value in values])


def _slot_fields(name: str, column: list[Any], is_list: bool) -> list[str]:
    values = (
        [value for row in column for value in row or ()]
        if is_list
        else [value for value in column if value is not None]
    )
    if "" in values or _SPACE.search("".join(values)):
        culprit = next(value for value in values if not value or _SPACE.search(value))
        raise SampleError(f"slot `{name}`: value {show(culprit)}: format `paddlerec` allows no spaces in values")
    if is_list:
        return ["".join([f" {name}:{value}" for value in row or ()]) for row in column]
    return ["" if value is None else f" {name}:{value}" for value in column]


def families_of(dense: Sequence[DenseColumn]) -> dict[str, list[str]]:
    """Return the columns of each dense name: `d.0`, `d.1` and so on are the repeated values of `d`."""
    families: dict[str, list[str]] = {}
    for column in dense:
        name, _, position = column.name.rpartition(".")
        if name and not (position.isdecimal() and int(position) == len(families.get(name, ()))):
            raise ConfigError(
                f"dense column `{column.name}`: expected a name without a dot, or `{name}.0`, `{name}.1` … in order"
            )
        # A missing value before another one is written as 0, which `minmax` and `buckets` treat differently.
        odd = "minmax" if column.normalize == "minmax" else "buckets" if column.buckets else None
        if name and odd:
            raise ConfigError(f"dense column `{column.name}`: `paddlerec` cannot hold a missing value with `{odd}`")
        families.setdefault(name or column.name, []).append(column_of(column))
    return families


class JsonTarget:
    """Writes JSON lines with the names of the job; missing values are left out."""

    def __init__(self, path: Path, named: Path, schema: Schema, stack: ExitStack) -> None:
        self._schema = schema
        self._file: IO[bytes] = stack.enter_context(open_text(path, named))

    def write(self, chunk: Chunk) -> None:
        """Write the samples of a chunk."""
        schema = self._schema
        columns: dict[str, list[Any]] = {name: list(map(_float, chunk[name])) for name in schema.labels}
        if schema.weight is not None:
            columns["weight"] = list(map(_float, chunk[schema.weight]))
        for slot in schema.slots:
            columns[slot.name] = chunk[column_of(slot)]
        for column in schema.dense:
            columns[column.name] = [None if value is None else float(value) for value in chunk[column_of(column)]]
        if schema.time is not None:
            columns.setdefault(schema.time, list(map(_time, chunk[schema.time])))
        for name in schema.others:
            columns.setdefault(name, chunk[name])
        names = list(columns)
        lines = []
        for row in zip(*columns.values(), strict=True):
            sample = {name: value for name, value in zip(names, row, strict=True) if value is not None and value != []}
            lines.append(json.dumps(sample, ensure_ascii=False, default=_text) + "\n")
        self._file.write("".join(lines).encode("utf-8", "surrogateescape"))


def slot_item(slot: Slot, default_pooling: str, **more: Any) -> Any:
    """Return a slot as a job lists it."""
    keys = {"share": slot.share, "sequence": slot.sequence, **more}
    keys["pooling"] = None if slot.pooling == default_pooling else slot.pooling
    given = {key: value for key, value in keys.items() if value is not None}
    return {"name": slot.name, **given} if given else slot.name


def dense_item(column: DenseColumn, default: str) -> Any:
    """Return a dense column as a job lists it."""
    keys: dict[str, Any] = {
        "column": column.column,
        "min": column.min,
        "max": column.max,
        "buckets": column.buckets or None,
    }
    keys["normalize"] = None if column.normalize == default else column.normalize
    given = {key: value for key, value in keys.items() if value is not None}
    return {"name": column.name, **given} if given else column.name
