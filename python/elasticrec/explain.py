"""`elasticrec explain`: the signs of a sample, their rows, what the network receives and the scores."""

import io
import json
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config.files import refuse_irregular
from elasticrec.data.units import is_compressed
from elasticrec.errors import ConfigError, SampleError
from elasticrec.repository.find import find_chain
from elasticrec.repository.rows import open_rows
from elasticrec.serving.client import Client
from elasticrec.serving.onnxruntime import library_path

Values = npt.NDArray[np.float32]

# Number of values of a vector in the text output; JSON has all of them.
_SHOWN_VALUES = 6

# Stages of a request, in order.
_STAGES = ("queue", "reader", "parse", "lookup", "infer", "write")

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowAddress(NamedTuple):
    """A row of a Parquet file, counted from 0 as in messages about bad rows."""

    path: Path
    row: int


@dataclass(frozen=True)
class Row:
    """The row of a sign."""

    weights: list[float]
    show: int | None = None
    """None for a published version, which has weights only."""
    click: int | None = None


@dataclass(frozen=True)
class ExplainSource:
    """A checkpoint, version or server with which samples are explained."""

    name: str
    features: dict[str, Any]
    rows: Callable[[list[int]], list[Row | None]]
    """Returns the row of each sign, or None."""
    width: int
    read: Callable[[bytes | RowAddress], tuple["_core.Batch | _ServedSample", Callable[[], Values]]]
    """Returns the batch of a sample and a function that scores it."""
    pull: Callable[[Any], Values] | None = None
    """Pools rows to `[1, cells, width]` with the table itself; if None, they are pooled in Python."""
    labels: list[str] | None = None
    """The labels that are scored, if not all."""


def explain(sample: bytes | RowAddress, source: ExplainSource) -> dict[str, Any]:
    """Return everything between a sample and its scores, ready for JSON."""
    batch, predict = source.read(sample)
    if batch.num_samples != 1:
        got = f"{batch.num_samples}" if batch.num_samples else "none: the line is blank or holds no sample"
        raise SampleError(f"sample: expected 1, got {got}")
    signs = batch.signs.tolist()
    offsets = batch.offsets.tolist()
    rows = source.rows(signs)
    pulled = None if source.pull is None else source.pull(batch)[0]
    slots = []
    cell = 0
    for at, slot in enumerate(source.features["slots"]):
        within = slice(offsets[at], offsets[at + 1])
        # A sequence has one cell per position, any other slot has one.
        cells = slice(cell, cell + (slot.get("sequence") or 1))
        cell = cells.stop
        pooled = _pool(rows[within], source.width, slot) if pulled is None else pulled[cells]
        slots.append(
            {
                **slot,
                "signs": [_describe_sign(sign, row) for sign, row in zip(signs[within], rows[within], strict=True)],
                "pooled": pooled.flatten().tolist(),
            }
        )
    scores = predict()[0].tolist()
    names = [column["name"] for column in source.features["dense"]]
    return {
        "source": source.name,
        "slots": slots,
        "dense": dict(zip(names, batch.dense[0].tolist(), strict=True)),
        "scores": dict(zip(source.labels or source.features["labels"], scores, strict=True)),
    }


def _describe_sign(sign: int, row: Row | None) -> dict[str, Any]:
    if row is None:
        return {"sign": sign, "found": False}
    return {"sign": sign, "found": True, "show": row.show, "click": row.click, "weights": row.weights}


def _pool(rows: list[Row | None], width: int, slot: dict[str, Any]) -> Values:
    """Pool as the table does: a missing row reads as zero and counts as a sign; sequences are not summed."""
    vectors = np.array([row.weights if row else [0.0] * width for row in rows], np.float32).reshape(-1, width)
    length = slot.get("sequence")
    if length:
        cells = np.zeros((length, width), np.float32)
        last = vectors[-length:]
        cells[: len(last)] = last
        return cells
    divisor = {"sum": 1.0, "mean": max(len(rows), 1), "sqrtn": max(len(rows), 1) ** 0.5}[slot["pooling"]]
    pooled: Values = vectors.sum(axis=0) / np.float32(divisor)
    return pooled


def text_lines(explanation: dict[str, Any]) -> list[str]:
    """Return an explanation as lines of text."""
    signs = [sign for slot in explanation["slots"] for sign in slot["signs"]]
    found = [sign for sign in signs if sign["found"]]
    lines = [f"{explanation['source']}: {len(found)} of {len(signs)} signs have a row"]
    if found and found[0]["show"] is None:
        lines.append("a published version has no shows and clicks; use --checkpoint to see them")
    for slot in explanation["slots"]:
        if not slot["signs"]:
            lines.append(f"slot {slot['name']}: empty, reads as zero")
            continue
        lines.append(f"slot {slot['name']}: {slot['pooling']} {_format_vector(slot['pooled'])}")
        lines += [f"  {_sign_line(sign)}" for sign in slot["signs"]]
    lines += [f"dense {name}: {value:.6g}" for name, value in explanation["dense"].items()]
    lines += [f"{label}: {score:.9g}" for label, score in explanation["scores"].items()]
    if timing := explanation.get("timing_ms"):
        lines.append("time: " + ", ".join(f"{stage} {timing[stage]:.3f} ms" for stage in _STAGES if stage in timing))
    return lines


def _sign_line(sign: dict[str, Any]) -> str:
    if not sign["found"]:
        return f"{sign['sign']}: no row, reads as zero"
    counts = "" if sign["show"] is None else f"show {sign['show']:,} click {sign['click']:,} "
    return f"{sign['sign']}: {counts}weights {_format_vector(sign['weights'])}"


def _format_vector(values: list[float]) -> str:
    shown = " ".join(f"{value:.4g}" for value in values[:_SHOWN_VALUES])
    return f"[{shown} … {len(values)} values]" if len(values) > _SHOWN_VALUES else f"[{shown}]"


def read_sample(text: str, format: str) -> bytes | RowAddress:
    """Return the sample named on the command line.

    `text` is the line itself, `-` for the first line of standard input, or `@FILE:LINE`; for Parquet `@FILE:ROW`.
    """
    if format == "parquet" and not text.startswith("@"):
        raise SampleError("sample: format `parquet` has no lines, expected `@FILE:ROW`, with rows counted from 0")
    if text == "-":
        return sys.stdin.buffer.readline()
    if not text.startswith("@"):
        return text.encode()
    file, _, number = text[1:].rpartition(":")
    what, first = ("row", 0) if format == "parquet" else ("line", 1)
    if not number.isdecimal():
        if re.fullmatch("[-+][0-9]+", number) and not Path(text[1:]).exists():
            raise SampleError(f"{file}: expected a {what} number of at least {first}, got {number}")
        file, number = text[1:], str(first)
    elif int(number) < first:
        raise SampleError(f"{file}: expected a {what} number of at least {first}, got {number}")
    path = Path(file)
    refuse_irregular(path)
    return RowAddress(path, int(number)) if format == "parquet" else _read_line(path, int(number), format)


def _read_line(path: Path, number: int, format: str) -> bytes:
    count = 0
    with _open_lines(path, format) as lines:
        for count, line in enumerate(lines, 1):
            if count == number:
                return line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
    raise SampleError(f"{path}: expected at least {number} lines, got {count}")


@contextmanager
def _open_lines(path: Path, format: str) -> Iterator[Iterable[bytes]]:
    """Yield the lines of a file, plain or compressed."""
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(0)
        if start == b"PAR1":
            raise SampleError(f"{path}: expected lines of format `{format}`, got Parquet")
        if not is_compressed(path):
            yield file
        elif start[:2] == b"\x1f\x8b":
            import gzip

            try:
                yield gzip.GzipFile(fileobj=file)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise SampleError(f"{path}: damaged or truncated: {error}") from None
        else:
            import pyarrow as pa

            try:
                yield io.BufferedReader(pa.CompressedInputStream(file, "zstd"))
            except OSError as error:
                raise SampleError(f"{path}: damaged or truncated: {error}") from None


def explain_served(client: Client, text: str) -> dict[str, Any]:
    """Explain a sample with a running server; add the version that answered and the time of each stage."""
    metadata = client.metadata()
    features = metadata["features"]
    if features["format"] == "parquet":
        raise SampleError("sample: format `parquet` has no lines; use --checkpoint RUN instead of --server")
    line = read_sample(text, features["format"])
    assert isinstance(line, bytes)
    answer = client.explain_line(line)
    width = sum(column["width"] for column in metadata["columns"])
    batch = _ServedSample(
        np.array(answer["signs"], np.uint64),
        np.array(answer["offsets"], np.int64),
        np.array([answer["dense"]], np.float32),
    )
    weights = answer["rows"]
    scores = np.array([list(answer["scores"].values())], np.float32)
    variant = f", variant {answer['variant']}" if "variant" in answer else ""
    source = ExplainSource(
        f"{answer['model']} version {answer['version']}{variant} at {client.where}",
        features,
        lambda _: [None if row is None else Row(row) for row in weights],
        width,
        lambda _: (batch, lambda: scores),
        labels=list(answer["scores"]),
    )
    return {**explain(line, source), "timing_ms": answer["timing_ms"]}


@dataclass(frozen=True)
class _ServedSample:
    """A sample as a server parsed it, with the attributes of a batch that `explain` reads."""

    signs: npt.NDArray[np.uint64]
    offsets: npt.NDArray[np.int64]
    dense: Values
    num_samples: int = 1


def open_source(checkpoint: str | None, model: str | None, *, best: bool = False) -> ExplainSource:
    """Open either a run's checkpoint or a published model."""
    if (checkpoint is None) == (model is None):
        raise ConfigError("explain: expected one of --checkpoint, --model and --server")
    if checkpoint is not None:
        return _checkpoint_source(checkpoint, best)
    if best:
        raise ConfigError("explain: --best needs --checkpoint")
    assert model is not None
    return _version_source(model)


def _checkpoint_source(run: str, best: bool) -> ExplainSource:
    # Import here: only a checkpoint needs torch.
    from elasticrec.run import resolve_run
    from elasticrec.training.predict import load_checkpoint

    loaded = load_checkpoint(resolve_run(run), best=best)
    table = loaded.state.embedding.table

    def rows(signs: list[int]) -> list[Row | None]:
        found = [table.get(sign) for sign in signs]
        return [None if row is None else Row(row[3], row[0], row[1]) for row in found]

    def pull(batch: _core.Batch) -> Values:
        pooled: Values = loaded.state.embedding.pull(batch).detach().numpy()
        return pooled

    def read(sample: bytes | RowAddress) -> tuple[_core.Batch, Callable[[], Values]]:
        batch = loaded.parse(sample) if isinstance(sample, bytes) else loaded.read_row(*sample)
        return batch, lambda: loaded.scores(batch)

    return ExplainSource(str(loaded.checkpoint.path), loaded.job.features(), rows, table.width, read, pull)


def _version_source(model: str) -> ExplainSource:
    fetched = find_chain(model)
    path, manifest = fetched.directory, fetched.version.manifest
    view = open_rows(fetched)

    def rows(signs: list[int]) -> list[Row | None]:
        weights, present = view.lookup(np.array(signs, np.uint64))
        return [Row(row.tolist()) if found else None for row, found in zip(weights, present, strict=True)]

    width = sum(column["width"] for column in manifest["table"]["columns"])
    predictor = _core.Predictor(str(path), str(library_path()))
    parser = _core.Parser(json.dumps(manifest["features"]))

    def read(sample: bytes | RowAddress) -> tuple[_core.Batch, Callable[[], Values]]:
        if (format := manifest["features"]["format"]) in ("parquet", "reader") or not isinstance(sample, bytes):
            what = "lines need the reader of the job" if format == "reader" else "Parquet needs the job's columns"
            raise SampleError(f"{path}: {what}; use --checkpoint RUN instead of --model")
        return parser.parse(sample, labels=False), lambda: predictor.predict(sample)

    return ExplainSource(str(path), manifest["features"], rows, width, read, labels=manifest["graph"].get("labels"))
