"""The `data` section: formats, columns, slot files, splits."""

from pathlib import Path
from typing import Any

import pytest

from elasticrec.config import Job, differences
from elasticrec.config.load import parse_job
from elasticrec.errors import ConfigError

COLUMNS = {"labels": "click", "sparse": ["user", "item"]}
SLOTS = {"format": "slots", "train": "a", "slots": "0-2"}
CSV = {"format": "csv", "train": "a", "columns": COLUMNS}


def make(data: dict[str, Any], base: Path = Path("/base")) -> Job:
    return parse_job({"name": "small", "data": data}, base=base, source="job.yaml")


def reload(job: Job) -> Job:
    """Load a job from its own resolved text."""
    raw = job.to_dict()
    return parse_job(raw, base=Path("/elsewhere"), source="job.yaml")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({**SLOTS, "columns": COLUMNS}, "data.columns: belongs to formats `csv` and `parquet`, not `slots`"),
        (
            {"format": "csv", "train": "a"},
            "data.columns: format `csv` needs `columns`, such as `{labels: click, sparse: [user, item]}`",
        ),
        ({**CSV, "slots": ["user"]}, "data.slots: belongs in `data.columns`"),
        ({**CSV, "dense": ["price"]}, "data.dense: belongs in `data.columns`"),
        ({**CSV, "labels": ["buy"]}, "data.labels: belongs in `data.columns`"),
        ({**CSV, "columns": {"sparse": ["user"]}}, "data.columns.labels: required key is missing"),
        (
            {**CSV, "columns": {**COLUMNS, "header": False}},
            "data.columns: `header: false` needs `names`",
        ),
        (
            {**CSV, "columns": {**COLUMNS, "delimiter": ";;"}},
            "data.columns.delimiter: expected at most 1 character, got 2",
        ),
        ({**CSV, "columns": {**COLUMNS, "sparce": []}}, "data.columns.sparce: unknown key, did you mean `sparse`?"),
        ({**SLOTS, "buckets": 6}, "data: `buckets` needs dense columns, format `slots` has none"),
        (
            {**CSV, "columns": {**COLUMNS, "dense": []}, "buckets": 6},
            "data: `buckets` needs dense columns, expected some in `data.columns.dense`, got none",
        ),
        (
            {"format": "criteo", "train": "a", "dense": [], "buckets": 6},
            "data: `buckets` needs dense columns, expected some in `data.dense`, got none",
        ),
        (
            {**CSV, "columns": {**COLUMNS, "sparse": ["price.bucket"], "dense": ["price"]}, "buckets": 6},
            "data.dense: slot `price.bucket` is given twice, expected each once",
        ),
        ({**SLOTS, "reader": "a.py:A"}, "data.reader: belongs to format `reader`, not `slots`"),
        (
            {"format": "reader", "train": "a", "slots": "0"},
            "data.reader: format `reader` needs a class, such as `reader.py:MyReader`",
        ),
        (
            {"reader": "a.py", "train": "a", "slots": "0"},
            "data.reader: expected a file and a class in it such as `reader.py:MyReader`, got `a.py`",
        ),
        ({**SLOTS, "eval": {"ratio": 1.5}}, "data.eval.ratio: expected less than 1, got 1.5"),
        ({**SLOTS, "eval": {}}, "data.eval: expected one of `ratio` and `time`"),
        (
            {**SLOTS, "eval": {"time": "soon"}},
            "data.eval.time: expected a date and time such as `2026-01-31T18:00`, got `soon`",
        ),
        ({**SLOTS, "padding": "x"}, "data.padding: expected a sign from 0 to 2^64 - 1, got `x`"),
        ({**SLOTS, "padding": 2**64}, f"data.padding: expected a sign from 0 to 2^64 - 1, got {2**64}"),
        ({**SLOTS, "modulo": 0}, "data.modulo: expected at least 1, got 0"),
        ({**SLOTS, "negative_rate": 0}, "data.negative_rate: expected more than 0, got 0"),
        (
            {**CSV, "separate_slots": True},
            "data.separate_slots: belongs to format `slots`: the other formats always give equal values of two slots "
            "separate rows",
        ),
        (
            {**SLOTS, "slots": [{"name": "a", "share": "b"}]},
            "data.slots: slot `a` shares the rows of `b`, which is not a slot of this job",
        ),
        (
            {**SLOTS, "slots": ["c", {"name": "b", "share": "c"}, {"name": "a", "share": "b"}]},
            "data.slots: slot `a` shares the rows of `b`, which itself shares the rows of another slot",
        ),
        ({**SLOTS, "slots": [{"name": "a", "sequence": 0}]}, "data.slots.0.sequence: expected at least 1, got 0"),
        (
            {**SLOTS, "slots": [{"name": "a", "separator": "|"}]},
            "data.slots: `separator` belongs to formats `csv` and `parquet`",
        ),
        ({**SLOTS, "dense": ["x"]}, "data.dense: format `slots` has no dense values"),
        (
            {"format": "criteo", "train": "a", "dense": [{"name": "I1", "count": 2}]},
            "data.dense: `count` belongs to format `paddlerec`",
        ),
        ({**SLOTS, "slot_conf": "slot.conf"}, "data: expected `slots` or `slot_conf`, got both"),
        (
            {"format": "slots", "train": "a", "slot_conf": "slot.conf"},
            "data: slot_conf: /base/slot.conf: no such file",
        ),
    ],
)
def test_mistakes_are_one_line(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(data)
    assert str(caught.value) == f"job.yaml: {message}"


def test_columns_become_slots_dense_values_and_labels() -> None:
    sparse = ["user", {"name": "tags", "separator": "|"}, {"name": "seen", "sequence": 5, "share": "user"}]
    columns = {
        "labels": ["click", "buy"],
        "sparse": sparse,
        "dense": ["price"],
        "weight": "w",
        "time": "at",
        "null": "NA",
    }
    job = make({**CSV, "columns": columns, "pooling": "mean"})
    assert [slot.name for slot in job.data.slots] == ["user", "tags", "seen"]
    assert {slot.pooling for slot in job.data.slots} == {"mean"}
    assert job.data.labels == ("click", "buy")
    assert [(column.name, column.normalize) for column in job.data.dense] == [("price", "log")]
    features = job.features()
    assert features["columns"] == {
        "names": [], "header": True, "delimiter": ",", "weight": "w", "time": "at", "null": ["NA"],
    }  # fmt: skip
    assert features["slots"][2] == {"name": "seen", "pooling": "mean", "sequence": 5, "share": "user"}
    assert reload(job) == job and differences(reload(job), job) == []
    assert {"slots", "dense", "labels"}.isdisjoint(job.to_dict()["data"])


def test_paddlerec_repeats_a_dense_name_without_normalisation() -> None:
    data = {"format": "paddlerec", "train": "a", "slots": "1-26", "dense": [{"name": "dense_feature", "count": 13}]}
    job = make(data)
    assert [column.name for column in job.data.dense] == [f"dense_feature.{i}" for i in range(13)]
    assert {column.normalize for column in job.data.dense} == {"none"}
    assert reload(job) == job


def test_a_slot_conf_chooses_and_names_slots(tmp_path: Path) -> None:
    (tmp_path / "slot.conf").write_text("0\n# a comment\n 7 user\n\n12 item # the ad\n3-5\n")
    job = make({"format": "slots", "train": "a", "slot_conf": "slot.conf"}, tmp_path)
    named = [(slot.name, slot.column) for slot in job.data.slots]
    assert named == [("0", None), ("user", "7"), ("item", "12"), ("3", None), ("4", None), ("5", None)]
    (tmp_path / "slot.conf").unlink()
    assert reload(job) == job, "a resolved job does not need the file"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "expected at least 1 slot, got none"), ("0\n1 a b\n", "expected a slot and optionally a name, got 3 words")],
)
def test_an_invalid_slot_conf_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "slot.conf").write_text(text)
    with pytest.raises(ConfigError, match=message):
        make({"format": "slots", "train": "a", "slot_conf": "slot.conf"}, tmp_path)


def test_a_reader_is_identified_by_its_source(tmp_path: Path) -> None:
    data = {"reader": "reader.py:A", "train": "a", "slots": ["x"]}
    (tmp_path / "reader.py").write_text("class A: ...")
    job = make(data, tmp_path)
    assert job.data.format == "reader" and job.data.reader == f"{tmp_path}/reader.py:A"
    elsewhere = tmp_path / "b"
    elsewhere.mkdir()
    (elsewhere / "reader.py").write_text("class A: ...")
    assert "data.reader" not in differences(job, make(data, elsewhere))
    (elsewhere / "reader.py").write_text("class A: pass")
    assert "data.reader" in differences(job, make(data, elsewhere))


@pytest.mark.parametrize("value", [{"ratio": 0.1}, {"time": "2026-01-02T03:00"}])
def test_held_out_data_affects_the_parameters(value: dict[str, Any]) -> None:
    job = make({**SLOTS, "eval": value})
    assert reload(job) == job
    assert differences(job, make(SLOTS)) == ["data.eval"]
    assert differences(make({**SLOTS, "eval": "x"}), make(SLOTS)) == []
    assert job.data.select(held_out=True) == (("ratio", 0.1, True) if "ratio" in value else None)


@pytest.mark.parametrize("buckets", [0, 6])
def test_buckets_of_columns_are_kept(buckets: int) -> None:
    dense: list[Any] = ["I1", {"name": "I2", "buckets": 0}, {"name": "I3", "buckets": 3}]
    job = make({"format": "criteo", "train": "a", "dense": dense, "buckets": buckets})
    assert [column.buckets for column in job.data.dense] == [buckets, 0, 3]
    assert reload(job).data == job.data
    assert ["buckets" in column for column in job.to_dict()["data"]["dense"]] == [False, buckets != 0, True]
    table = {**CSV, "columns": {**COLUMNS, "dense": ["price", {"name": "age", "buckets": 3}]}, "buckets": buckets}
    assert reload(make(table)).data.inputs == make(table).data.inputs
