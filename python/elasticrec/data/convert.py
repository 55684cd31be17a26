"""Data of one format to another that means the same: raw values in chunks, never their hashes but for slot text."""

import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.config.fields import show_names
from elasticrec.data.batches import open_batches
from elasticrec.data.output import new_file, open_text, refuse_existing, refuse_strangers, relative_names, suffix_of
from elasticrec.data.rows import CHUNK_ROWS, Bad, RowReader, Table, column_of
from elasticrec.data.source import Source, open_source
from elasticrec.data.targets import (
    CsvTarget,
    JsonTarget,
    PaddleRecTarget,
    ParquetTarget,
    Target,
    delimiter_of,
    dense_item,
    families_of,
    slot_item,
)
from elasticrec.data.units import UnitSplit, plan_units
from elasticrec.errors import ConfigError, SampleError

Format = Literal["slots", "paddlerec", "csv", "parquet", "json"]

_BY_SUFFIX: dict[str, Format] = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".jsonl": "json", ".json": "json"}
_SUFFIXES: dict[Format, str] = {
    "slots": ".txt",
    "paddlerec": ".txt",
    "csv": ".csv",
    "parquet": ".parquet",
    "json": ".jsonl",
}
_COMPRESSIONS = (".gz", ".zst")


@dataclass
class Converted:
    """What was written."""

    paths: list[Path]
    num_samples: int
    num_bad: int
    bad: list[str]
    data: dict[str, Any] | None
    """The `data` section of a job for it, but for its files; None for JSON lines, which need a reader."""
    lost: list[str] = field(default_factory=list)
    """What the new format has no place for."""


def format_of(out: Path, to: str | None) -> Format:
    """The format to write: the one that was named, or that of the name of the file."""
    if to is not None:
        if to in _SUFFIXES:
            return next(known for known in _SUFFIXES if known == to)
        raise ConfigError(f"--to: expected one of {', '.join(_SUFFIXES)}, got `{to}`")
    suffixes = [suffix for suffix in out.suffixes if suffix not in _COMPRESSIONS]
    if not suffixes or suffixes[-1] not in _BY_SUFFIX:
        raise ConfigError(f"{out}: its name says no format; name one with --to {', '.join(_SUFFIXES)}")
    return _BY_SUFFIX[suffixes[-1]]


def convert(
    sources: Sequence[str],
    out: Path,
    to: Format,
    *,
    job: Job | None = None,
    separator: str = "|",
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Converted:
    """Write the samples of all sources to a file, or each file of them to one in a directory; all or none."""
    source = open_source(sources, job)
    targets = _targets(source, out, to)
    if out not in targets:
        refuse_strangers(out, targets)
    refuse_existing(targets, overwrite=overwrite)
    for path in targets:
        if to == "parquet" and path.suffix in _COMPRESSIONS:
            raise ConfigError(f"{path}: Parquet is compressed inside, expected a name without `{path.suffix}`")
    conversion = _ToSlots(source) if to == "slots" else _ToTable(source, to, separator)
    num_samples = 0
    with ExitStack() as done:
        files: dict[Path, list[Path]] = {}
        for path, target in zip(source.files, targets, strict=True):
            files.setdefault(target, []).append(path)
        for target, paths in files.items():
            temporary = done.enter_context(new_file(target))
            for count in conversion.run(paths, temporary, target):
                num_samples += count
                if progress is not None:
                    progress(num_samples)
        conversion.bad.check(source.job)
        if num_samples == 0:
            raise SampleError(f"{source.files[0]}: expected samples, got none")
    bad = conversion.bad
    return Converted(list(files), num_samples, bad.num_bad, bad.shown, conversion.data(targets[0]), conversion.lost)


def _targets(source: Source, out: Path, to: Format) -> list[Path]:
    """Where each file goes."""
    if out.suffix and not out.is_dir():
        return [out] * len(source.files)
    names = []
    for name in relative_names(source.files):
        compression = name.suffix if name.suffix in _COMPRESSIONS and to != "parquet" else ""
        stem = name.name.removesuffix(suffix_of(name))
        names.append(out / name.parent / f"{stem}{_SUFFIXES[to]}{compression}")
    for path in names:
        if names.count(path) > 1:
            raise ConfigError(f"{path}: two files would get this name; convert them one by one")
    return names


class _ToTable:
    """To a format that has values."""

    def __init__(self, source: Source, to: Format, separator: str) -> None:
        self._reader = RowReader(source)
        self._job = source.job
        self._to = to
        self._separator = separator
        self.lost: list[str] = []
        table = self._reader.table
        if to == "paddlerec":
            families_of(table.dense)
            self.lost = [*([table.time] if table.time else []), *table.others]

    @property
    def bad(self) -> Bad:
        return self._reader.bad

    def run(self, paths: list[Path], temporary: Path, named: Path) -> Iterator[int]:
        with ExitStack() as stack:
            target = self._open(temporary, named, self._reader.table, stack)
            for path in paths:
                for chunk in self._reader.read(path):
                    target.write(chunk)
                    yield len(next(iter(chunk.values())))

    def _open(self, temporary: Path, named: Path, table: Table, stack: ExitStack) -> Target:
        if self._to == "csv":
            return CsvTarget(temporary, named, table, self._separator, stack)
        if self._to == "parquet":
            return ParquetTarget(temporary, table, stack)
        if self._to == "paddlerec":
            return PaddleRecTarget(temporary, named, table, stack)
        return JsonTarget(temporary, named, table, stack)

    def data(self, path: Path) -> dict[str, Any] | None:
        """The `data` section for what was written."""
        table, pooling = self._reader.table, self._job.data.pooling
        given: dict[str, Any] = {"pooling": pooling if pooling != "sum" else None, "modulo": self._job.data.modulo}
        given |= {"padding": self._job.data.padding}
        options = {key: value for key, value in given.items() if value is not None}
        if self._to == "json":
            return None
        if self._to == "paddlerec":
            data: dict[str, Any] = {"format": "paddlerec", "labels": table.labels}
            data["slots"] = [slot_item(slot, pooling) for slot in table.slots]
            dense = [dense_item(column.model_copy(update={"column": None}), "none") for column in table.dense]
            return data | ({"dense": dense} if dense else {}) | options
        slots = []
        for slot in table.slots:
            is_list = self._to == "csv" and column_of(slot) in table.lists
            slots.append(slot_item(slot, pooling, column=slot.column, separator=self._separator if is_list else None))
        columns: dict[str, Any] = {"labels": table.labels, "sparse": slots}
        extra = {
            "dense": [dense_item(column, "log") for column in table.dense] or None,
            "weight": table.weight,
            "time": table.time,
            "delimiter": "\t" if self._to == "csv" and delimiter_of(path) == "\t" else None,
        }
        columns |= {key: value for key, value in extra.items() if value is not None}
        return {"format": self._to, "columns": columns} | options


class _ToSlots:
    """To slot text: its signs are those that the job makes, so that batches are the same."""

    def __init__(self, source: Source) -> None:
        data = source.job.data
        if source.is_json:
            raise ConfigError("JSON lines: expected --job with their reader, as slot text has signs instead of values")
        if data.dense:
            names = ", ".join(column.name for column in data.dense)
            raise ConfigError(f"format `slots` has no dense values, the data has {names}; describe it by a job without")
        self.bad = Bad()
        self.lost = ["values: slot text has their signs"] if data.format != "slots" else []
        self._job = source.job.model_copy(
            update={"train": source.job.train.model_copy(update={"batch_size": CHUNK_ROWS})}
        )
        self._parser = _core.Parser(json.dumps(self._job.features()))

    def run(self, paths: list[Path], temporary: Path, named: Path) -> Iterator[int]:
        data = self._job.data
        units = plan_units(paths, UnitSplit(data.unit_bytes, False, 0, "", data.format), 0, 0)
        with (
            open_text(temporary, named) as file,
            closing(open_batches(self._job, self._parser, units, shuffle=False)) as batches,
        ):
            for batch in batches:
                # of a batch only the first few are described
                self.bad.num_records += batch.num_records
                self.bad.num_bad += batch.num_bad
                self.bad.shown += batch.bad
                self._write(batch, file)
                yield batch.num_samples

    def _write(self, batch: _core.Batch, file: IO[bytes]) -> None:
        data = self._job.data
        shows = np.rint(batch.weights).astype(np.int64)
        counts = np.rint(batch.labels * shows[:, None]).astype(np.int64)
        if np.any(shows != batch.weights) or np.any(np.abs(counts - batch.labels * shows[:, None]) > 1e-3):
            raise SampleError(
                f"{batch.places}: slot text has whole numbers of shows and clicks, got other weights or labels"
            )
        names = [slot.name for slot in data.inputs]
        lengths = np.diff(batch.offsets)
        slots = np.repeat(np.tile(np.arange(len(names)), batch.num_samples), lengths)
        fields = [f"{sign}:{names[slot]}" for sign, slot in zip(batch.signs.tolist(), slots.tolist(), strict=True)]
        ends = batch.offsets[:: len(names)].tolist()
        lines = []
        for row, (show, (click, *more)) in enumerate(zip(shows.tolist(), counts.tolist(), strict=True)):
            labels = [f"{name}={count}" for name, count in zip(data.labels[1:], more, strict=True)]
            lines.append(" ".join([str(show), str(click), *labels, *fields[ends[row] : ends[row + 1]]]) + "\n")
        file.write("".join(lines).encode())

    def data(self, path: Path) -> dict[str, Any]:
        """The `data` section for what was written: hashing, modulo and padding are done."""
        data = self._job.data
        slots = [slot_item(slot, data.pooling) for slot in data.inputs]
        section: dict[str, Any] = {"format": "slots", "labels": list(data.labels), "slots": slots}
        return section | ({"pooling": data.pooling} if data.pooling != "sum" else {})


def summary_lines(converted: Converted) -> list[str]:
    """What was written and how a job reads it, for people."""
    from elasticrec.config.document import dump

    paths = converted.paths
    where = str(paths[0]) if len(paths) == 1 else f"{len(paths):,} files such as {paths[0]}"
    lines = [f"wrote {where}: {converted.num_samples:,} samples"]
    if converted.num_bad:
        lines.append(f"  bad records left out: {converted.num_bad:,}, the first of them:")
        lines += [f"    {line}" for line in converted.bad]
    if converted.lost:
        lines.append(f"  not carried over: {show_names(converted.lost)}")
    if converted.data is None:
        return [*lines, f"  a job and a reader for it: elasticrec init --from {shlex.quote(str(paths[0]))}"]
    return [*lines, "  in a job:", *(f"  {line}" for line in dump({"data": converted.data}).splitlines())]
