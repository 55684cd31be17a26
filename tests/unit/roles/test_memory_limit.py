"""A parameter server with little memory drops new signs and reports them; the audit takes them into account."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from elasticrec.audit.audit import audit_run
from elasticrec.audit.counts import Counts
from elasticrec.audit.overflow import Overflow
from elasticrec.audit.part import partition_of
from elasticrec.config.document import dump
from elasticrec.config.sparse import Sparse
from elasticrec.run import Run
from support.harness import elasticrec, succeed
from support.parts import reseal, rewrite

NUM_SAMPLES = 2000


def write_job(directory: Path, memory: int, **sparse: object) -> None:
    lines = (f"1 {n % 3 == 0:d} {n % 7}:0 {1000 + n}:1\n" for n in range(NUM_SAMPLES))
    (directory / "train.txt").write_text("".join(lines))
    job = {
        "name": "small",
        "data": {"format": "slots", "train": "train.txt", "slots": "0-1", "unit_bytes": 8192},
        "model": {"kind": "lr"},
        "sparse": {"partitions": 4, **sparse},
        "train": {"threads": 1, "batch_size": 64, "mode": "ps", "ps": {"memory_bytes": memory}},
    }
    (directory / "job.yaml").write_text(dump(job))


@pytest.mark.slow
def test_a_full_server_drops_new_signs_and_the_audit_reports_them(tmp_path: Path) -> None:
    # the metric sums of partition 0 take most of the limit
    write_job(tmp_path, 8 * 2 * (2 * 2**17 + 7) + 4 * 300 * 34)
    succeed("train", "job.yaml", cwd=tmp_path)
    run = tmp_path / "runs/small"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["rows"] < NUM_SAMPLES * 3 // 4
    found = audit_run(Run(run))
    assert not found.differs, found.lines()
    assert found.num_samples == NUM_SAMPLES
    (note,) = found.notes
    assert note.startswith("not exact: 4 partitions were full (train.ps.memory_bytes): ")
    assert not note.endswith(" 0 rows were evicted to make room")
    result = elasticrec("audit", "small", cwd=tmp_path)
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, note)

    # the audit fails if a partition does not report its overflow
    checkpoint = max(run.glob("checkpoints/ps-*"))
    shutil.copytree(checkpoint, tmp_path / "whole")

    def hide(blocks: object, meta: dict[str, object]) -> None:
        del meta["overflow"]

    rewrite(checkpoint / "shard-00000.dense", hide)
    reseal(checkpoint, "ps checkpoint")
    assert audit_run(Run(run)).missing > 0


def test_lost_counts_of_a_full_partition_must_equal_its_report() -> None:
    signs = np.arange(100, dtype=np.uint64)
    chosen = partition_of(signs, 4) == 2
    full = signs[chosen]
    expected = Counts(signs, np.full(100, 3), np.full(100, 1))
    got = Counts(np.delete(signs, int(full[0])), np.full(99, 3), np.full(99, 1))

    def problems(**changes: int) -> list[str]:
        reported = {"signs": 3, "shows": 3, "clicks": 1, "evicted": 0, **changes}
        overflow = Overflow({2: reported}, Sparse(partitions=4))
        ours, theirs = overflow.leave_out(expected, got)
        assert len(ours) == len(theirs) == 100 - len(full), "all other signs are compared exactly"
        return overflow.problems

    assert problems() == []
    (line,) = problems(shows=4)
    assert line == "partition 2 was full: expected 4 lost shows and 1 lost clicks, got 3 and 1"
    assert problems(shows=4, evicted=1) == [], "the counts of evicted rows are unknown"
    got.shows[-1 - int(np.flatnonzero(chosen[::-1])[0])] += 1
    (line,) = problems(evicted=1)
    assert line.startswith(
        f"sign {full[-1]}: expected at most show 3 and click 1, even though its partition was full, "
    )


@pytest.mark.slow
def test_a_memory_limit_that_is_too_small_is_refused_in_one_line(tmp_path: Path) -> None:
    write_job(tmp_path, 8192)
    result = elasticrec("train", "job.yaml", cwd=tmp_path)
    assert result.returncode == 2
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: train.ps.memory_bytes: expected at least ") and last.endswith("got 8192")
