"""Chunks of raw values from Parquet files."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from elasticrec.config.columns import Slot
from elasticrec.config.fields import show_names
from elasticrec.data.convert.input_data import InputData
from elasticrec.data.convert.rows import CHUNK_ROWS, BadRecords, Chunk, Schema, column_of, split_text
from elasticrec.data.convert.values import label_of, number_of
from elasticrec.data.parquet import open_file
from elasticrec.errors import SampleError


class ParquetRows:
    """Reads Parquet files."""

    def __init__(self, data: InputData) -> None:
        self.schema = Schema.of(data.job)
        self.bad = BadRecords()
        columns = data.job.data.columns
        assert columns is not None
        self._nulls = {None, "", *columns.null}
        self.schema.weight, self.schema.time = columns.weight, columns.time
        schema = open_file(data.files[0]).schema_arrow
        missing = [name for name in self.schema.columns() if name not in schema.names]
        if missing:
            raise SampleError(f"{data.files[0]}: expected a column `{missing[0]}`, got {show_names(schema.names)}")
        for slot in self.schema.slots:
            kind = schema.field(column_of(slot)).type
            if slot.separator or pa.types.is_list(kind) or pa.types.is_large_list(kind):
                self.schema.lists.add(column_of(slot))
        used = set(self.schema.columns())
        self.schema.others = [name for name in schema.names if name not in used]
        self.schema.types = {name: schema.field(name).type for name in self.schema.others}

    def read(self, path: Path) -> Iterator[Chunk]:
        """Yield the samples of a file."""
        first = 0
        names = self.schema.columns()
        for batch in open_file(path).iter_batches(batch_size=CHUNK_ROWS, columns=names):
            bad: dict[int, str] = {}
            chunk = {name: self._column(name, batch.column(name), bad) for name in names}
            if bad:
                chunk = {name: [v for at, v in enumerate(values) if at not in bad] for name, values in chunk.items()}
            self.bad.add(batch.num_rows, [f"{path}: row {first + at}: {bad[at]}" for at in sorted(bad)])
            first += batch.num_rows
            yield chunk

    def _column(self, name: str, column: Any, bad: dict[int, str]) -> list[Any]:
        """Return a column in the types of chunks; add the errors of bad rows to `bad`."""
        schema, values = self.schema, column.to_pylist()
        slot = next((slot for slot in schema.slots if column_of(slot) == name), None)
        if slot is not None:
            return self._categories(slot, values)
        dense = next((item for item in schema.dense if column_of(item) == name), None)
        if dense is None and name not in (*schema.labels, schema.weight):
            return list(values)
        for at, value in enumerate(values):
            # Finite numbers need no conversion, unless they are labels.
            if name in schema.labels or value is None or not (type(value) is float and -math.inf < value < math.inf):
                try:
                    values[at] = self._number(name, value)
                except SampleError as error:
                    bad.setdefault(at, str(error))
            elif name == schema.weight and value <= 0:
                bad.setdefault(at, f"weight: expected a number above 0, got {value}")
        return list(values)

    def _categories(self, slot: Slot, values: list[Any]) -> list[Any]:
        if column_of(slot) not in self.schema.lists:
            return [None if value in self._nulls else _text(value) for value in values]
        rows = []
        for value in values:
            items = value if isinstance(value, list) else [value]
            texts = [_text(item) for item in items if item not in self._nulls]
            if slot.separator:
                texts = [piece for text in texts for piece in split_text(text, slot.separator)]
            rows.append(texts)
        return rows

    def _number(self, name: str, value: Any) -> float | None:
        if name in self.schema.labels:
            return label_of(name, value)
        number = number_of("weight" if name == self.schema.weight else "dense", name, value)
        if name == self.schema.weight and (number is None or number <= 0):
            raise SampleError(f"weight: expected a number above 0, got {'nothing' if number is None else number}")
        return number


def _text(value: Any) -> str:
    return value if type(value) is str else str(value).lower() if isinstance(value, bool) else str(value)
