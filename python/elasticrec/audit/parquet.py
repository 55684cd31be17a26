"""Counts of the signs in Parquet files, column by column."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from elasticrec.audit.counts import Counts, Signs, Tally
from elasticrec.audit.signs import Features, SlotSigns, in_share, xxh3
from elasticrec.audit.values import BadRecordError, OddError, seconds_of
from elasticrec.config import Job
from elasticrec.errors import SampleError

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class ParquetCounter:
    """Counts the rows of Parquet files."""

    def __init__(self, job: Job, features: Features, odd: Any) -> None:
        assert job.data.columns is not None
        self._features = features
        self._odd = odd
        self._select = job.data.select(held_out=False)
        self._weight = job.data.columns.weight
        self._time = job.data.columns.time if self._select is not None and self._select[0] == "time" else None
        names = [slot.column for slot in features.slots] + [column.column for column in features.dense]
        self._names = list(dict.fromkeys([*names, *features.labels, *filter(None, (self._weight, self._time))]))

    def count(self, path: Path, tally: Tally) -> None:
        """Add all training rows of a file."""
        first = 0
        try:
            file = pq.ParquetFile(path)
            for group in range(file.metadata.num_row_groups):
                table = file.read_row_group(group, columns=self._names).combine_chunks()
                self._add(path, table, first, tally)
                first += len(table)
        except (pa.ArrowException, KeyError) as error:
            raise SampleError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from None

    def _add(self, path: Path, table: pa.Table, first: int, tally: Tally) -> None:
        taken = self._training_rows(path, table, first)
        signs: list[Signs] = []
        rows: list[Rows] = []
        for column in self._features.dense:
            values, nulls = _to_float32(table[column.column])
            known: dict[float, tuple[int, ...] | None] = {}
            for value in np.unique(values[taken & ~nulls]).tolist():
                try:
                    known[value] = column.of_number(value)
                except BadRecordError:
                    known[value] = None
            bad = [value for value, items in known.items() if items is None]
            taken &= nulls | ~(np.isin(values, bad) | np.isnan(values))
            bucketed = {value: items[0] for value, items in known.items() if items}
            if bucketed:
                at = np.flatnonzero(taken & ~nulls)
                signs.append(np.array([bucketed[value] for value in values[at].tolist()], np.uint64))
                rows.append(at)
        click = self._check_numbers(table, taken)
        for slot in self._features.slots:
            found, of_rows = self._slot(slot, table[slot.column])
            signs.append(found)
            rows.append(of_rows)
        all_signs = np.concatenate(signs) if signs else np.empty(0, np.uint64)
        all_rows = np.concatenate(rows) if rows else np.empty(0, np.int64)
        kept = taken[all_rows]
        all_signs, all_rows = all_signs[kept], all_rows[kept]
        counts = Counts.of(all_signs, np.ones(len(all_signs), np.int64), click[all_rows])
        tally.add_counts(int(taken.sum()), counts)

    def _check_numbers(self, table: pa.Table, taken: Mask) -> Rows:
        """Remove rows with invalid labels or weight from `taken`; return the clicks."""
        click = np.zeros(len(table), np.int64)
        for label in reversed(self._features.labels):
            values, nulls = _to_float32(table[label])
            taken &= ~nulls & (values >= 0) & (values <= 1)
            click = (values >= 0.5).astype(np.int64)
        if self._weight is not None:
            values, nulls = _to_float32(table[self._weight])
            taken &= ~nulls & (values > 0) & np.isfinite(values)
        return click

    def _slot(self, slot: SlotSigns, column: pa.ChunkedArray) -> tuple[Signs, Rows]:
        """Return the signs of a column, each with its row."""
        array = _to_array(column)
        rows = np.arange(len(array), dtype=np.int64)
        kind = array.type
        if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
            rows = np.repeat(rows, lengths)
            array = array.flatten()
            if pa.types.is_dictionary(array.type):
                array = array.dictionary_decode()
        texts = pc.fill_null(array.cast(pa.large_string()), "").dictionary_encode()
        items = [slot.of_text(text.encode()) for text in texts.dictionary.to_pylist()]
        lengths = np.array([len(one) for one in items], np.int64)
        flat = [item if slot.sequence is None else item[1] for one in items for item in one]
        starts = np.cumsum(lengths) - lengths
        indices = texts.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        if not len(indices):
            return np.empty(0, np.uint64), rows
        counts = lengths[indices]
        of_value = np.repeat(np.arange(len(indices)), counts)
        within = np.arange(len(of_value)) - np.repeat(np.cumsum(counts) - counts, counts)
        signs = np.array(flat, np.uint64)[starts[indices][of_value] + within]
        rows = rows[of_value]
        if slot.sequence is not None:
            # Keep the last signs of each row, by their distance to the first sign of the next row.
            from_end = np.searchsorted(rows, rows, "right") - np.arange(len(rows))
            kept = from_end <= slot.sequence
            return signs[kept], rows[kept]
        return signs, rows

    def _training_rows(self, path: Path, table: pa.Table, first: int) -> Mask:
        """Return a mask of the rows that the train/eval split leaves for training."""
        if self._select is None:
            return np.ones(len(table), np.bool_)
        kind, value, _ = self._select
        if kind == "ratio":
            seed = xxh3(path.name.encode())
            numbers = range(first, first + len(table))
            return ~_to_mask(in_share(xxh3(number.to_bytes(8, "little"), seed), value) for number in numbers)
        assert self._time is not None
        seconds, bad = self._seconds(table[self._time])
        return ~(seconds >= value) & ~bad

    def _seconds(self, column: pa.ChunkedArray) -> tuple[npt.NDArray[np.float64], Mask]:
        """Return times, and the rows whose text is not a time; a row without a time is before all others."""
        array = _to_array(column)
        bad = np.zeros(len(array), np.bool_)
        if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            seconds = np.full(len(array), -np.inf)
            for at, text in enumerate(array.to_pylist()):
                if text is not None:
                    try:
                        found = seconds_of(text.encode())
                    except OddError as error:
                        self._odd.add(str(error))
                        found = None
                    bad[at] = found is None
                    seconds[at] = -np.inf if found is None else found
            return seconds, bad
        if pa.types.is_date(array.type):
            array = array.cast(pa.timestamp("s"))
        if pa.types.is_timestamp(array.type):
            micros = array.cast(pa.timestamp("us", tz=array.type.tz), safe=False).cast(pa.int64())
            seconds = _to_float64(micros) / 1e6
        else:
            seconds = _to_float64(array)
            seconds = np.where(np.abs(seconds) > 2e10, seconds / 1000, seconds)
        return np.nan_to_num(seconds, nan=-np.inf), bad


def _to_mask(values: Iterable[bool]) -> Mask:
    return np.fromiter(values, np.bool_)


def _to_array(column: pa.ChunkedArray) -> Any:
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _to_float32(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.float32], Mask]:
    array = _to_array(column)
    nulls = array.is_null().to_numpy(zero_copy_only=False).astype(np.bool_)
    values = pc.fill_null(array.cast(pa.float32(), safe=False), 0).to_numpy(zero_copy_only=False)
    return np.asarray(values, np.float32), nulls


def _to_float64(array: Any) -> npt.NDArray[np.float64]:
    return np.asarray(array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False), np.float64)
