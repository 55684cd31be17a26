"""The audit of a run with parameter servers: real processes train, then the checkpoint is damaged."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrec.audit.audit import Audit, audit_run
from elasticrec.config.document import dump
from elasticrec.run import Run
from support.harness import elasticrec, succeed
from support.parts import Blocks, first_row, reseal, rewrite
from support.small import sample_lines

NUM_SAMPLES = 1500
KIND = "ps checkpoint"


def small_job(directory: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        (directory / f"{name}.txt").write_text("".join(f"{line}\n" for line in sample_lines(NUM_SAMPLES // 2, seed)))
    job = {
        "name": "small",
        "data": {"format": "slots", "train": ["a.txt", "b.txt"], "slots": "0-2", "unit_bytes": 4096},
        "model": {"kind": "wide_deep", "dim": 4, "hidden": [8]},
        "sparse": {"partitions": 8, "decay": {"show_click": 0.7}, "evict": {"min_score": 0.6}},
        "train": {"threads": 1, "batch_size": 64, "epochs": 2, "mode": "ps", "servers": 2, "trainers": 2},
    }
    (directory / "job.yaml").write_text(dump(job))


@pytest.mark.slow
def test_a_run_with_servers_is_exact_and_damage_is_named(tmp_path: Path) -> None:
    small_job(tmp_path)
    succeed("train", "job.yaml", cwd=tmp_path)
    text = succeed("audit", "small", cwd=tmp_path)
    assert text.startswith("audited runs/small: ") and text.endswith(" signs: nothing differs\n")
    assert f" units, 2 passes, {2 * NUM_SAMPLES:,} samples, " in text

    run = tmp_path / "runs/small"
    checkpoint = sorted(run.glob("checkpoints/ps-*"))[-1]
    whole = tmp_path / "whole"
    shutil.copytree(checkpoint, whole)

    def damaged(name: str, change: Callable[[Blocks, Any], None]) -> Audit:
        """Audit the checkpoint after one change."""
        shutil.rmtree(checkpoint)
        shutil.copytree(whole, checkpoint)
        rewrite(checkpoint / name, change)
        reseal(checkpoint, KIND)
        return audit_run(Run(run))

    def lose_a_sample(blocks: Blocks, meta: Any) -> None:
        blocks[1]["rows"] -= 1

    assert damaged("shard-00001.dense", lose_a_sample).problems == [
        "partition 5: expected 3,000 samples in its dense slice, got 2,999"
    ]

    def open_unit(blocks: Blocks, meta: Any) -> None:
        meta["records"].append({**meta["records"][0], "open": {"1": {"batches": {"0": 7}, "num_batches": None}}})
        blocks[2]["aux"] = (blocks[2]["aux"][0], len(meta["records"]) - 1)

    (line,) = damaged("shard-00000.dense", open_unit).problems
    assert line.startswith("partition 2: expected all units below ")
    assert line.endswith(" complete, then 0 complete and 1 open units, and 2 ended passes")

    def lose_a_unit(blocks: Blocks, meta: Any) -> None:
        meta["records"][0]["watermark"] -= 1

    found = damaged("shard-00000.dense", lose_a_unit)
    assert len(found.problems) == 4 and found.notes[0].endswith("audit the run after it has ended")

    def lose_a_boundary(blocks: Blocks, meta: Any) -> None:
        meta["records"][0]["boundaries"] = 1

    assert len(damaged("shard-00000.dense", lose_a_boundary).problems) == 4

    def drop_slice(blocks: Blocks, meta: Any) -> None:
        del blocks[3]

    assert damaged("shard-00000.dense", drop_slice).problems == [
        "partition 3: expected once in the files `.dense`, got 0 times"
    ]

    def duplicate_partition(blocks: Blocks, meta: Any) -> None:
        blocks.append({**blocks[3], "partition": 4})

    problems = damaged("shard-00000.rows", duplicate_partition).problems
    assert "partition 4: expected once in the files `.rows`, got 2 times" in problems

    rows: list[tuple[int, int, int]] = []

    def wrong_click(blocks: Blocks, meta: Any) -> None:
        block, size, row = first_row(blocks, meta)
        struct.pack_into("<I", block["block"], size - 6, row[2] + 3)
        rows.append(row)

    found = damaged("shard-00001.rows", wrong_click)
    sign, show, click = rows[0]
    assert found.rows == [f"sign {sign}: expected show {show} and click {click}, got {show} and {click + 3}"]
    result = elasticrec("audit", "small", cwd=tmp_path)
    assert (result.returncode, result.stdout.splitlines()) == (
        1,
        [*found.rows, str(found.lines()[-1]).replace(str(run), "runs/small")],
    )

    def shift_pass(manifest: dict[str, Any]) -> None:
        manifest["passes"][1]["first_unit"] += 1

    shutil.rmtree(checkpoint)
    shutil.copytree(whole, checkpoint)
    reseal(checkpoint, KIND, shift_pass)
    (line,) = audit_run(Run(run)).problems
    assert line.startswith("pass 1: its units differ from the manifest of ")
