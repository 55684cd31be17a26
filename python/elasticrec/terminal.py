"""Text for a terminal: progress of long commands, aligned columns."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import typer

_EVERY_S = 0.2


@contextmanager
def progress_line(total: int | None) -> Iterator[Callable[[int], None]]:
    """Yield a function that shows the number of samples done, of `total` if known; the line is cleared at the end."""
    shown = 0.0

    def show(done: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - shown > _EVERY_S:
            shown = time.monotonic()
            text = f"{done / total:4.0%} {done:,} of {total:,}" if total else f"{done:,}"
            typer.echo(f"\r\x1b[2K{text} samples", err=True, nl=False)

    try:
        yield show
    finally:
        if shown:
            typer.echo("\r\x1b[2K", err=True, nl=False)


def align_columns(rows: Sequence[Sequence[str]], left: tuple[int, ...] = ()) -> list[str]:
    """Return rows as lines with aligned columns: to the left for columns in `left`, to the right for all others."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number in left else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
