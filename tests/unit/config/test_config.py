"""The job file: accepted values, the message of every mistake, and keys that affect the parameters."""

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrec.config import (
    Job,
    decisive_keys,
    differences,
    fingerprint,
    job_schema,
    load_job,
    match_files,
    parse_job,
)
from elasticrec.config.document import parse
from elasticrec.errors import ConfigError, ElasticRecError, ModelError, SampleError, UnavailableError

BASE = Path("/base")
SLOTS: dict[str, Any] = {"name": "demo", "data": {"format": "slots", "train": "logs", "slots": ["0-2"]}}
CRITEO: dict[str, Any] = {"name": "demo", "data": {"format": "criteo", "train": "day_0.tsv"}}


def make(*overrides: str, raw: dict[str, Any] = SLOTS) -> Job:
    return parse_job(raw, base=BASE, source="job.yaml", overrides=overrides)


def refusal(*overrides: str, raw: Any = SLOTS) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_job(raw, base=BASE, source="job.yaml", overrides=overrides)
    return str(caught.value)


def refusal_of(section: str, **keys: Any) -> str:
    """Return the message for keys of a section in the file, not from `--set`."""
    return refusal(raw={**SLOTS, section: {**SLOTS.get(section, {}), **keys}})


def write(directory: Path, text: str) -> Path:
    path = directory / "job.yaml"
    path.write_text(text, "utf-8")
    return path


def test_errors_are_also_builtin_exceptions() -> None:
    assert issubclass(SampleError, ValueError)
    assert issubclass(UnavailableError, ConnectionError)
    assert all(issubclass(e, ElasticRecError) for e in (ConfigError, SampleError, ModelError, UnavailableError))


def test_defaults_of_slots() -> None:
    job = make()
    assert (job.model.kind, job.model.dim, job.model.hidden) == ("wide_deep", 9, (400, 400, 400))
    assert (job.sparse.partitions, job.sparse.optimizer.epsilon) == (256, 1e-8)
    assert (job.dense.optimizer.kind, job.dense.optimizer.learning_rate) == ("adam", 0.001)
    assert (job.train.batch_size, job.train.seed, job.train.threads) == (512, 1, None)
    assert (job.publish.repository, job.publish.model) == ("models", "demo")
    assert (job.serve.host, job.serve.port, job.serve.token) == ("127.0.0.1", 8500, None)
    assert (job.data.labels, job.data.dense, job.data.unit_bytes) == (("click",), (), 16 * 2**20)


def test_defaults_of_criteo() -> None:
    features = make(raw=CRITEO).features()
    assert [slot["name"] for slot in features["slots"]] == [f"C{i}" for i in range(1, 27)]
    assert features["dense"][0] == {"name": "I1", "normalize": {"kind": "log"}}
    assert len(features["dense"]) == 13


def test_features_have_the_shape_that_rust_reads() -> None:
    job = make("data.slots=[0, ab, {name: 7-8, pooling: mean}]", "data.labels=[click, buy]")
    assert job.features() == {
        "format": "slots",
        "hash": 1,
        "slots": [
            {"name": "0", "pooling": "sum"},
            {"name": "ab", "pooling": "sum"},
            {"name": "7", "pooling": "mean"},
            {"name": "8", "pooling": "mean"},
        ],
        "dense": [],
        "labels": ["click", "buy"],
    }


def test_features_of_dense_columns() -> None:
    dense = "data.dense=[I3, {name: I1, normalize: none}, {name: I2, normalize: minmax, min: 0, max: 1}]"
    assert make(dense, raw=CRITEO).features()["dense"] == [
        {"name": "I3", "normalize": {"kind": "log"}},
        {"name": "I1", "normalize": {"kind": "none"}},
        {"name": "I2", "normalize": {"kind": "minmax", "min": 0.0, "max": 1.0}},
    ]


def test_dense_values_can_be_left_out_of_criteo() -> None:
    job = make("data.dense=[]", raw=CRITEO)
    assert job.data.dense == ()
    assert make(raw=job.to_dict()).data.dense == ()


def test_slots_take_the_default_pooling() -> None:
    job = make("data.pooling=mean", "data.slots=[1, {name: 2, pooling: sum}]")
    assert [slot.pooling for slot in job.data.slots] == ["mean", "sum"]


@pytest.mark.parametrize("slots", ["0-2", "[0-2]", "[0, 1, 2]", "['0', '1-2']", "[0-1, {name: 2}]"])
def test_ways_to_write_slots(slots: str) -> None:
    assert [slot.name for slot in make(f"data.slots={slots}").data.slots] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64KB", 64_000), ("64KiB", 65536), ("16 MiB", 2**24), ("1GB", 10**9), ("5000B", 5000)],
)
def test_sizes(text: str, size: int) -> None:
    assert make(f"data.unit_bytes={text}").data.unit_bytes == size


def test_paths_are_relative_to_the_job_file(tmp_path: Path) -> None:
    write(tmp_path, "name: a\ndata: {format: criteo, train: [x/*.tsv, /abs.tsv], eval: y}\n")
    job = load_job(tmp_path / "job.yaml")
    assert job.data.train == (f"{tmp_path}/x/*.tsv", "/abs.tsv")
    assert job.data.eval == (f"{tmp_path}/y",)


def test_a_section_without_keys_has_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\ndata: {format: criteo, train: x}\nmodel:\n  # kind: dnn\ntrain:\n")
    assert load_job(path).model.kind == "wide_deep"


def test_numbers_are_read_as_in_yaml_1_2() -> None:
    assert make("sparse.optimizer.learning_rate=1e-3").sparse.optimizer.learning_rate == 0.001
    assert make("sparse.init_scale=0").sparse.init_scale == 0.0
    assert make("train.seed=18446744073709551615").train.seed == 2**64 - 1
    assert make("publish.model=on").publish.model == "on"


def test_a_job_is_immutable() -> None:
    with pytest.raises(ValueError, match="frozen"):
        make().train.epochs = 2  # type: ignore[misc]


def test_parsing_does_not_change_the_given_values() -> None:
    raw = copy.deepcopy(SLOTS)
    make("data.slots.0=5", "train.epochs=3", raw=raw)
    assert raw == SLOTS


@pytest.mark.parametrize(
    ("section", "keys", "line"),
    [
        ("train", {"epoch": 1}, "train.epoch: unknown key, did you mean `epochs`?"),
        ("train", {"epochs": 0}, "train.epochs: expected at least 1, got 0"),
        ("train", {"epochs": "3"}, "train.epochs: expected an integer, got `3`"),
        ("train", {"epochs": 3.0}, "train.epochs: expected an integer, got 3.0"),
        ("train", {"epochs": True}, "train.epochs: expected an integer, got `true`"),
        ("train", {"epochs": None}, "train.epochs: expected an integer, got null"),
        ("train", {"seed": 2**64}, f"train.seed: expected at most {2**64 - 1}, got {2**64}"),
        ("train", {"seed": -1}, "train.seed: expected at least 0, got -1"),
        ("train", {"mode": "sync"}, "train.mode: expected `local` or `ps`, got `sync`"),
        ("train", {"servers": 0}, "train.servers: expected at least 1, got 0"),
        ("train", {"servers": 2}, "train: `servers`: belongs to mode `ps`, not `local`"),
        ("train", {"checkpoint": []}, "train.checkpoint: expected a mapping, got an empty list"),
        ("train", {"checkpoint": {"every_s": 0}}, "train.checkpoint.every_s: expected more than 0, got 0"),
        ("train", {"print_every_s": float("nan")}, "train.print_every_s: expected a finite number, got nan"),
        ("train", {"print_every_s": True}, "train.print_every_s: expected a number, got `true`"),
        (
            "train",
            {"checkpoint": {"every_s": "30x"}},
            "train.checkpoint.every_s: expected a number of seconds such as 90, or `90s`, `30m` or `2h`, got `30x`",
        ),
        ("train", {"checkpoint": {"every_s": "0m"}}, "train.checkpoint.every_s: expected more than 0, got 0.0"),
        (
            "train",
            {"checkpoint": {"keep_epochs": [-1]}},
            "train.checkpoint.keep_epochs: expected `true`, `false` or a list of epochs counted from 0, got a list",
        ),
        (
            "train",
            {"checkpoint": {"keep_epochs": 3}},
            "train.checkpoint.keep_epochs: expected `true`, `false` or a list of epochs counted from 0, got 3",
        ),
        (
            "train",
            {"checkpoint": {"keep_best": "copc"}},
            "train.checkpoint.keep_best: expected a metric to maximize or minimize, such as `auc`, got `copc`",
        ),
        ("train", {"evaluate": {"every_steps": 0}}, "train.evaluate.every_steps: expected at least 1, got 0"),
        (
            "train",
            {"metrics": ["mine.py"]},
            "train.metrics.0: expected a file and a class such as `metrics.py:MyMetric`, got `mine.py`",
        ),
        (
            "model",
            {"kind": "gbm"},
            "model.kind: expected `lr`, `fm`, `dnn`, `wide_deep`, `deepfm`, `dcn_v2`, `mmoe`, `din` or a class such as "
            "`my_model.py:MyModel`, got `gbm`",
        ),
        ("model", {"experts": 0}, "model.experts: expected at least 1, got 0"),
        ("model", {"expert_hidden": []}, "model.expert_hidden: expected at least 1 item, got 0"),
        (
            "model",
            {"options": {"a": 1}},
            "model.options: `wide_deep` takes no `options`; they are for a model of your own",
        ),
        ("model", {"options": []}, "model.options: expected a mapping, got an empty list"),
        ("model", {"hidden": []}, "model.hidden: expected at least 1 item, got 0"),
        ("model", {"hidden": [4, 0]}, "model.hidden.1: expected at least 1, got 0"),
        ("model", {"hidden": 400}, "model.hidden: expected a list, got 400"),
        ("model", {"dim": 1025}, "model.dim: expected at most 1024, got 1025"),
        ("sparse", {"init_scale": float("inf")}, "sparse.init_scale: expected a finite number, got inf"),
        ("data", {"train": []}, "data.train: expected at least 1 item, got 0"),
        ("data", {"train": [3]}, "data.train.0: expected text, got 3"),
        ("data", {"train": ""}, "data.train.0: expected a path, a directory or a glob, got ``"),
        ("data", {"train": "a\0b"}, "data.train.0: expected a path, a directory or a glob, got `a\\x00b`"),
        (
            "data",
            {"format": "tsv"},
            "data.format: expected `slots`, `paddlerec`, `criteo`, `csv`, `parquet` or `reader`, got `tsv`",
        ),
        ("data", {"shuffle": 1}, "data.shuffle: expected `true` or `false`, got 1"),
        ("data", {"max_bad_ratio": 1.5}, "data.max_bad_ratio: expected at most 1, got 1.5"),
        ("data", {"unit_bytes": 4095}, "data.unit_bytes: expected at least 4096, got 4095"),
        (
            "data",
            {"unit_bytes": "16mb"},
            "data.unit_bytes: expected a size in bytes such as 65536, `64KB` or `16MiB`, got `16mb`",
        ),
        ("data", {"labels": ["a", "a"]}, "data.labels: label `a` is given twice, expected each once"),
        ("data", {"dense": ["I1"]}, "data.dense: format `slots` has no dense values"),
        ("data", {"slots": ["0-3", 2]}, "data.slots: slot `2` is given twice, expected each once"),
        ("data", {"slots": [True]}, "data.slots.0: expected a mapping, got `true`"),
        ("data", {"slots": [-1]}, "data.slots.0.name: expected a name or a number from 0, got -1"),
        (
            "data",
            {"slots": [1, "5-3"]},
            "data.slots.1.name: expected an ascending range of at most 65535 slots, got `5-3`",
        ),
        (
            "data",
            {"slots": ["00-25"]},
            "data.slots.0.name: expected a range of numbers without leading zeros such as `0-25`, got `00-25`",
        ),
        ("data", {"slots": ["0-65534", "x"]}, "data.slots: expected at most 65535 slots, got 65536"),
        (
            "data",
            {"slots": ["a b"]},
            "data.slots.0.name: expected 1 to 128 characters without spaces, `:`, `=` and `,`, got `a b`",
        ),
        (
            "data",
            {"slots": [{"name": 1, "pooling": "max"}]},
            "data.slots.0.pooling: expected `sum`, `mean` or `sqrtn`, got `max`",
        ),
        (
            "data",
            {"slots": [{"name": 1, "pool": "sum"}]},
            "data.slots.0.pool: unknown key, did you mean `pooling`?",
        ),
        ("serve", {"port": 65536}, "serve.port: expected at most 65535, got 65536"),
        (
            "serve",
            {"max_pending_bytes": "8MiB"},
            "serve: `max_pending_bytes`: expected at least four times `max_body_bytes`, 67,108,864, got 8,388,608",
        ),
        ("serve", {"host": "a b"}, "serve.host: expected an address or a host name, got `a b`"),
        (
            "logging",
            {},
            "logging: unknown key, expected one of `name`, `data`, `model`, `sparse`, "
            "`dense`, `train`, `publish`, `cube`, `serve`",
        ),
    ],
)
def test_mistakes_are_one_line(section: str, keys: dict[str, Any], line: str) -> None:
    assert refusal_of(section, **keys) == f"job.yaml: {line}"


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"slots": []}, "data.slots: expected at least 1 slot, got none; list the slots to use"),
        ({"slots": ["C27"]}, "data.slots: slot `C27` is not a column of format `criteo`, expected `C1` to `C26`, did "),
        ({"dense": ["I0"]}, "data.dense: column `I0` is not a column of format `criteo`, expected `I1` to `I13`"),
        ({"dense": ["I1", "I1"]}, "data.dense: column `I1` is given twice, expected each once"),
        ({"labels": ["a", "b"]}, "data.labels: expected exactly 1 label for format `criteo`, got 2"),
        (
            {"dense": [{"name": "I1", "min": 0}]},
            "data.dense.0: `min` and `max` belong to normalize `minmax`, not",
        ),
        (
            {"dense": [{"name": "I1", "normalize": "minmax"}]},
            "data.dense.0: normalize `minmax` needs `min` and `max`",
        ),
        (
            {"dense": [{"name": "I1", "normalize": "minmax", "min": 1, "max": 1}]},
            "data.dense.0: expected `min` below `max`, got 1.0 and 1.0",
        ),
    ],
)
def test_mistakes_in_criteo_are_one_line(keys: dict[str, Any], line: str) -> None:
    message = refusal(raw={"name": "demo", "data": {**CRITEO["data"], **keys}})
    assert message.startswith(f"job.yaml: {line}")
    assert "\n" not in message


def test_slots_are_required_for_slot_text() -> None:
    message = refusal(raw={"name": "a", "data": {"format": "slots", "train": "x"}})
    assert message.startswith("job.yaml: data.slots: expected at least 1 slot, got none")


def test_every_mistake_has_its_own_line() -> None:
    raw = {"name": "A", "data": {"train": 3}, "train": {"epochs": 0, "sead": 1}, "epochs": 3}
    assert refusal(raw=raw).splitlines() == [
        "job.yaml: name: expected 1 to 63 of `a-z 0-9 . _ -`, the first a letter or digit, got `A`",
        "job.yaml: data.format: required key is missing",
        "job.yaml: data.train.0: expected text, got 3",
        "job.yaml: train.epochs: expected at least 1, got 0",
        "job.yaml: train.sead: unknown key, did you mean `seed`?",
        "job.yaml: epochs: unknown key, did you mean `train.epochs`?",
    ]


@pytest.mark.parametrize("name", ["", "-a", ".a", "a/b", "a" * 64, "é", "a\n"])
def test_names_that_cannot_be_a_directory_or_label_are_refused(name: str) -> None:
    assert refusal(raw={**SLOTS, "name": name}).startswith("job.yaml: name: expected 1 to 63")


def test_a_long_value_is_shortened_to_one_line() -> None:
    message = refusal(raw={**SLOTS, "name": "x\n" * 1000})
    assert "\n" not in message
    assert len(message) < 200


def test_huge_numbers_are_refused_in_one_line() -> None:
    for value in (10**400, -(10**400)):
        assert refusal_of("sparse", init_scale=value).startswith("job.yaml: sparse.init_scale: ")
        assert refusal_of("train", threads=value).startswith("job.yaml: train.threads: expected at ")


@pytest.mark.parametrize(
    ("host", "good"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("localhost.example.org", False),
    ],
)
def test_addresses_beyond_loopback_need_insecure(host: str, good: bool) -> None:
    if good:
        assert make(raw={**SLOTS, "serve": {"host": host}}).serve.host == host
    else:
        message = refusal_of("serve", host=host)
        assert message.startswith("job.yaml: serve.host: expected a loopback address such as 127.0.0.1")
        assert "serve.insecure: true" in message
    assert make(raw={**SLOTS, "serve": {"host": host, "insecure": True}}).serve.host == host


NAMES = st.from_regex(r"[A-Za-z0-9_]{1,6}", fullmatch=True)
POOLINGS = st.sampled_from(["sum", "mean", "sqrtn"])


@settings(deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 20).map(str), NAMES), min_size=1, max_size=12, unique=True),
    st.lists(POOLINGS, min_size=12, max_size=12),
    POOLINGS,
)
def test_a_resolved_job_is_the_same_job(names: list[str], poolings: list[str], pooling: str) -> None:
    slots = [{"name": name, "pooling": own} for name, own in zip(names, poolings, strict=False)]
    job = make(raw={"name": "a", "data": {"format": "slots", "train": "x", "slots": slots, "pooling": pooling}})
    reloaded = parse_job(parse(job.to_yaml(references=True), "copy"), base=Path("/other"))
    assert reloaded.to_dict() == job.to_dict()
    assert reloaded.features() == job.features()
    assert fingerprint(reloaded) == fingerprint(job)


def test_the_resolved_job_is_short() -> None:
    job = make("data.slots=[0-399, 500, 501, {name: 502, pooling: mean}]")
    assert job.to_dict()["data"]["slots"] == ["0-399", "500", "501", {"name": "502", "pooling": "mean"}]
    assert job.to_dict()["data"]["unit_bytes"] == "16MiB"


@pytest.mark.parametrize(
    ("override", "keys"),
    [
        ("train.batch_size=64", ["train.batch_size"]),
        ("train.seed=2", ["train.seed"]),
        ("model.hidden=[8]", ["model.hidden"]),
        ("sparse.optimizer.learning_rate=1", ["sparse.optimizer.learning_rate"]),
        (
            "dense={optimizer: {kind: sgd, learning_rate: 1}}",
            ["dense.optimizer.kind", "dense.optimizer.learning_rate"],
        ),
        ("data.pooling=mean", ["data.slots"]),
        ("data.train=other", ["data.train"]),
        ("data.unit_bytes=1MiB", ["data.unit_bytes"]),
        ("data.slots=[0, 1, 2]", []),
        ("data.eval=x", []),
        ("data.workers=4", []),
        ("train.epochs=9", []),
        ("train.threads=1", []),
        ("train.checkpoint.keep=1", []),
        ("serve.port=1", []),
        ("publish.model=x", []),
        ("name=x", []),
    ],
)
def test_the_fingerprint_covers_keys_that_affect_the_parameters(override: str, keys: list[str]) -> None:
    job, changed = make(), make(override)
    assert differences(job, changed) == differences(changed, job) == keys
    assert (fingerprint(job) == fingerprint(changed)) == (not keys)


@pytest.mark.parametrize(
    ("slots", "line"),
    [
        ("[1, 2]", "`din` needs a sequence, such as `data.slots: [item, {name: history, share: item, sequence: 20}]`"),
        (
            "[1, {name: 2, sequence: 5}]",
            "`din` compares the sequence `2` with an ordinary slot; name that slot in `data.slots[].share`",
        ),
        (
            "[{name: 1, sequence: 3}, {name: 2, sequence: 5, share: 1}]",
            "`din` compares the sequence `1` with an ordinary slot; name that slot in `data.slots[].share`",
        ),
    ],
)
def test_din_needs_a_sequence_of_an_ordinary_slot(slots: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make("model.kind=din", f"data.slots={slots}")
    assert str(caught.value).endswith(f"model: {line}")
    assert make("model.kind=din", "data.slots=[1, {name: 2, sequence: 5, share: 1}]").model.kind == "din"


def test_a_custom_model_is_found_relative_to_the_job(tmp_path: Path) -> None:
    raw = {**SLOTS, "model": {"kind": "nets/my_model.py:MyModel", "options": {"depth": 3, "names": ["a"]}}}
    job = parse_job(raw, base=tmp_path)
    assert job.model.custom_class == (tmp_path / "nets/my_model.py", "MyModel")
    assert parse_job(job.to_dict(), base=Path("/")).model == job.model
    assert make().model.custom_class is None


def test_every_key_is_listed_as_decisive_or_not() -> None:
    """A new key must be added to one of the two lists."""
    not_decisive = {
        "name",
        "data.negative_rate",
        "data.slot_conf",
        "data.workers",
        "data.max_bad_ratio",
        "data.on_missing",
        # These two are resolved into the slots.
        "data.buckets",
        "data.pooling",
        "train.epochs",
        "train.threads",
        "train.checkpoint",
        "train.evaluate",
        "train.metrics",
        "train.print_every_s",
        "train.servers",
        "train.trainers",
        "train.ps",
    }
    decisive = set(decisive_keys(make()))
    for section, field in Job.model_fields.items():
        inner = getattr(field.annotation, "model_fields", {})
        for key in [f"{section}.{name}" for name in inner] or [section]:
            is_decisive = any(part == key or part.startswith(f"{key}.") for part in decisive)
            assert is_decisive != (key in not_decisive or section in ("publish", "cube", "serve")), key


def test_buckets_change_the_slots() -> None:
    data: dict[str, Any] = {"format": "criteo", "train": "a"}
    raw = {"name": "a", "data": data}
    plain = parse_job(raw, base=Path())
    assert differences(plain, parse_job({**raw, "data": {**data, "buckets": 6}}, base=Path())) == ["data.slots"]


def test_the_schema_describes_every_key() -> None:
    schema = json.loads(json.dumps(job_schema()))
    assert schema["required"] == ["name", "data"]
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        for name, key in section["properties"].items():
            assert key["description"], name
    assert schema["$defs"]["Serve"]["properties"]["token"]["anyOf"][0]["type"] == "string"
    assert {"type": "string"} in schema["$defs"]["Data"]["properties"]["train"]["anyOf"]


def test_pipes_are_refused_as_data_files(tmp_path: Path) -> None:
    """The pipe has no writer, so opening it would block forever."""
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "d" / "pipe")
    for pattern in ("d", "d/*", "d/pipe"):
        for key in ("train", "eval"):
            job = parse_job({**SLOTS, "data": {**SLOTS["data"], key: pattern}}, base=tmp_path, source="job.yaml")
            with pytest.raises(ConfigError) as caught:
                match_files(job, key)  # type: ignore[arg-type]
            assert str(caught.value) == (
                f"job.yaml: data.{key}: `{tmp_path}/d/pipe`: expected a regular file, got a pipe"
            )


def test_files_of_a_job(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "h/1", "h/i/0", "h/_SUCCESS", "h/.1.crc", "h/_tmp/2", "x[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    raw = {**SLOTS, "data": {**SLOTS["data"], "train": ["h", "?.txt", "a.txt", "x[1].txt"]}}
    job = parse_job(raw, base=tmp_path, source="job.yaml")
    names = [str(path.relative_to(tmp_path)) for path in match_files(job, "train")]
    assert names == ["h/1", "h/i/0", "a.txt", "b.txt", "x[1].txt"]
    assert match_files(job, "eval") == []


def test_patterns_without_a_file(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a").touch()
    raw = {**SLOTS, "data": {**SLOTS["data"], "train": ["a", "empty", "*.gz"]}}
    job = parse_job(raw, base=tmp_path, source="job.yaml")
    with pytest.raises(ConfigError) as caught:
        match_files(job, "train")
    assert str(caught.value).splitlines() == [
        f"job.yaml: data.train: no file matches `{tmp_path}/empty`",
        f"job.yaml: data.train: no file matches `{tmp_path}/*.gz`",
    ]


def test_durations_have_units() -> None:
    texts = {"90": 90.0, "90s": 90.0, "1.5m": 90.0, "2h": 7200.0, "1d": 86400.0, "500ms": 0.5, "2 h": 7200.0}
    for text, seconds in texts.items():
        job = make(f"train.checkpoint.every_s={text}")
        assert job.train.checkpoint.every_s == seconds
        assert make(raw=job.to_dict()).train.checkpoint.every_s == seconds


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.checkpoint.keep_best=auc", "`train.checkpoint.keep_best` needs `data.eval`"),
        ("train.evaluate.every_s=1h", "`train.evaluate.every_s` needs `data.eval`"),
        ("train.evaluate.every_steps=9", "`train.evaluate.every_steps` needs `data.eval`"),
    ],
)
def test_keys_that_need_evaluation_data(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(override)
    make(override, "data.eval=eval.txt")


def test_best_label_must_be_one_of_the_labels() -> None:
    with pytest.raises(ConfigError, match=r"`train\.checkpoint\.best_label`: expected one of `click`, got `buy`"):
        make("train.checkpoint.best_label=buy")
    make("train.checkpoint.best_label=buy", "data.labels=[click, buy]")


def test_custom_metrics_are_found_relative_to_the_job(tmp_path: Path) -> None:
    raw = {**SLOTS, "train": {"metrics": ["mine.py:A", "sub/other.py:B_2"]}}
    job = parse_job(raw, base=tmp_path)
    assert job.train.metrics == (f"{tmp_path}/mine.py:A", f"{tmp_path}/sub/other.py:B_2")
