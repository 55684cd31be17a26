"""`data convert`: the same samples in another format, with their raw values, or with their signs in slot text."""

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
from elasticrec.data.convert.input_data import InputData, open_input
from elasticrec.data.convert.output import (
    new_file,
    open_text,
    refuse_existing,
    refuse_other_files,
    relative_names,
)
from elasticrec.data.convert.rows import CHUNK_ROWS, BadRecords, Schema, column_of, open_rows
from elasticrec.data.convert.targets import (
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
from elasticrec.data.raw_lines import suffix_of
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
class Conversion:
    """The files that a conversion wrote."""

    paths: list[Path]
    num_samples: int
    num_bad: int
    bad: list[str]
    data: dict[str, Any] | None
    """The `data` section of a job that reads the files, without paths; None for JSON lines, which need a reader."""
    lost: list[str] = field(default_factory=list)
    """Names of values that the new format cannot hold."""


def format_of(out: Path, to: str | None) -> Format:
    """Return the format to write: `to`, or the format that the file name implies."""
    if to is not None:
        if to in _SUFFIXES:
            return next(known for known in _SUFFIXES if known == to)
        raise ConfigError(f"--to: expected one of {', '.join(_SUFFIXES)}, got `{to}`")
    suffixes = [suffix for suffix in out.suffixes if suffix not in _COMPRESSIONS]
    if not suffixes or suffixes[-1] not in _BY_SUFFIX:
        raise ConfigError(f"{out}: expected a name that ends in a format, or --to with {', '.join(_SUFFIXES)}")
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
) -> Conversion:
    """Write the samples of all sources to one file, or each file to a file in a directory; all files or none."""
    data = open_input(sources, job)
    targets = _targets(data, out, to)
    if out not in targets:
        refuse_other_files(out, targets)
    refuse_existing(targets, overwrite=overwrite)
    for path in targets:
        if to == "parquet" and path.suffix in _COMPRESSIONS:
            raise ConfigError(f"{path}: Parquet has its own compression, expected a name without `{path.suffix}`")
    converter = _SlotTextConverter(data) if to == "slots" else _RawValueConverter(data, to, separator)
    num_samples = 0
    with ExitStack() as stack:
        files: dict[Path, list[Path]] = {}
        for path, target in zip(data.files, targets, strict=True):
            files.setdefault(target, []).append(path)
        for target, paths in files.items():
            temporary = stack.enter_context(new_file(target))
            for count in converter.run(paths, temporary, target):
                num_samples += count
                if progress is not None:
                    progress(num_samples)
        converter.bad.check(data.job)
        if num_samples == 0:
            raise SampleError(f"{data.files[0]}: expected samples, got none")
    bad = converter.bad
    return Conversion(list(files), num_samples, bad.num_bad, bad.shown, converter.data(targets[0]), converter.lost)


def _targets(data: InputData, out: Path, to: Format) -> list[Path]:
    """Return the output file of each input file."""
    if out.suffix and not out.is_dir():
        return [out] * len(data.files)
    names = []
    for name in relative_names(data.files):
        compression = name.suffix if name.suffix in _COMPRESSIONS and to != "parquet" else ""
        stem = name.name.removesuffix(suffix_of(name))
        names.append(out / name.parent / f"{stem}{_SUFFIXES[to]}{compression}")
    for path in names:
        if names.count(path) > 1:
            raise ConfigError(f"{path}: two files would get this name; convert them one by one")
    return names


class _RawValueConverter:
    """Converts to a format that holds raw values."""

    def __init__(self, data: InputData, to: Format, separator: str) -> None:
        self._reader = open_rows(data)
        self._job = data.job
        self._to = to
        self._separator = separator
        self.lost: list[str] = []
        schema = self._reader.schema
        if to == "paddlerec":
            families_of(schema.dense)
            self.lost = [*([schema.time] if schema.time else []), *schema.others]

    @property
    def bad(self) -> BadRecords:
        return self._reader.bad

    def run(self, paths: list[Path], temporary: Path, named: Path) -> Iterator[int]:
        with ExitStack() as stack:
            target = self._open(temporary, named, self._reader.schema, stack)
            for path in paths:
                for chunk in self._reader.read(path):
                    target.write(chunk)
                    yield len(next(iter(chunk.values())))

    def _open(self, temporary: Path, named: Path, schema: Schema, stack: ExitStack) -> Target:
        if self._to == "csv":
            return CsvTarget(temporary, named, schema, self._separator, stack)
        if self._to == "parquet":
            return ParquetTarget(temporary, schema, stack)
        if self._to == "paddlerec":
            return PaddleRecTarget(temporary, named, schema, stack)
        return JsonTarget(temporary, named, schema, stack)

    def data(self, path: Path) -> dict[str, Any] | None:
        """Return the `data` section of a job that reads the output."""
        schema, pooling = self._reader.schema, self._job.data.pooling
        given: dict[str, Any] = {"pooling": pooling if pooling != "sum" else None, "modulo": self._job.data.modulo}
        given |= {"padding": self._job.data.padding}
        options = {key: value for key, value in given.items() if value is not None}
        if self._to == "json":
            return None
        if self._to == "paddlerec":
            data: dict[str, Any] = {"format": "paddlerec", "labels": schema.labels}
            data["slots"] = [slot_item(slot, pooling) for slot in schema.slots]
            dense = [dense_item(column.model_copy(update={"column": None}), "none") for column in schema.dense]
            return data | ({"dense": dense} if dense else {}) | options
        slots = []
        for slot in schema.slots:
            is_list = self._to == "csv" and column_of(slot) in schema.lists
            slots.append(slot_item(slot, pooling, column=slot.column, separator=self._separator if is_list else None))
        columns: dict[str, Any] = {"labels": schema.labels, "sparse": slots}
        extra = {
            "dense": [dense_item(column, "log") for column in schema.dense] or None,
            "weight": schema.weight,
            "time": schema.time,
            "delimiter": "\t" if self._to == "csv" and delimiter_of(path) == "\t" else None,
        }
        columns |= {key: value for key, value in extra.items() if value is not None}
        return {"format": self._to, "columns": columns} | options


class _SlotTextConverter:
    """Converts to slot text, with the signs that the job computes, so that batches stay the same."""

    def __init__(self, data: InputData) -> None:
        section = data.job.data
        if data.is_json:
            raise ConfigError("JSON lines: expected --job with a reader, as slot text holds signs instead of values")
        if section.dense:
            names = ", ".join(column.name for column in section.dense)
            raise ConfigError(f"format `slots` has no dense values, the data has {names}; give a --job without them")
        self.bad = BadRecords()
        self.lost = ["values (slot text holds only their signs)"] if section.format != "slots" else []
        self._job = data.job.model_copy(update={"train": data.job.train.model_copy(update={"batch_size": CHUNK_ROWS})})
        self._parser = _core.Parser(json.dumps(self._job.features()))

    def run(self, paths: list[Path], temporary: Path, named: Path) -> Iterator[int]:
        data = self._job.data
        units = plan_units(paths, UnitSplit(data.unit_bytes, False, 0, "", data.format), 0, 0)
        with (
            open_text(temporary, named) as file,
            closing(open_batches(self._job, self._parser, units, shuffle=False)) as batches,
        ):
            for batch in batches:
                # A batch describes only its first bad records, so `BadRecords.add` would miscount.
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
                f"{batch.location}: expected whole numbers of shows and clicks for slot text, "
                "got other weights or labels"
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
        """Return the `data` section of a job that reads the output; hashing, modulo and padding are done."""
        data = self._job.data
        slots = [slot_item(slot, data.pooling) for slot in data.inputs]
        section: dict[str, Any] = {"format": "slots", "labels": list(data.labels), "slots": slots}
        return section | ({"pooling": data.pooling} if data.pooling != "sum" else {})


def summary_lines(conversion: Conversion) -> list[str]:
    """Return a summary of the written files, and the section of a job that reads them, as lines of text."""
    from elasticrec.config.document import dump

    paths = conversion.paths
    where = str(paths[0]) if len(paths) == 1 else f"{len(paths):,} files such as {paths[0]}"
    lines = [f"wrote {where}: {conversion.num_samples:,} samples"]
    if conversion.num_bad:
        lines.append(f"  bad records skipped: {conversion.num_bad:,}, the first of them:")
        lines += [f"    {line}" for line in conversion.bad]
    if conversion.lost:
        lines.append(f"  not converted: {show_names(conversion.lost)}")
    if conversion.data is None:
        return [*lines, f"  to write a job and a reader for it: elasticrec init --from {shlex.quote(str(paths[0]))}"]
    return [*lines, "  in a job:", *(f"  {line}" for line in dump({"data": conversion.data}).splitlines())]
