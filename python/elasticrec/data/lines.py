"""Raw lines of data files, plain or compressed: what is looked at before anything is parsed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from elasticrec import _core
from elasticrec.config.data import Select
from elasticrec.data.units import is_compressed, text_ranges

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
_BATCH_SIZE = 16384

T = TypeVar("T")


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
    ranges = text_ranges(path, stat.st_size, _PIECE_BYTES)
    return [(id, str(path), start, end, 0, stat.st_size, stat.st_mtime_ns) for id, (start, end) in enumerate(ranges)]


def some_spans(path: Path, num_bytes: int) -> list[tuple[int, int]] | None:
    """Ranges at the start, in the middle and at the end of a plain file; None where all of it is to be read."""
    size = path.stat().st_size
    if size <= num_bytes or is_compressed(path):
        return None
    part = num_bytes // 3
    middle = (size - part) // 2
    return [(0, part), (middle, middle + part), (size - part, size)]


def some_lines(path: Path, num_lines: int, num_bytes: int) -> list[bytes]:
    """Lines from all over a file, or from its start, middle and end; of a compressed one those of the start."""
    parser = any_parser()
    if is_compressed(path):
        return first_lines(path, num_lines)
    spans = some_spans(path, num_bytes) or [(0, path.stat().st_size)]
    part = -(-num_lines // len(spans))
    batches = (record_batches(path, parser, batch_size=_BATCH_SIZE, span=span) for span in spans)
    lines = ([line for batch in some for line in lines_of(batch.text())] for some in batches)
    return [line for some in lines for line in spread(some, part)]


def first_lines(path: Path, num_lines: int) -> list[bytes]:
    """Lines of the start of a file, without blank ones."""
    return _first(record_batches(path, any_parser(), batch_size=num_lines), num_lines)


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


def spread(items: list[T], count: int) -> list[T]:
    """At most `count` of the items, evenly, the first and the last among them."""
    if len(items) <= count:
        return items
    if count == 1:
        return items[:1]
    return [items[round(at * (len(items) - 1) / (count - 1))] for at in range(count)]
