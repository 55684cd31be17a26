"""Raw lines of data files, plain or compressed: what is looked at before anything is parsed."""

import json
from collections.abc import Iterator
from pathlib import Path

from elasticrec import _core
from elasticrec.config.data import Select

# Lines of a format that nobody has named yet: every line that is not blank is a record.
_ANY = json.dumps(
    {
        "format": "reader",
        "hash": 1,
        "slots": [{"name": "any", "pooling": "sum"}],
        "dense": [],
        "labels": ["click"],
    }
)
_PIECE_BYTES = 4 * 2**20


def any_parser() -> _core.Parser:
    """A parser for which every line that is not blank is a record."""
    return _core.Parser(_ANY)


def record_batches(
    path: Path,
    parser: _core.Parser,
    *,
    batch_size: int,
    span: tuple[int, int] | None = None,
    select: Select | None = None,
) -> Iterator[_core.RecordBatch]:
    """The records of a file in its order; `span` takes those that begin in a range of bytes of a plain file."""
    stat = path.stat()
    cut = _core.Cut(
        batch_size=batch_size, shuffle=False, seed=0, skip_batches=0, piece_bytes=_PIECE_BYTES, select=select
    )
    units = [(0, str(path), *span, 0, stat.st_size, stat.st_mtime_ns)] if span else _units(path)
    return iter(_core.RecordReader(parser, units, cut))


def _units(path: Path) -> list[tuple[int, str, int, int, int, int, int]]:
    stat = path.stat()
    ranges = [(0, stat.st_size)] if is_compressed(path) else _core.cut_units(stat.st_size, _PIECE_BYTES)
    return [(id, str(path), start, end, 0, stat.st_size, stat.st_mtime_ns) for id, (start, end) in enumerate(ranges)]


def is_compressed(path: Path) -> bool:
    """Whether a file is gzip or zstd, by its content."""
    with path.open("rb") as file:
        return _core.is_compressed(file.read(4))


def some_spans(path: Path, num_bytes: int) -> list[tuple[int, int]] | None:
    """Ranges at the start, in the middle and at the end of a plain file; None where all of it is to be read."""
    size = path.stat().st_size
    if size <= num_bytes or is_compressed(path):
        return None
    part = num_bytes // 3
    middle = (size - part) // 2
    return [(0, part), (middle, middle + part), (size - part, size)]


def some_lines(path: Path, num_lines: int, num_bytes: int) -> list[bytes]:
    """Lines of the start, the middle and the end of a file; of a compressed one those of the start."""
    spans = some_spans(path, num_bytes)
    parser = any_parser()
    if spans is None:
        return _first(record_batches(path, parser, batch_size=num_lines), num_lines)
    part = -(-num_lines // len(spans))
    return [line for span in spans for line in _first(record_batches(path, parser, batch_size=part, span=span), part)]


def _first(batches: Iterator[_core.RecordBatch], count: int) -> list[bytes]:
    lines: list[bytes] = []
    for batch in batches:
        lines += lines_of(batch.text())
        if len(lines) >= count:
            break
    return lines[:count]


def lines_of(text: bytes) -> list[bytes]:
    """The lines of records, each of which has a line end."""
    return text.split(b"\n")[:-1]


def spread(files: list[Path], count: int) -> list[Path]:
    """At most `count` of the files, the first and the last among them."""
    if len(files) <= count:
        return files
    if count == 1:
        return files[:1]
    return [files[round(at * (len(files) - 1) / (count - 1))] for at in range(count)]
