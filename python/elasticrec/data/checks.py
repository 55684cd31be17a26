"""Checks of some training data before training: the warnings of `check` and `init`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Job, match_files
from elasticrec.config.columns import BucketSlot
from elasticrec.config.data import Holdout
from elasticrec.data.collisions import CollisionCounter, collision_warning
from elasticrec.data.raw_lines import core_units, record_batches, some_spans, spread
from elasticrec.data.reader import LineReader
from elasticrec.data.stats.arrays import lengths_of

_NUM_FILES = 8
_FILE_BYTES = 2**20
_BATCH_SIZE = 4096
# Fewer lines for a custom reader, which may be slow.
_READER_LINES = 1000
# Number of slots that a warning names.
_SHOWN = 8


def check_data(job: Job) -> list[str]:
    """Return warnings about data that can be trained on but is probably wrong."""
    signs = CollisionCounter(job)
    seen = np.zeros(len(job.data.inputs), np.bool_)
    num_records = num_samples = num_bad = 0
    first_bad: str | None = None
    for batch in some_batches(job):
        num_records += batch.num_records
        num_samples += batch.num_samples
        num_bad += batch.num_bad
        first_bad = first_bad or next(iter(batch.bad), None)
        signs.add(batch)
        seen |= lengths_of(batch, len(seen)).any(axis=0)
    texts = [_overlap_warning(job), collision_warning(job, signs.collisions())]
    if num_records and not num_samples:
        texts.append(f"{job.source}: none of {num_records:,} inspected records is a sample: {first_bad}")
    elif num_samples:
        if num_bad > job.data.max_bad_ratio * num_records:
            texts.append(
                f"{job.source}: data.train: {num_bad:,} of {num_records:,} inspected records are bad "
                f"({num_bad / num_records:.2%}), expected at most {job.data.max_bad_ratio:.2%} "
                f"(data.max_bad_ratio): {first_bad}"
            )
        texts += _empty_warnings(job, seen, num_samples)
    return [text for text in texts if text is not None]


def some_batches(job: Job) -> Iterator[_core.Batch]:
    """Yield samples from a few megabytes of the training data, with unmodified signs."""
    # With a modulo, signs collide on purpose.
    features = {key: value for key, value in job.features().items() if key != "modulo"}
    parser = _core.Parser(json.dumps(features))
    reader = None
    if job.data.reader is not None:
        reader = LineReader(job.data.reader, job.reader_source(), parser, labels=True)
    for path in spread(match_files(job, "train"), _NUM_FILES):
        if job.data.format == "parquet":
            from elasticrec.data.parquet import some_rows

            yield from some_rows(job, parser, path, _BATCH_SIZE)
        elif reader is not None:
            records = next(record_batches(path, parser, batch_size=_READER_LINES), None)
            if records is not None:
                yield reader.batch(records)
        else:
            yield from _text_batches(parser, path)


def _text_batches(parser: _core.Parser, path: Path) -> Iterator[_core.Batch]:
    options = _core.BatchOptions(
        batch_size=_BATCH_SIZE, shuffle=False, seed=0, skip_batches=0, piece_bytes=_FILE_BYTES, select=None
    )
    spans = some_spans(path, _FILE_BYTES) or [(0, path.stat().st_size)]
    reader = _core.BatchReader(parser, core_units(path, spans), options, labels=True, workers=1)
    try:
        num_bytes = 0
        for batch in reader:
            yield batch
            num_bytes += batch.signs.nbytes + batch.offsets.nbytes
            if num_bytes > 4 * _FILE_BYTES:
                break
    finally:
        reader.close()


def _empty_warnings(job: Job, seen: npt.NDArray[np.bool_], num_samples: int) -> Iterator[str]:
    """Warn of slots without a sign and of dense columns without a bucket."""
    empty = [slot for slot, is_seen in zip(job.data.inputs, seen, strict=True) if not is_seen]
    slots = [slot.name for slot in empty if not isinstance(slot, BucketSlot)]
    dense = [slot.buckets.dense for slot in empty if isinstance(slot, BucketSlot)]
    keys = ("data.slots", "data.dense") if job.data.columns is None else ("data.columns.sparse", "data.columns.dense")
    for key, names in zip(keys, (slots, dense), strict=True):
        if names:
            shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            yield f"{job.source}: {key}: none of {num_samples:,} inspected samples has a value of {shown}{more}"


def _overlap_warning(job: Job) -> str | None:
    """Warn if evaluation files are also training files."""
    if isinstance(job.data.eval, Holdout) or not job.data.eval:
        return None
    train = {os.path.realpath(path) for path in match_files(job, "train")}
    files = match_files(job, "eval")
    same = [path for path in files if os.path.realpath(path) in train]
    if not same:
        return None
    what = "its only file is" if len(files) == 1 else f"{len(same):,} of its {len(files):,} files are"
    return (
        f"{job.source}: data.eval: {what} also in data.train ({same[0]}): evaluation on training samples says nothing "
        "about new samples; `data.eval: {ratio: 0.1}` holds out a share of the samples"
    )
