"""Chunks of raw values from lines with named values: JSON lines, and the lines of a custom reader."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticrec.config.columns import DenseColumn, Slot
from elasticrec.data.convert.input_data import InputData
from elasticrec.data.convert.rows import CHUNK_ROWS, BadRecords, Chunk, Schema, split_text
from elasticrec.data.convert.values import categories_of, label_of, number_of
from elasticrec.data.init.detect_typed import flatten
from elasticrec.data.raw_lines import any_parser, record_batches, some_lines
from elasticrec.data.reader import Reader
from elasticrec.errors import SampleError
from elasticrec.user_code import error_line, load_class, locate_errors


class _ObjectRows(ABC):
    """Reads lines that are parsed into values by name."""

    def __init__(self, data: InputData, schema: Schema) -> None:
        self.schema = schema
        self.bad = BadRecords()
        self._inspect(data.files[0])

    @abstractmethod
    def _parse(self, line: str) -> dict[str, Any] | None:
        """Return the values of a line by name, or None to skip it."""

    def _inspect(self, path: Path) -> None:
        """Infer from some lines which slots have lists of values, and whether samples have a weight."""
        rows = []
        for line in some_lines(path, 1000, 2**20):
            try:
                rows.append(self._parse(line.decode()) or {})
            except (ValueError, SampleError):
                continue
        names = {slot.name for slot in self.schema.slots}
        self.schema.lists |= {name for row in rows for name in names if isinstance(row.get(name), list | tuple)}
        if any(row.get("weight") is not None for row in rows):
            self.schema.weight = "weight"

    def read(self, path: Path) -> Iterator[Chunk]:
        """Yield the samples of a file."""
        for batch in record_batches(path, any_parser(), batch_size=CHUNK_ROWS):
            chunk: Chunk = {name: [] for name in self.schema.columns()}
            bad, num_records = [], 0
            for index in range(len(batch)):
                try:
                    row = self._parse(batch[index].decode("utf-8"))
                    if row is None:
                        continue
                    values = self._check(row)
                except (ValueError, AttributeError, SampleError) as error:
                    bad.append(f"{batch.location_of(index)}: {error}")
                else:
                    for name, column in chunk.items():
                        column.append(values[name])
                num_records += 1
            self.bad.add(num_records, bad)
            yield chunk

    def _check(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the values of a sample in the types of chunks."""
        schema = self.schema
        if schema.weight is None and row.get("weight") is not None:
            raise SampleError("weight: expected none as in the first samples, got one")
        values: dict[str, Any] = {}
        for slot in schema.slots:
            values[slot.name] = categories_of(slot.name, row.get(slot.name), slot.name in schema.lists)
        for column in schema.dense:
            values[column.name] = number_of("dense", column.name, row.get(column.name))
        for label in schema.labels:
            values[label] = label_of(label, row.get(label))
        if schema.weight is not None:
            weight = number_of("weight", schema.weight, row.get(schema.weight, 1))
            values[schema.weight] = 1.0 if weight is None else weight
        return values


class JsonRows(_ObjectRows):
    """Reads JSON lines that detection has described."""

    def __init__(self, data: InputData) -> None:
        detection = data.detection
        assert detection is not None
        roles = detection.roles
        self._paths = detection.paths
        self._plain = [*detection.labels, *([roles.weight] if roles.weight else [])]
        schema = Schema(
            detection.labels,
            [Slot(name=slot.name, pooling="sum") for slot in roles.slots],
            [DenseColumn(name=column.name, normalize="log") for column in roles.dense],
            weight=roles.weight,
            lists={slot.name for slot in roles.slots if slot.note},
        )
        super().__init__(data, schema)

    def _parse(self, line: str) -> dict[str, Any]:
        row = dict(flatten(json.loads(line)))
        values = {name: row.get(path) for name, (path, _) in self._paths.items()}
        for name, (_, separator) in self._paths.items():
            text = values[name]
            if separator is not None and isinstance(text, str):
                values[name] = split_text(text, separator)
        return values | {name: row.get(name) for name in self._plain}


class ReaderRows(_ObjectRows):
    """Reads lines with a custom reader."""

    def __init__(self, data: InputData, spec: str) -> None:
        self._path = Path(spec.rpartition(":")[0])
        reader_class = load_class(spec)
        with locate_errors(self._path):
            self._reader: Reader = reader_class()
        super().__init__(data, Schema.of(data.job))

    def _parse(self, line: str) -> dict[str, Any] | None:
        try:
            sample = self._reader.parse(line)
        except Exception as error:
            raise SampleError(error_line(error, self._path)) from None
        return None if sample is None else dict(sample)
