"""Fail points: places at which a test lets a process die, as it could die there by itself (`crates/ps/src/fail.rs`)."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

_hits: Counter[str] = Counter()


def fail_point(name: str) -> None:
    """End the process here if a test wants it: a file `NAME.ANYTHING` that says `n` is for the nth time."""
    directory = os.environ.get("ELASTICREC_FAIL_POINTS")
    if directory is None:
        return
    _hits[name] += 1
    for path in sorted(Path(directory).glob(f"{name}.*")):
        try:
            if _hits[name] < int(path.read_text()):
                continue
            # of two processes at the same point only one can remove the file
            path.unlink()
        except (FileNotFoundError, ValueError):
            continue
        print(f"dies at the fail point {name}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
