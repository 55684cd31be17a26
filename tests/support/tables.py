"""The same rows in every format, for the tests of `init`, `stats`, `convert` and `split`."""

import csv
import gzip
import io
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.data.batches import open_batches
from elasticrec.data.header import check_headers, with_names
from elasticrec.data.units import UnitSplit, plan_units

Row = dict[str, Any]

COLUMNS = ["click", "user_id", "tags", "price", "visits", "at", "note"]
FIRST_AT = 1_700_000_000


def rows(count: int = 1500, seed: int = 1) -> list[Row]:
    """Return samples whose click depends on the user; some have no tags or price."""
    chance = random.Random(seed)
    made = []
    for number in range(count):
        user = int(chance.paretovariate(0.8)) % 150
        made.append(
            {
                "click": int(chance.random() < (0.8 if user % 3 == 0 else 0.1)),
                "user_id": 1_000_000 + user,
                "tags": [f"t{chance.randint(0, 9)}" for _ in range(chance.randint(0, 3))],
                "price": round(chance.random() * 100, 2) if chance.random() < 0.9 else None,
                "visits": int(chance.paretovariate(1)),
                "at": FIRST_AT + 10 * number,
                "note": chance.choice(["x", "y", "z"]),
            }
        )
    return made


def as_csv(data: Iterable[Row], delimiter: str = ",", *, header: bool = True, null: str = "") -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n")
    if header:
        writer.writerow(COLUMNS)
    for row in data:
        values = {**row, "tags": "|".join(row["tags"]), "price": null if row["price"] is None else row["price"]}
        writer.writerow([values[name] for name in COLUMNS])
    return out.getvalue().encode()


def as_json(data: Iterable[Row]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in data).encode()


def as_paddlerec(data: Iterable[Row]) -> bytes:
    lines = []
    for row in data:
        fields = [
            f"click:{row['click']}",
            f"dense_feature:{(row['price'] or 0) / 100}",
            f"dense_feature:{row['visits']}",
        ]
        fields += [f"user:{row['user_id']}", *(f"tags:{tag}" for tag in row["tags"]), f"3:{row['note']}"]
        lines.append(" ".join(fields) + "\n")
    return "".join(lines).encode()


def as_slots(data: Iterable[Row]) -> bytes:
    lines = []
    for row in data:
        show = 1 + row["visits"] % 3
        fields = [f"{row['user_id']}:101", *(f"{tag[1:]}:102" for tag in row["tags"]), f"{5000 + ord(row['note'])}:103"]
        lines.append(f"{show} {row['click'] * show} {' '.join(fields)}\n")
    return "".join(lines).encode()


def as_criteo(data: Iterable[Row]) -> bytes:
    lines = []
    for row in data:
        numbers = [str(row["visits"]), "", *["-1"] * 11]
        categories = [f"{row['user_id']:08x}", row["note"], *["68fd1e64"] * 23, ""]
        lines.append("\t".join([str(row["click"]), *numbers, *categories]) + "\n")
    return "".join(lines).encode()


def write(path: Path, content: bytes) -> Path:
    """Write a file, compressed according to its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        content = gzip.compress(content, mtime=0)
    elif path.suffix == ".zst":
        content = pa.compress(content, codec="zstd", asbytes=True)
    path.write_bytes(content)
    return path


def write_parquet(path: Path, data: list[Row], **changes: Any) -> Path:
    columns: dict[str, Any] = {name: [row[name] for row in data] for name in COLUMNS} | changes
    pq.write_table(pa.table(columns), path, row_group_size=200)
    return path


WRITERS = {
    "slots": ("data.txt", as_slots),
    "slots.gz": ("data.txt.gz", as_slots),
    "paddlerec": ("data.txt", as_paddlerec),
    "criteo": ("data.tsv", as_criteo),
    "csv": ("data.csv", as_csv),
    "csv.zst": ("data.csv.zst", as_csv),
    "tsv": ("data.tsv", lambda data: as_csv(data, "\t")),
    "json": ("data.jsonl", as_json),
    "json.gz": ("data.jsonl.gz", as_json),
    "parquet": ("data.parquet", None),
}


def write_kind(directory: Path, kind: str, data: list[Row]) -> Path:
    """Write the rows in a format to a file in the directory."""
    name, make = WRITERS[kind]
    if make is None:
        return write_parquet(directory / name, data)
    return write(directory / name, make(data))


def batches_of(job: Job, *, shuffle: bool = False, held_out: bool = False, skip: int = 0) -> list[_core.Batch]:
    """Return the batches of a job in file order, or shuffled as in an epoch."""
    job = with_names(job)
    files = match_files(job, "eval" if held_out else "train")
    check_headers(job, files)
    units = plan_units(files, UnitSplit(job.data.unit_bytes, shuffle, 1, "digest", job.data.format), 0, 0)
    parser = _core.Parser(json.dumps(job.features()))
    options = {"shuffle": shuffle, "held_out": held_out, "skip_batches": skip}
    with closing(open_batches(job, parser, units, **options)) as batches:
        return list(batches)


def samples_of(batches: Iterable[_core.Batch]) -> Iterator[tuple[Any, ...]]:
    """Yield a tuple per sample: signs of each slot, dense values, labels, weight."""
    for batch in batches:
        num_slots = (len(batch.offsets) - 1) // max(batch.num_samples, 1)
        for b in range(batch.num_samples):
            bounds = batch.offsets[b * num_slots : (b + 1) * num_slots + 1]
            signs = tuple(tuple(batch.signs[i:j].tolist()) for i, j in itertools.pairwise(bounds))
            yield signs, tuple(batch.dense[b].tolist()), tuple(batch.labels[b].tolist()), float(batch.weights[b])
