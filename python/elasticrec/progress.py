"""Progress of long commands on a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
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
