"""Raw lines of data files, plain or compressed, before they are parsed."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from elasticrec import _core
from elasticrec.config.data import Select
from elasticrec.data.units import is_compressed, text_ranges

# A format in which every line that is not blank is a record.
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
    """Return a parser that takes every line that is not blank as a record."""
    return _core.Parser(_ANY)


def record_batches(
    path: Path,
    parser: _core.Parser,
    *,
    batch_size: int,
    span: tuple[int, int] | None = None,
    select: Select | None = None,
) -> Iterator[_core.RecordBatch]:
    """Yield the records of a file in order; `span` selects those that begin in a byte range of a plain file."""
    options = _core.BatchOptions(
        batch_size=batch_size, shuffle=False, seed=0, skip_batches=0, piece_bytes=_PIECE_BYTES, select=select
    )
    spans = [span] if span else text_ranges(path, path.stat().st_size, _PIECE_BYTES)
    return iter(_core.RecordReader(parser, core_units(path, spans), options))


def core_units(path: Path, spans: Iterable[tuple[int, int]]) -> list[tuple[int, str, int, int, int, int, int]]:
    """Return byte ranges of a file as units for the Rust readers."""
    stat = path.stat()
    return [(id, str(path), start, end, 0, stat.st_size, stat.st_mtime_ns) for id, (start, end) in enumerate(spans)]


def some_spans(path: Path, num_bytes: int) -> list[tuple[int, int]] | None:
    """Return byte ranges at the start, middle and end of a plain file; None if the whole file should be read."""
    size = path.stat().st_size
    if size <= num_bytes or is_compressed(path):
        return None
    part = num_bytes // 3
    middle = (size - part) // 2
    return [(0, part), (middle, middle + part), (size - part, size)]


def some_lines(path: Path, num_lines: int, num_bytes: int) -> list[bytes]:
    """Return some lines, spread over the file, or over its start, middle and end if it is large.

    A compressed file gives its first lines.
    """
    parser = any_parser()
    if is_compressed(path):
        return first_lines(path, num_lines)
    spans = some_spans(path, num_bytes) or [(0, path.stat().st_size)]
    part = -(-num_lines // len(spans))
    batches = (record_batches(path, parser, batch_size=_BATCH_SIZE, span=span) for span in spans)
    lines = ([line for batch in some for line in lines_of(batch.text())] for some in batches)
    return [line for some in lines for line in spread(some, part)]


def first_lines(path: Path, num_lines: int) -> list[bytes]:
    """Return the first lines of a file, without blank ones."""
    return _first(record_batches(path, any_parser(), batch_size=num_lines), num_lines)


def _first(batches: Iterator[_core.RecordBatch], count: int) -> list[bytes]:
    lines: list[bytes] = []
    for batch in batches:
        lines += lines_of(batch.text())
        if len(lines) >= count:
            break
    return lines[:count]


def lines_of(text: bytes) -> list[bytes]:
    """Split the text of records into lines; the text ends with a line end."""
    return text.split(b"\n")[:-1]


def suffix_of(path: Path) -> str:
    """Return the ending of a file name with its compression, such as `.csv.gz`."""
    return "".join(path.suffixes[-2:]) if path.suffix in (".gz", ".zst") else path.suffix


def spread(items: list[T], count: int) -> list[T]:
    """Return at most `count` of the items, evenly spaced from the first to the last."""
    if len(items) <= count:
        return items
    if count == 1:
        return items[:1]
    return [items[round(at * (len(items) - 1) / (count - 1))] for at in range(count)]
