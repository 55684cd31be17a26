"""The speed of the parser: lines in memory to batches, each sign named once, on one core."""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.config import Job, match_files, parse_job

_BATCH = 512
FORMATS = ("slots", "criteo")


def run(samples: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """MB/s of each text format, each the median of `repeats`."""
    result: dict[str, Any] = {"samples": samples, "repeats": repeats}
    with tempfile.TemporaryDirectory(prefix="elasticrec-bench-") as scratch, contextlib.chdir(scratch):
        for format in FORMATS:
            say(f"{format}: {samples:,} generated samples")
            slots = 26 if format == "criteo" else 20
            _core.write_demo(
                format,
                samples=samples,
                slots=slots,
                hours=1,
                seed=1,
                format=format,
                overwrite=True,
                threads=1,
                progress=None,
            )
            data: dict[str, Any] = {"format": format, "train": [format]}
            if format == "slots":
                data["slots"] = [f"0-{slots - 1}"]
            job = parse_job({"name": "bench", "data": data}, base=Path.cwd(), source="bench")
            rates = [parse_rate(job) for _ in range(repeats)]
            result[f"{format}_mb_per_s"] = round(statistics.median(rates), 1)
    return result


def parse_rate(job: Job) -> float:
    """MB/s of the job's first file, by the CPU time of this thread."""
    parser = _core.Parser(json.dumps(job.features()))
    content = match_files(job, "train")[0].read_bytes()
    lines = content.splitlines(keepends=True)
    chunks = [b"".join(lines[at : at + _BATCH]) for at in range(0, len(lines), _BATCH)]
    parser.parse(chunks[0], labels=True)
    start = time.thread_time()
    for chunk in chunks:
        parser.parse(chunk, labels=True)
    return len(content) / 1e6 / (time.thread_time() - start)
