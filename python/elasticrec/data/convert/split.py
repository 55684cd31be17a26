"""`data split`: files split as `data.eval` of a job splits them, or into parts of equal size."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from pydantic import ValidationError

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.config.data import Holdout, Select
from elasticrec.config.fields import show
from elasticrec.data.convert.input_data import InputData, open_input
from elasticrec.data.convert.output import (
    new_file,
    open_text,
    refuse_existing,
    refuse_other_files,
    relative_names,
)
from elasticrec.data.raw_lines import lines_of, record_batches, suffix_of
from elasticrec.errors import ConfigError, SampleError

Progress = Callable[[int], None]

_BATCH_SIZE = 16384
# Rows to collect for a row group, because the split may leave few rows of each row group that is read.
_GROUP_ROWS = 65536
_SIDES = {"train": False, "eval": True}


def holdout_of(ratio: float | None, time: str | None, num_parts: int | None = None) -> Holdout:
    """Return the train/eval split that the options of a command describe."""
    given = {"--ratio": ratio, "--time": time, "--parts": num_parts}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ConfigError(f"expected one of --ratio, --time and --parts, got {' and '.join(names) or 'none'}")
    try:
        return Holdout(ratio=ratio, time=time)
    except ValidationError:
        what = "a share between 0 and 1" if time is None else "a date and time such as `2026-01-31T18:00`"
        raise ConfigError(f"{names[0]}: expected {what}, got {show(str(given[names[0]]))}") from None


class _TextOutput:
    """A text file that is removed if nothing is written to it."""

    def __init__(self, path: Path, done: ExitStack, streams: ExitStack, header: bytes | None) -> None:
        self._temporary = done.enter_context(new_file(path))
        done.callback(self._remove_if_empty)
        self._file: IO[bytes] = streams.enter_context(open_text(self._temporary, path))
        if header is not None:
            self._file.write(header + b"\n")
        self.num_samples = 0

    def write(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._file.write(b"\n".join(lines) + b"\n")
            self.num_samples += len(lines)

    def _remove_if_empty(self) -> None:
        if self.num_samples == 0:
            self._temporary.unlink(missing_ok=True)


class _ParquetOutput:
    """A Parquet file that is removed if nothing is written to it."""

    def __init__(self, path: Path, done: ExitStack, streams: ExitStack, schema: Any) -> None:
        import pyarrow.parquet as pq

        self._temporary = done.enter_context(new_file(path))
        done.callback(self._remove_if_empty)
        self._writer = streams.enter_context(pq.ParquetWriter(self._temporary, schema))
        streams.callback(self._flush)
        self._pending: list[Any] = []
        self._num_pending = 0
        self.num_samples = 0

    def write(self, table: Any) -> None:
        self._pending.append(table)
        self._num_pending += len(table)
        self.num_samples += len(table)
        if self._num_pending >= _GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._num_pending:
            self._writer.write_table(pa.concat_tables(self._pending), row_group_size=_GROUP_ROWS)
        self._pending, self._num_pending = [], 0

    def _remove_if_empty(self) -> None:
        if self.num_samples == 0:
            self._temporary.unlink(missing_ok=True)


def split_by(
    sources: Sequence[str],
    out: Path,
    holdout: Holdout,
    *,
    job: Job | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write OUT/train and OUT/eval, split as by this `data.eval` of a job; return the number of samples of each."""
    data = open_input(sources, job, holdout)
    names = relative_names(data.files)
    targets = {side: [out / side / name for name in names] for side in _SIDES}
    everything = [path for paths in targets.values() for path in paths]
    refuse_other_files(out, everything)
    refuse_existing(everything, overwrite=overwrite)
    counts = dict.fromkeys(_SIDES, 0)
    # Files get their final names when all are written. Each file is closed before the next is opened, as there may
    # be many.
    with ExitStack() as done:
        for at, path in enumerate(data.files):
            for side, paths in targets.items():
                with ExitStack() as streams:
                    for count in _split_file(data, path, paths[at], _SIDES[side], (done, streams)):
                        counts[side] += count
                        if progress is not None:
                            progress(sum(counts.values()))
        for side, count in counts.items():
            if count == 0:
                raise SampleError(f"{out / side}: expected samples, got none with {_describe_holdout(holdout)}")
    return counts


def _describe_holdout(holdout: Holdout) -> str:
    return f"ratio {holdout.ratio}" if holdout.ratio is not None else f"time {holdout.time}"


def _split_file(
    data: InputData, path: Path, target: Path, held_out: bool, stacks: tuple[ExitStack, ExitStack]
) -> Iterator[int]:
    """Write one side of a file; yield the numbers of samples written."""
    select = data.job.data.select(held_out=held_out)
    if select is None:
        # The directory of the file gives its hour, so the whole file belongs to one side.
        if path in match_files(data.job, "eval" if held_out else "train"):
            shutil.copyfile(path, stacks[0].enter_context(new_file(target)))
            yield _num_samples(data, path)
    elif data.job.data.format == "parquet":
        table = None
        for part, schema in _tables(data.job, path, select):
            table = table or _ParquetOutput(target, *stacks, schema)
            table.write(part)
            yield len(part)
    else:
        text = _TextOutput(target, *stacks, _header(data.job, path))
        for batch in record_batches(path, data.line_parser(), batch_size=_BATCH_SIZE, select=select):
            text.write(lines_of(batch.text()))
            yield len(batch)


def _num_samples(data: InputData, path: Path) -> int:
    if data.job.data.format == "parquet":
        return sum(len(table) for table, _ in _tables(data.job, path, None))
    return sum(len(batch) for batch in record_batches(path, data.line_parser(), batch_size=_BATCH_SIZE))


def _header(job: Job, path: Path) -> bytes | None:
    columns = job.data.columns
    return _core.first_line(str(path)) if job.data.format == "csv" and columns is not None and columns.header else None


def _tables(job: Job, path: Path, select: Select | None) -> Iterator[tuple[Any, Any]]:
    """Yield the selected rows of each row group, and the schema of the file."""
    import pyarrow as pa

    from elasticrec.data.parquet import open_file, select_rows

    file = open_file(path)
    first = 0
    for group in range(file.metadata.num_row_groups):
        table = file.read_row_group(group)
        if select is not None:
            rows = np.arange(first, first + len(table), dtype=np.int64)
            first += len(table)
            time = None if job.data.columns is None else job.data.columns.time
            table = table.filter(pa.array(select_rows(table, rows, str(path), select, time)))
        yield table, file.schema_arrow


def split_parts(
    sources: Sequence[str],
    out: Path,
    num_parts: int,
    *,
    job: Job | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Write OUT/part-00000 and so on, each with every `num_parts`-th sample; return the number of samples of each."""
    data = open_input(sources, job)
    suffix = suffix_of(data.files[0])
    targets = [out / f"part-{number:05}{suffix}" for number in range(num_parts)]
    refuse_other_files(out, targets)
    refuse_existing(targets, overwrite=overwrite)
    with ExitStack() as done:
        with ExitStack() as streams:
            write = _write_parquet_parts if data.job.data.format == "parquet" else _write_line_parts
            counts = write(data, targets, (done, streams), progress)
        if min(counts) == 0:
            raise ConfigError(f"{out}: expected a sample for each of {num_parts} parts, got {sum(counts)} samples")
    return {path.name: count for path, count in zip(targets, counts, strict=True)}


def _write_line_parts(
    data: InputData, targets: list[Path], stacks: tuple[ExitStack, ExitStack], progress: Progress | None
) -> list[int]:
    header = _header(data.job, data.files[0])
    outputs = [_TextOutput(path, *stacks, header) for path in targets]
    count = 0
    for path in data.files:
        for batch in record_batches(path, data.line_parser(), batch_size=_BATCH_SIZE):
            lines = lines_of(batch.text())
            for number, output in enumerate(outputs):
                output.write(lines[(number - count) % len(outputs) :: len(outputs)])
            count += len(lines)
            if progress is not None:
                progress(count)
    return [output.num_samples for output in outputs]


def _write_parquet_parts(
    data: InputData, targets: list[Path], stacks: tuple[ExitStack, ExitStack], progress: Progress | None
) -> list[int]:
    import pyarrow as pa

    from elasticrec.data.parquet import open_file

    schema = open_file(data.files[0]).schema_arrow
    outputs = [_ParquetOutput(path, *stacks, schema) for path in targets]
    count = 0
    for path in data.files:
        for table, own in _tables(data.job, path, None):
            if not own.equals(schema):
                raise SampleError(
                    f"{path}: expected the columns and types of {data.files[0]}, got other columns or types"
                )
            for number, output in enumerate(outputs):
                rows = np.arange((number - count) % len(outputs), len(table), len(outputs))
                output.write(table.take(pa.array(rows)))
            count += len(table)
            if progress is not None:
                progress(count)
    return [output.num_samples for output in outputs]
