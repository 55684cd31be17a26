"""The audit is exact for every format, and finds and names every kind of damage."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.audit.audit import Audit, audit_run
from elasticrec.audit.part import PartFile, partition_of
from elasticrec.cli import main
from elasticrec.config import Job
from elasticrec.errors import ModelError, SampleError
from elasticrec.run import Run
from elasticrec.training.embedding import Embedding
from elasticrec.training.loop import train_job
from support.parts import Blocks, first_row, reseal, rewrite
from support.small import MakeJob, WriteSamples
from support.tables import as_csv, rows, write, write_kind

UPKEEP = {"decay": {"show_click": 0.6}, "evict": {"min_score": 0.5, "max_age": 1}}

READER = """
import json

class Json:
    def parse(self, line):
        row = json.loads(line)
        if row["note"] == "z":
            return None
        return {"user": row["user_id"], "tags": row["tags"], "price": row["price"], "click": row["click"]}
"""


pytestmark = pytest.mark.usefixtures("own_directory")


def audit(job: Job) -> Audit:
    return audit_run(Run.of(job))


def expect_no_difference(job: Job) -> Audit:
    found = audit(job)
    assert found.lines()[:-1] == []
    assert found.lines()[-1].endswith(": nothing differs")
    assert found.num_signs > 20
    return found


def columns(**changes: Any) -> dict[str, Any]:
    return {
        "labels": "click",
        "sparse": ["user_id", {"name": "tags", "separator": "|"}, {"name": "why", "column": "note"}],
        "dense": ["price", {"name": "visits", "normalize": "log", "buckets": 6}],
        **changes,
    }


FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "slots": ("slots", {"format": "slots", "slots": [101, 102, {"name": "n", "column": 103}]}),
    "slots separated": (
        "slots.gz",
        {"format": "slots", "slots": [101, 102], "separate_slots": True, "modulo": 1009, "padding": 3},
    ),
    "slots sequence": ("slots", {"format": "slots", "slots": [101, {"name": 102, "sequence": 1}]}),
    "paddlerec": (
        "paddlerec",
        {
            "format": "paddlerec",
            "slots": ["user", {"name": "tags", "sequence": 2}, 3],
            "dense": [{"name": "dense_feature", "count": 2, "buckets": 3}],
            "padding": "t3",
        },
    ),
    "criteo": ("criteo", {"format": "criteo", "buckets": 6}),
    "csv": ("csv", {"format": "csv", "columns": columns(null=["t1", "x"]), "padding": "t2"}),
    "csv.zst": ("csv.zst", {"format": "csv", "columns": columns(), "eval": {"ratio": 0.3}}),
    "tsv": (
        "tsv",
        {
            "format": "csv",
            "columns": columns(delimiter="\t", time="at", weight="visits"),
            "eval": {"time": "2023-11-14T23:30"},
        },
    ),
    "parquet": (
        "parquet",
        {
            "format": "parquet",
            "columns": columns(
                sparse=["user_id", {"name": "tags", "sequence": 2}, {"name": "n", "column": "note", "share": "tags"}],
                null=["t1", "x"],
                weight="visits",
            ),
            "padding": "t2",
            "eval": {"ratio": 0.3},
        },
    ),
    "parquet by time": (
        "parquet",
        {"format": "parquet", "columns": columns(time="at"), "eval": {"time": "2023-11-14T23:30"}, "modulo": 997},
    ),
    "reader": (
        "json.gz",
        {"reader": "reader.py:Json", "slots": ["user", "tags"], "dense": ["price"], "eval": {"ratio": 0.1}},
    ),
}


@pytest.mark.parametrize("upkeep", [False, True], ids=["", "upkeep"])
@pytest.mark.parametrize("name", FORMATS)
def test_nothing_differs_in_any_format(make_job: MakeJob, tmp_path: Path, name: str, upkeep: bool) -> None:
    kind, data = FORMATS[name]
    (tmp_path / "reader.py").write_text(READER)
    path = write_kind(tmp_path, kind, rows(700))
    sparse = UPKEEP if upkeep else {}
    job = make_job(
        data={"slots": None, "unit_bytes": 9000, "format": "reader", "max_bad_ratio": 0.1, **data, "train": path.name},
        sparse=sparse,
        train={"epochs": 3 if upkeep else 1},
    )
    summary = train_job(job)
    found = expect_no_difference(job)
    assert found.num_samples == summary.progress.samples > 300
    assert found.num_signs == summary.rows
    assert (summary.progress.evicted > 0) == upkeep


def test_odd_records_are_counted_as_in_training(make_job: MakeJob, tmp_path: Path) -> None:
    """Bad records and blank lines are not counted; unusual but valid records are."""
    lines = [
        b"\xef\xbb\xbf1 0 5:0 6:1 7:2",
        b"",
        b"  \t ",
        b"3 2 5:0\t6:1  18446744073709551615:2 9:77\r",
        b"1 0 18446744073709551616:0",
        b"1 2 5:0",
        b"0 0 5:0",
        b"1 0 x:0 5:0",
        b"1 0 5:",
        b"1 0 007:0 5:00",
        b"1 0 5:0 buy=1",
        b"1 0 5:0 buy",
        b"4294967295 4294967295 5:0",
        b"4294967296 0 5:0",
        b"1",
        *(b"1 0 %d:0" % sign for sign in range(100, 600)),
        b"2 1 5:0 5:0 5:1",
    ]
    (tmp_path / "train.txt").write_bytes(b"\n".join(lines))
    job = make_job(data={"max_bad_ratio": 1, "unit_bytes": 4096}, train={"epochs": 2})
    summary = train_job(job)
    assert summary.progress.bad_records == 16
    assert expect_no_difference(job).num_samples == summary.progress.samples == 2 * 506


ODD_FIELDS = [
    ("1,u1,a|b||a,2.5,x,1,2026-01-02T00:00:00Z,?", True),
    ("true,u2,,,y,1e3,1767225600,", True),
    ("0.4999999999,u3,a,NA,z,1,2026-01-01 01:00:00+01:00,", True),
    ("0.49,u4,a, 7 ,z,1,2026-01-01,", True),
    ("click,user,tags,price,note,w,at,rest", False),
    ('"click",user,tags,price,note,w,at,"rest"', False),
    ('0,"u,""5""",NA,,,1,0,', True),
    ('1,"u6"x,a"b"c,.5,5.,1,0,', True),
    ('0,u7,"a,5,x,1,0,', False),
    ("NA,u8,a,1,x,1,0,", False),
    ("2,u9,a,1,x,1,0,", False),
    ("1,u10,a,dear,x,1,0,", False),
    ("1,u11,a,inf,x,1,0,", False),
    ("1,u12,a,1_0,x,1,0,", False),
    ("1,u13,a,1,x,0,0,", False),
    ("1,u14,a,1,x,1,soon,", False),
    ("1,u15,a,1,x,1,2026-02-30,", False),
    ("1,u16,a,1,x,1,0", False),
    ("0,ü17,ä|NA,-3,x,+1,-5,", True),
]


def test_odd_csv_fields_are_counted_as_in_training(make_job: MakeJob, tmp_path: Path) -> None:
    plain = [f"0,v{number},t{number},{number},x,1,0," for number in range(30)]
    text = "\n".join(["click,user,tags,price,note,w,at,rest", *(line for line, _ in ODD_FIELDS), *plain])
    (tmp_path / "train.csv").write_text(text)
    data = {
        "format": "csv",
        "train": "train.csv",
        "slots": None,
        "max_bad_ratio": 1,
        "columns": {
            "labels": "click",
            "sparse": ["user", {"name": "tags", "separator": "|"}, {"name": "note", "share": "user"}],
            "dense": [{"name": "price", "buckets": 5}],
            "weight": "w",
            "time": "at",
            "null": ["NA"],
        },
    }
    job = make_job(data=data)
    summary = train_job(job)
    assert expect_no_difference(job).num_samples == summary.progress.samples == 30 + sum(good for _, good in ODD_FIELDS)


def test_uncertain_records_are_reported(make_job: MakeJob, tmp_path: Path) -> None:
    text = as_csv(rows(300)) + b'0,1,"a\rb",1,1,1700000000,x\n'
    write(tmp_path / "train.csv", text)
    job = make_job(
        data={"format": "csv", "train": "train.csv", "slots": None, "columns": columns(), "max_bad_ratio": 1}
    )
    train_job(job)
    assert "not certain: 1 records have a quoted line with a carriage return in it" in audit(job).lines()


@pytest.mark.parametrize("times", [0, 2])
def test_a_batch_not_applied_exactly_once_is_found(
    make_job: MakeJob, write_samples: WriteSamples, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The main fault that the audit must find."""
    write_samples(count=400)
    push = Embedding.push

    def faulty(embedding: Embedding, batch: Any, *arguments: Any, **options: Any) -> bool:
        applied = True
        for _ in range(times if batch.index == 3 else 1):
            applied = push(embedding, batch, *arguments, **options)
        return applied

    monkeypatch.setattr(Embedding, "push", faulty)
    job = make_job()
    train_job(job)
    found = audit(job)
    assert found.wrong > 10 and found.extra == 0 and (found.missing > 0) == (times == 0)
    assert f", 1 pass, 400 samples, {found.num_signs} signs: {found.missing} missing rows, " in found.lines()[-1]


# Damage


@pytest.fixture
def trained(make_job: MakeJob, write_samples: WriteSamples) -> tuple[Job, Path]:
    """Return a run with two epochs and its last checkpoint."""
    write_samples(count=400)
    job = make_job(train={"epochs": 2}, data={"unit_bytes": 4096})
    train_job(job)
    expect_no_difference(job)
    return job, sorted(Run.of(job).checkpoints.glob("step-*"))[-1]


def test_one_wrong_count_is_found_and_named(trained: tuple[Job, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, checkpoint = trained
    seen: list[tuple[int, int, int]] = []

    def change(blocks: Blocks, meta: Any) -> None:
        block, size, row = first_row(blocks, meta)
        struct.pack_into("<I", block["block"], size - 10, row[1] + 1)
        seen.append(row)

    rewrite(checkpoint / "table/part-00000", change)
    reseal(checkpoint, "checkpoint")
    assert main(["audit", "small"]) == 1
    sign, show, click = seen[0]
    first, summary = capsys.readouterr().out.splitlines()
    assert first == f"sign {sign}: expected show {show} and click {click}, got {show + 1} and {click}"
    assert summary.endswith("signs: 0 missing rows, 0 extra rows, 1 wrong counts")


def test_a_missing_and_an_extra_row_are_found_and_named(trained: tuple[Job, Path]) -> None:
    job, checkpoint = trained
    seen: list[tuple[int, int, int]] = []
    extra_sign = next(sign for sign in range(10**6, 2 * 10**6) if partition_of(np.array([sign], np.uint64), 4)[0] == 3)

    def change(blocks: Blocks, meta: Any) -> None:
        block, size, row = first_row(blocks, meta)
        del block["block"][:size]
        block["rows"] -= 1
        seen.append(row)
        last = blocks[3]
        last["block"] += struct.pack("<Q", extra_sign) + bytes(size - 18) + struct.pack("<IIH", 2, 1, 0)
        last["rows"] += 1

    rewrite(checkpoint / "table/part-00000", change)
    reseal(checkpoint, "checkpoint")
    found = audit(job)
    assert (found.missing, found.extra, found.wrong, found.problems) == (1, 1, 0, [])
    sign, show, click = seen[0]
    assert f"sign {sign}: expected show {show} and click {click}, got no row" in found.lines()
    assert f"sign {extra_sign}: expected no row, got show 2 and click 1" in found.lines()


def test_only_the_first_rows_are_listed(trained: tuple[Job, Path]) -> None:
    job, checkpoint = trained

    def change(blocks: Blocks, meta: Any) -> None:
        for block in blocks:
            block.update(rows=0, block=bytearray())

    rewrite(checkpoint / "table/part-00000", change)
    reseal(checkpoint, "checkpoint")
    found = audit(job)
    assert found.missing == found.num_signs > 40
    assert len(found.lines()) == 22 and found.lines()[20] == f"and {found.missing - 20} more rows"


def test_misplaced_rows_and_missing_partitions_are_found(trained: tuple[Job, Path]) -> None:
    job, checkpoint = trained

    def change(blocks: Blocks, meta: Any) -> None:
        blocks[1]["block"], blocks[2]["block"] = blocks[2]["block"], blocks[1]["block"]
        blocks[1]["rows"], blocks[2]["rows"] = blocks[2]["rows"], blocks[1]["rows"]
        del blocks[3]

    rewrite(checkpoint / "table/part-00000", change)
    reseal(checkpoint, "checkpoint")
    lines = audit(job).lines()
    assert "partition 3: expected once in the files `part-00000`, got 0 times" in lines
    assert sum("rows belong to other partitions, such as sign" in line for line in lines) == 2


def test_the_samples_in_the_manifest_are_checked(trained: tuple[Job, Path]) -> None:
    job, checkpoint = trained
    reseal(checkpoint, "checkpoint", lambda manifest: manifest.update(samples=manifest["samples"] - 1))
    assert audit(job).problems == ["samples: expected 800, got 799 in the manifest"]


def test_units_must_cover_each_byte_once(trained: tuple[Job, Path]) -> None:
    job, _ = trained
    path = Run.of(job).units / "epoch-00001.jsonl"
    *lines, _ = path.read_bytes().splitlines(keepends=True)
    dropped = json.loads(lines.pop())

    def seal() -> None:
        path.write_bytes(
            b"".join(lines) + json.dumps({"sha256": hashlib.sha256(b"".join(lines)).hexdigest()}).encode() + b"\n"
        )

    seal()
    assert any(f"expected a unit from {dropped['start']} on" in line or "up to" in line for line in audit(job).problems)
    lines.append(lines[0])
    seal()
    assert any("pass 1: expected units" in line for line in audit(job).problems)
    lines[0] = b"{}\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(ModelError, match=r"epoch-00001\.jsonl: the checksum in its last line differs"):
        audit(job)


def test_every_flipped_byte_of_a_part_file_is_found(trained: tuple[Job, Path]) -> None:
    _, checkpoint = trained
    path = checkpoint / "table/part-00000"
    content = path.read_bytes()
    size = len(content)
    chosen = {0, 9, 20, 63, 64, 100, size // 2, *range(size - 64 * 8, size, 5)}
    for at in sorted(chosen):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ModelError):
            file = PartFile(path, 1)
            for entry in file.entries:
                file.rows(entry)
    path.write_bytes(content[:-1])
    with pytest.raises(ModelError, match="not a part file, or damaged"):
        PartFile(path, 1)


# Runs that cannot be audited


def test_changed_data_is_refused(trained: tuple[Job, Path], tmp_path: Path) -> None:
    job, _ = trained
    with (tmp_path / "train.txt").open("a") as file:
        file.write("1 0 5:0\n")
    with pytest.raises(SampleError, match=r"train\.txt: changed since it was trained on"):
        audit(job)


def test_a_checkpoint_within_an_epoch_is_refused(
    make_job: MakeJob, write_samples: WriteSamples, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples(count=400)
    job = make_job()
    train_job(job, callback=lambda _: False)
    capsys.readouterr()
    assert main(["audit", "small"]) == 2
    error = capsys.readouterr().err
    assert "is from the middle of epoch 1, expected the end of an epoch" in error and error.count("\n") == 1


def test_a_run_without_a_checkpoint_is_refused(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=10)
    job = make_job()
    Run.create(job)
    with pytest.raises(ModelError, match="small: expected a checkpoint to audit, got none"):
        audit(job)


def test_a_warm_start_keeps_counts_and_evicts_old_rows(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples(count=400)
    write_samples("more.txt", count=100, seed=5)
    start = train_job(make_job(train={"epochs": 2}))
    data, train = {"train": "more.txt"}, {"warm_start": "small", "epochs": 2}
    job = make_job(name="warm", data=data, sparse={"evict": {"max_age": 1}}, train=train)
    train_job(job)
    found = audit(job)
    assert not found.differs and found.num_samples == 200
    assert found.num_signs > start.rows, "rows of the start are not too old after two epochs"
    assert found.notes[0].startswith("the counts include those of ")
    train_job(make_job(name="warm", data=data, sparse={"evict": {"max_age": 1}}, train={**train, "epochs": 3}))
    later = audit(job)
    assert not later.differs and later.num_signs < found.num_signs, "after three epochs the rows are too old"


def test_without_xxhash_the_error_says_what_to_install(
    trained: tuple[Job, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("elasticrec.audit.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert main(["audit", "small"]) == 2
    assert (
        capsys.readouterr().err == "error: this command needs `xxhash`; install it: pip install 'elasticrec[audit]'\n"
    )
