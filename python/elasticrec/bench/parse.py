"""The speed of the parser: lines in memory to batches with deduplicated signs, on one core."""

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.config import Job, match_files, parse_job
from elasticrec.config.data import CRITEO_DENSE, CRITEO_SLOTS

_BATCH = 512
FORMATS = ("slots", "criteo", "paddlerec", "csv")


def run(samples: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return MB/s of each text format, the median of `repeats`."""
    result: dict[str, Any] = {"samples": samples, "repeats": repeats}
    with tempfile.TemporaryDirectory(prefix="elasticrec-bench-") as scratch, contextlib.chdir(scratch):
        for format in FORMATS:
            say(f"{format}: {samples:,} generated samples")
            data = {"format": format, "train": [format], **_WRITERS[format](Path(format), samples)}
            job = parse_job({"name": "bench", "data": data}, base=Path.cwd(), source="bench")
            rates = [parse_rate(job) for _ in range(repeats)]
            result[f"{format}_mb_per_s"] = round(statistics.median(rates), 1)
    return result


def describe(result: dict[str, Any]) -> list[str]:
    """Return the figures as lines of text."""
    return [f"{format}: {result[f'{format}_mb_per_s']:,.0f} MB/s per core" for format in FORMATS]


def _write_slots(out: Path, samples: int) -> dict[str, Any]:
    write_demo(out, samples, "slots", 20)
    return {"slots": ["0-19"]}


def _write_criteo(out: Path, samples: int) -> dict[str, Any]:
    write_demo(out, samples, "criteo", 26)
    return {}


def write_demo(out: Path, samples: int, format: str, slots: int) -> None:
    """Generate samples of one hour in a directory."""
    _core.write_demo(
        str(out),
        samples=samples,
        slots=slots,
        hours=1,
        seed=1,
        format=format,
        overwrite=True,
        threads=1,
        progress=None,
    )


def _criteo_fields(samples: int) -> Iterator[list[str]]:
    """Yield the fields of Criteo rows: label, 13 numbers, 26 categories."""
    if not Path("criteo").is_dir():
        _write_criteo(Path("criteo"), samples)
    for path in sorted(Path("criteo").rglob("*.txt")):
        for line in path.read_text().splitlines():
            yield line.split("\t")


def _write_paddlerec(out: Path, samples: int) -> dict[str, Any]:
    """Write Criteo rows in the layout of PaddleRec's own example."""
    out.mkdir()
    with (out / "part.txt").open("w") as file:
        for label, *fields in _criteo_fields(samples):
            numbers = (f"dense_feature:{number or 0}" for number in fields[:13])
            slots = (f"{slot}:{value}" for slot, value in enumerate(fields[13:], 1) if value)
            file.write(" ".join([f"click:{label}", *numbers, *slots]) + "\n")
    return {"slots": ["1-26"], "dense": [{"name": "dense_feature", "count": 13}]}


def _write_csv(out: Path, samples: int) -> dict[str, Any]:
    """Write Criteo rows as CSV."""
    out.mkdir()
    names = ["label", *CRITEO_DENSE, *CRITEO_SLOTS]
    with (out / "part.csv").open("w") as file:
        file.write(",".join(names) + "\n")
        file.writelines(",".join(fields) + "\n" for fields in _criteo_fields(samples))
    columns = {"labels": "label", "sparse": list(CRITEO_SLOTS), "dense": list(CRITEO_DENSE), "names": names}
    return {"columns": columns}


_WRITERS: dict[str, Callable[[Path, int], dict[str, Any]]] = {
    "slots": _write_slots,
    "criteo": _write_criteo,
    "paddlerec": _write_paddlerec,
    "csv": _write_csv,
}


def parse_rate(job: Job) -> float:
    """Return MB/s for the job's first file, by the CPU time of this thread."""
    parser = _core.Parser(json.dumps(job.features()))
    content = match_files(job, "train")[0].read_bytes()
    lines = content.splitlines(keepends=True)
    chunks = [b"".join(lines[at : at + _BATCH]) for at in range(0, len(lines), _BATCH)]
    parser.parse(chunks[0], labels=True)
    start = time.thread_time()
    for chunk in chunks:
        parser.parse(chunk, labels=True)
    return len(content) / 1e6 / (time.thread_time() - start)
