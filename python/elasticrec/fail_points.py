"""Fail points: points in the code where a test can kill the process (also `crates/ps/src/fail.rs`)."""

import os
import signal
import sys
from collections import Counter
from pathlib import Path

_hits: Counter[str] = Counter()


def fail_point(name: str) -> None:
    """Kill the process if a test asks for it: a file `NAME.ANYTHING` with the number n kills it at the nth call."""
    directory = os.environ.get("ELASTICREC_FAIL_POINTS")
    if directory is None:
        return
    _hits[name] += 1
    for path in sorted(Path(directory).glob(f"{name}.*")):
        try:
            if _hits[name] < int(path.read_text()):
                continue
            # If two processes reach the same point, only one can remove the file.
            path.unlink()
        except (FileNotFoundError, ValueError):
            continue
        print(f"killed at fail point {name}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
