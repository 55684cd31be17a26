"""Batches of Parquet files: row groups are units, columns go to Rust without a copy."""

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.config.data import Select
from elasticrec.config.fields import show, show_names
from elasticrec.data.units import Unit
from elasticrec.errors import ConfigError, SampleError

# Number of batches to prepare ahead of the trainer.
_AHEAD = 4

# A number, or the beginning of a date.
_TIME = r"^([0-9]+(\.[0-9]+)?|[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:.*)?)$"

_Numbers = tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_] | None]


def warm_up() -> None:
    """Convert an array: the first time, pyarrow imports pandas if installed, which takes longer than reading a file."""
    pa.array(np.zeros(1)).to_numpy()


def group_ranges(path: Path, unit_bytes: int) -> list[tuple[int, int]]:
    """Return ranges of row groups of about `unit_bytes` each."""
    metadata = open_file(path).metadata
    ranges: list[tuple[int, int]] = []
    start = size = 0
    for group in range(metadata.num_row_groups):
        size += metadata.row_group(group).total_byte_size
        if size >= unit_bytes or group + 1 == metadata.num_row_groups:
            ranges.append((start, group + 1))
            start, size = group + 1, 0
    return ranges


def open_file(path: Path | str) -> pq.ParquetFile:
    """Open a Parquet file; raise `SampleError` for any other file."""
    # Errors of the system are clearer than those of pyarrow.
    Path(path).open("rb").close()
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise SampleError(f"{path}: expected a Parquet file: {_first_line(error)}") from None
    names = file.schema_arrow.names
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SampleError(f"{path}: expected each column once, got {show(twice)} twice")
    return file


def some_rows(job: Job, parser: _core.Parser, path: Path, num_rows: int) -> Iterator[_core.Batch]:
    """Yield batches of rows of the first, a middle and the last row group of a file."""
    columns = _ColumnReader(job, parser, labels=True, select=None)
    file = columns.open(str(path))
    num_groups = file.metadata.num_row_groups
    for group in sorted({0, num_groups // 2, num_groups - 1}) if num_groups else []:
        first = _first_row(file, group)
        rows = next(file.iter_batches(num_rows, row_groups=[group], columns=columns.names), None)
        if rows is not None:
            numbers = np.arange(first, first + rows.num_rows, dtype=np.int64)
            yield columns.batch(str(path), (0, group), pa.Table.from_batches([rows]), numbers)


def row_of(job: Job, parser: _core.Parser, path: Path, row: int) -> _core.Batch:
    """Return a row of a file as a batch without labels; rows are counted from 0, as in messages about bad rows."""
    columns = _ColumnReader(job, parser, labels=False, select=None)
    file = columns.open(str(path))
    if row >= file.metadata.num_rows:
        raise SampleError(f"{path}: expected row {row} (counted from 0), got {file.metadata.num_rows} rows")
    group = next(at for at in range(file.metadata.num_row_groups) if row < _first_row(file, at + 1))
    start = row - _first_row(file, group)
    table = columns.read_groups(file, str(path), range(group, group + 1)).slice(start, 1)
    batch = columns.batch(str(path), (0, 0), table, np.array([row], np.int64))
    if batch.bad:
        raise SampleError(batch.bad[0])
    return batch


def _first_row(file: pq.ParquetFile, group: int) -> int:
    """Return the number of the first row of a row group."""
    return sum(file.metadata.row_group(at).num_rows for at in range(group))


class ParquetReader:
    """An iterator over the batches of units, which a thread prepares in advance."""

    def __init__(
        self,
        job: Job,
        parser: _core.Parser,
        units: list[Unit],
        *,
        shuffle: bool,
        skip: int,
        held_out: bool,
        labels: bool,
    ) -> None:
        self._columns = _ColumnReader(job, parser, labels=labels, select=job.data.select(held_out=held_out))
        self._job = job
        self._shuffle = shuffle
        self._queue: queue.Queue[_core.Batch | BaseException | None] = queue.Queue(_AHEAD)
        self._closed = threading.Event()
        self._ended = False
        self._seconds = [0.0, 0.0]
        self._thread = threading.Thread(target=self._run, args=(units, skip), daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[_core.Batch]:
        return self

    def __next__(self) -> _core.Batch:
        if self._ended:
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, _core.Batch):
            return item
        self._ended = True
        if item is None:
            raise StopIteration
        raise item

    def times(self) -> tuple[float, float]:
        """Return the seconds that the thread spent reading and making batches."""
        return self._seconds[0], self._seconds[1]

    def close(self) -> None:
        """Stop the thread."""
        self._ended = True
        self._closed.set()
        while self._thread.is_alive():
            # The thread may be waiting for room in the queue.
            with contextlib.suppress(queue.Empty):
                self._queue.get(timeout=0.01)

    def _run(self, units: list[Unit], skip: int) -> None:
        end: BaseException | None = None
        try:
            for unit in units:
                for batch in self._batches_of(unit, skip):
                    self._queue.put(batch)
                    if self._closed.is_set():
                        return
                skip = 0
        except BaseException as error:
            end = error
        self._queue.put(end)

    @contextlib.contextmanager
    def _timed(self, stage: int) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[stage] += time.perf_counter() - start

    def _batches_of(self, unit: Unit, skip: int) -> Iterator[_core.Batch]:
        train = self._job.train
        with self._timed(0):
            table, rows = self._columns.read(unit)
            if self._shuffle:
                order = _core.shuffle_records(len(rows), train.seed, unit.epoch, unit.id)
                table, rows = table.take(pa.array(order)), rows[order]
        for index, start in enumerate(range(0, len(rows), train.batch_size)):
            if index >= skip:
                with self._timed(1):
                    part = slice(start, start + train.batch_size)
                    batch = self._columns.batch(
                        unit.path, (unit.id, index), table.slice(start, train.batch_size), rows[part]
                    )
                yield batch


class _ColumnReader:
    """Reads the columns of a job from Parquet files."""

    def __init__(self, job: Job, parser: _core.Parser, *, labels: bool, select: Any) -> None:
        data = job.data
        assert data.columns is not None
        self._parser = parser
        self._select = select
        self._slots = [slot.column or slot.name for slot in data.slots]
        self._dense = [column.column or column.name for column in data.dense]
        self._labels = list(data.labels) if labels else []
        self._weight = data.columns.weight if labels else None
        self._time = data.columns.time if select is not None and select[0] == "time" else None
        self._num_shown = 0
        self._with_labels = labels
        optional = (self._weight, self._time)
        self.names = list(
            dict.fromkeys([*self._slots, *self._dense, *self._labels, *(name for name in optional if name)])
        )

    def open(self, path: str) -> pq.ParquetFile:
        """Open a file and check that it has all columns of the job."""
        file = open_file(path)
        missing = [name for name in self.names if name not in file.schema_arrow.names]
        if missing:
            raise ConfigError(f"{path}: expected a column `{missing[0]}`, got {show_names(file.schema_arrow.names)}")
        return file

    def read_groups(self, file: pq.ParquetFile, path: str, groups: range) -> pa.Table:
        """Read row groups of a file, with the columns of the job."""
        try:
            return file.read_row_groups(list(groups), columns=self.names)
        except (pa.ArrowInvalid, OSError) as error:
            raise SampleError(f"{path}: cannot be read: {_first_line(error)}") from None

    def read(self, unit: Unit) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        """Return the selected rows of a unit and their row numbers."""
        file = self.open(unit.path)
        table = self.read_groups(file, unit.path, range(unit.start, unit.end))
        first = _first_row(file, unit.start)
        rows = np.arange(first, first + len(table), dtype=np.int64)
        if self._select is None:
            return table, rows
        chosen = select_rows(table, rows, unit.path, self._select, self._time)
        return table.filter(pa.array(chosen)), rows[chosen]

    def batch(self, path: str, name: tuple[int, int], table: pa.Table, rows: npt.NDArray[np.int64]) -> _core.Batch:
        """Return a batch of rows; its name is (unit, index)."""
        batch = _core.batch_of_columns(
            self._parser,
            unit=name[0],
            index=name[1],
            path=path,
            rows=np.ascontiguousarray(rows),
            slots=[_texts(table[name], name, path) for name in self._slots],
            dense=[_numbers(table[name], name, path) for name in self._dense],
            labels=[_numbers(table[name], name, path) for name in self._labels] if self._with_labels else None,
            weights=_numbers(table[self._weight], self._weight, path) if self._weight else None,
            refused=_time_errors(table[self._time]) if self._time else {},
            shown=self._num_shown,
        )
        self._num_shown += len(batch.bad)
        return batch


def select_rows(
    table: pa.Table, rows: npt.NDArray[np.int64], path: str, select: Select, time: str | None
) -> npt.NDArray[np.bool_]:
    """Return which rows belong to the side of a train/eval split that `select` names; `rows` are row numbers."""
    kind, value, held_out = select
    if kind == "ratio":
        chosen = _core.held_out(rows, Path(path).name, value)
    else:
        chosen = _seconds(table[time], path) >= value
    return np.asarray(chosen == held_out, np.bool_)


def _texts(
    column: pa.ChunkedArray, name: str, path: str
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Return a column of categories: the start of each row's values, the start of each value, and all text."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    rows = None
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        rows = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        array = array.flatten()
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
    if pa.types.is_floating(array.type):
        raise SampleError(f"{path}: column `{name}`: expected text or whole numbers for a slot, got {array.type}")
    try:
        array = pc.fill_null(array.cast(pa.large_string()), "")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SampleError(f"{path}: column `{name}`: expected categories: {_first_line(error)}") from None
    _, offsets, text = array.buffers()
    values = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    return rows, values, np.frombuffer(text, np.uint8) if text is not None else np.empty(0, np.uint8)


def _numbers(column: pa.ChunkedArray, name: str, path: str) -> _Numbers:
    """Return a column of numbers, and the rows without a number."""
    nulls = None
    if column.null_count:
        nulls = pc.is_null(column).to_numpy().astype(np.bool_)
    try:
        numbers = pc.fill_null(column.cast(pa.float32(), safe=False), 0)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SampleError(f"{path}: column `{name}`: expected numbers: {_first_line(error)}") from None
    return np.ascontiguousarray(numbers.to_numpy(), np.float32), nulls


def _seconds(column: pa.ChunkedArray, path: str) -> npt.NDArray[np.float64]:
    """Return times in seconds since 1970; a row without a time is before all others."""
    try:
        column = _decode_dictionary(column)
        if _is_text(column.type):
            seconds = _seconds_of_text(column)
        else:
            if pa.types.is_date(column.type):
                column = column.cast(pa.timestamp("s"))
            seconds = _seconds_of_stamps(column) if pa.types.is_timestamp(column.type) else _seconds_of_numbers(column)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SampleError(f"{path}: time column: {_first_line(error)}") from None
    return np.nan_to_num(seconds, nan=-np.inf)


def _time_errors(column: pa.ChunkedArray) -> dict[int, str]:
    """Return the error of each row whose text is not a time; a null is before all times."""
    column = _decode_dictionary(column)
    if not _is_text(column.type):
        return {}
    odd = np.isnan(_seconds_of_text(column)) & column.is_valid().to_numpy()
    return {
        int(at): f"time: expected seconds since 1970 or a date, got {show(column[int(at)].as_py(), 40)}"
        for at in np.flatnonzero(odd)
    }


def _decode_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _seconds_of_text(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Return times as in CSV: numbers, or dates and times in UTC unless they have an offset; NaN for others."""
    column = pc.if_else(pc.match_substring_regex(column, _TIME), column, pa.scalar(None, column.type))
    try:
        return _seconds_of_times(column)
    except pa.ArrowInvalid:
        # An impossible date such as the 30th of February; find it by bisection.
        if len(column) == 1:
            return np.full(1, np.nan)
        half = len(column) // 2
        return np.concatenate((_seconds_of_text(column[:half]), _seconds_of_text(column[half:])))


def _seconds_of_times(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    numbers = pc.match_substring_regex(column, r"^[0-9]+(\.[0-9]+)?$")
    zoned = pc.match_substring_regex(column, r":[0-9][0-9].*(Z|[+-][0-9][0-9]:?[0-9]*)$")
    nothing = pa.scalar(None, column.type)
    plain = pc.if_else(pc.or_(numbers, zoned), nothing, column)
    seconds = _seconds_of_stamps(plain.cast(pa.timestamp("us")))
    with_zone = _seconds_of_stamps(pc.if_else(zoned, column, nothing).cast(pa.timestamp("us", tz="UTC")))
    count = _seconds_of_numbers(pc.if_else(numbers, column, nothing))
    return np.where(np.isnan(seconds), np.where(np.isnan(with_zone), count, with_zone), seconds)


def _seconds_of_stamps(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    column = column.cast(pa.timestamp("us", tz=column.type.tz), safe=False).cast(pa.int64())
    return np.asarray(column.cast(pa.float64(), safe=False).to_numpy() / 1e6, np.float64)


def _seconds_of_numbers(column: pa.ChunkedArray) -> npt.NDArray[np.float64]:
    """Return seconds; numbers too large for seconds are milliseconds."""
    numbers = np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)
    return np.where(np.abs(numbers) > 2e10, numbers / 1000, numbers)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
