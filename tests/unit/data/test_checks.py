"""`check` inspects a sample of the data and warns about likely mistakes."""

import gzip
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticrec import cli
from support.tables import WRITERS, as_csv, rows, write, write_kind

Capture = pytest.CaptureFixture[str]
METRIC = "class Hits:\n    def update(self, scores, labels, weights): ...\n    def result(self): return {'hits': 1}\n"


pytestmark = pytest.mark.usefixtures("own_directory")


def check(capsys: Capture, data: dict[str, Any], code: int = 0, **sections: Any) -> list[str]:
    """Return the lines that `check` prints to standard error for a job."""
    Path("job.yaml").write_text(yaml.safe_dump({"name": "a", "data": data, **sections}))
    assert cli.main(["check", "job.yaml"]) == code
    return capsys.readouterr().err.splitlines()


def slot_text(name: str, count: int = 300) -> None:
    Path(name).write_text("".join(f"1 {n % 2} {n % 50}:0 {1000 + n % 9}:1\n" for n in range(count)))


SLOTS = {"format": "slots", "train": "a.txt", "slots": [0, 1]}
COLUMNS = {"labels": "click", "sparse": ["user_id", "tags", "note"]}


def test_slots_without_a_value_are_a_warning(capsys: Capture) -> None:
    slot_text("a.txt")
    assert check(capsys, SLOTS) == ["ok: 1 training files, 0 evaluation files"]
    warning, _ = check(capsys, SLOTS | {"slots": ["0-2", 7]})
    assert warning == "warning: job.yaml: data.slots: none of 300 inspected samples has a value of `2`, `7`"
    warning, _ = check(capsys, SLOTS | {"slots": ["0-20"]})
    assert warning.endswith("has a value of `2`, `3`, `4`, `5`, `6`, `7`, `8`, `9` and 11 more")


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_slots_without_a_value_in_other_formats(tmp_path: Path, capsys: Capture, kind: str) -> None:
    assert {"csv", "parquet", "json"} <= WRITERS.keys()
    made = [row | {"note": ""} for row in rows(300)]
    path = write_kind(tmp_path, "json" if kind == "jsonl" else kind, made)
    if kind == "jsonl":
        Path("r.py").write_text("import json\nclass R:\n    def parse(self, line): return json.loads(line)\n")
        data: dict[str, Any] = {"reader": "r.py:R", "slots": ["user_id", "tags", "note"]}
        key = "data.slots"
    else:
        data, key = {"format": kind, "columns": COLUMNS}, "data.columns.sparse"
    warning, _ = check(capsys, data | {"train": path.name})
    assert warning == f"warning: job.yaml: {key}: none of 300 inspected samples has a value of `note`"


def test_a_missing_column_is_refused(tmp_path: Path, capsys: Capture) -> None:
    path = write_kind(tmp_path, "parquet", rows(20))
    data = {"format": "parquet", "train": path.name, "columns": {"labels": "click", "sparse": ["users"]}}
    (line,) = check(capsys, data, code=2)
    assert f"{path.name}: expected a column `users`, got click, user_id" in line


def test_records_in_another_format_are_a_warning(capsys: Capture) -> None:
    slot_text("a.txt")
    warning, _ = check(capsys, SLOTS | {"format": "paddlerec"})
    assert warning.startswith("warning: job.yaml: none of 300 inspected records is a sample: ")
    assert "a.txt:1: " in warning


def test_compressed_and_empty_files_are_checked(capsys: Capture) -> None:
    slot_text("a.txt")
    Path("b.gz").write_bytes(gzip.compress(Path("a.txt").read_bytes()))
    warning, _ = check(capsys, SLOTS | {"train": "b.gz", "slots": [0, 3]})
    assert "none of 300 inspected samples has a value of `3`" in warning
    Path("a.txt").write_bytes(b"")
    assert check(capsys, SLOTS) == ["ok: 1 training files, 0 evaluation files"]


def test_evaluation_on_training_files_is_a_warning(capsys: Capture) -> None:
    slot_text("a.txt")
    slot_text("b.txt")
    slot_text("c.txt")
    Path("link.txt").symlink_to("a.txt")
    rest = "training samples says nothing about new samples; `data.eval: {ratio: 0.1}` holds out a share of the samples"
    warning, last = check(capsys, SLOTS | {"eval": "link.txt"})
    assert warning == (
        f"warning: job.yaml: data.eval: its only file is also in data.train ({Path.cwd()}/link.txt): "
        f"evaluation on {rest}"
    )
    assert last == "ok: 1 training files, 1 evaluation files"
    warning, _ = check(capsys, SLOTS | {"train": ["a.txt", "b.txt"], "eval": "[abc].txt"})
    assert f"data.eval: 2 of its 3 files are also in data.train ({Path.cwd()}/a.txt)" in warning
    assert len(check(capsys, SLOTS | {"eval": "b.txt"})) == 1
    assert len(check(capsys, SLOTS | {"eval": {"ratio": 0.1}})) == 1


def test_user_metrics_are_loaded(capsys: Capture) -> None:
    slot_text("a.txt")
    Path("m.py").write_text(METRIC)
    assert len(check(capsys, SLOTS, train={"metrics": ["m.py:Hits"]})) == 1
    (line,) = check(capsys, SLOTS, code=2, train={"metrics": ["nope.py:Hits"]})
    assert line == f"error: {Path.cwd()}/nope.py: no such file or directory"
    (line,) = check(capsys, SLOTS, code=2, train={"metrics": ["m.py:Misses"]})
    assert line == f"error: {Path.cwd()}/m.py: expected a class `Misses`, got `Hits`"


@pytest.mark.parametrize("kind", ["reader", "slots"])
def test_a_time_split_needs_times_or_hours(capsys: Capture, kind: str) -> None:
    slot_text("a.txt")
    Path("r.py").write_text("class R:\n    def parse(self, line): return None\n")
    data = SLOTS | {"format": kind, "eval": {"time": "2026-01-31"}} | ({"reader": "r.py:R"} if kind == "reader" else {})
    (line,) = check(capsys, data, code=2)
    assert line == (
        f"error: job.yaml: data.eval.time: expected files in directories YYYYMMDD/HH, got `{Path.cwd()}/a.txt`"
    )
    write(Path("a.csv"), as_csv(rows(30)))
    (line,) = check(
        capsys, {"format": "csv", "train": "a.csv", "columns": COLUMNS, "eval": {"time": "2026-01-31"}}, code=2
    )
    assert "data.eval.time: expected `data.columns.time`, or files in directories YYYYMMDD/HH, got" in line


def test_dense_columns_without_a_value_are_a_warning(tmp_path: Path, capsys: Capture) -> None:
    made = [row | {"note": ""} for row in rows(300)]
    write(tmp_path / "a.csv", as_csv(made))
    columns = COLUMNS | {"sparse": ["user_id"], "dense": ["note", "price"]}
    data = {"format": "csv", "train": "a.csv", "columns": columns, "buckets": 6}
    warning, _ = check(capsys, data)
    assert warning == "warning: job.yaml: data.columns.dense: none of 300 inspected samples has a value of `note`"
    empty, dense = check(capsys, data | {"columns": columns | {"sparse": ["user_id", "note"]}})[:2]
    assert empty.endswith("data.columns.sparse: none of 300 inspected samples has a value of `note`")
    assert dense == warning
    row = "\t".join(["1", "", *["3"] * 12, *["ab"] * 26]) + "\n"
    Path("a.tsv").write_text(row * 9)
    warning, _ = check(capsys, {"format": "criteo", "train": "a.tsv", "buckets": 6})
    assert warning == "warning: job.yaml: data.dense: none of 9 inspected samples has a value of `I1`"


def test_too_many_bad_records_are_a_warning(tmp_path: Path, capsys: Capture) -> None:
    slot_text("a.txt")
    with Path("a.txt").open("a") as file:
        file.write("1 0 x:0\n1 0 y:0\n")
    warning, _ = check(capsys, SLOTS)
    assert warning == (
        "warning: job.yaml: data.train: 2 of 302 inspected records are bad (0.66%), expected at most 0.10% "
        f"(data.max_bad_ratio): {Path.cwd()}/a.txt:301: slot `0`: sign `x` is not a u64"
    )
    assert len(check(capsys, SLOTS | {"max_bad_ratio": 2 / 302})) == 1
    assert len(check(capsys, SLOTS | {"max_bad_ratio": 0.006})) == 2
    path = write_kind(tmp_path, "parquet", [row | {"click": 7 if at == 5 else 0} for at, row in enumerate(rows(300))])
    warning, _ = check(capsys, {"format": "parquet", "train": path.name, "columns": COLUMNS})
    assert "1 of 300 inspected records are bad" in warning and "row 5: label `click`" in warning
