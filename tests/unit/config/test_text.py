"""The text of a job file and of `--set`: read as YAML 1.2, refused in one line, never a traceback."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticrec.config import Job, load_job, parse_job
from elasticrec.config.document import dump, parse
from elasticrec.errors import ConfigError

BASE = Path("/base")
SLOTS: dict[str, Any] = {"name": "demo", "data": {"format": "slots", "train": "logs", "slots": ["0-2"]}}


def make(*overrides: str, raw: dict[str, Any] = SLOTS) -> Job:
    return parse_job(raw, base=BASE, source="job.yaml", overrides=overrides)


def refusal(*overrides: str, raw: Any = SLOTS) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_job(raw, base=BASE, source="job.yaml", overrides=overrides)
    return str(caught.value)


def write(directory: Path, text: str) -> Path:
    path = directory / "job.yaml"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\ndata: [1\ntrain: 2\n", ":3: not valid YAML: "),
        ("name: a\nname: b\n", ":2: duplicate key `name`, first on line 1"),
        ("train:\n  seed: 1\n  'seed': 2\n", ":3: duplicate key `seed`, first on line 2"),
        ("a: &a [*a]\n", ":1: an alias may not contain itself"),
        ("a: !!python/object:os.system x\n", ":1: tags are not supported"),
        ("a: !!bool x\n", ":1: tags are not supported"),
        ("? [a]\n: 1\n", ":1: expected text as a key, got a list or a mapping"),
        ("a: 1\n---\nb: 2\n", ": not valid YAML: expected a single document in the stream"),
        ("a:\n\t- 1\n", ":2: not valid YAML: "),
        ("a: \x01\n", ": character number 4 is not allowed in YAML"),
        ("[" * 5000, ": nested too deeply"),
        ("a: " + "9" * 5000, ":1: expected a number of at most 1000 digits"),
        ("- name\n", ": expected a mapping, got a list"),
        ("text\n", ": expected a mapping, got a literal (not shown)"),
        ("", ": name: required key is missing"),
    ],
)
def test_invalid_job_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_job(path)
    assert message in str(caught.value).splitlines()[0]
    assert str(caught.value).startswith(str(path))
    assert caught.value.__context__ is None


def test_nested_aliases_do_not_exhaust_memory(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(ConfigError, match="at most 1000000 values"):
        load_job(write(tmp_path, "\n".join(lines)))


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match="expected UTF-8 text, got an invalid byte at position 6"):
        load_job(path)


def test_a_missing_job_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_job(tmp_path / "job.yaml")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    TEXT,
    st.sampled_from(["1e5", "on", "010", "1_000", "0x1f", "1:30", "2024-01-01", "~", "null", ".5", "<<", "=", "!a"]),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3))


@settings(deadline=None)
@given(VALUES)
@example({"\x85": "a\u2028b"})
def test_dumped_text_is_read_back(value: Any) -> None:
    assert parse(dump(value), "text") == value


@settings(deadline=None)
@given(VALUES)
@example({"\x85": "a\u2028b"})
def test_yaml_1_1_parsers_read_the_same_value(value: Any) -> None:
    """The dumped text must mean the same in YAML 1.1, which most tools read."""
    assert yaml.safe_load(dump({"value": value})) == {"value": value}


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text, "text")
    except ConfigError as error:
        assert "\n" not in str(error)


@settings(deadline=None)
@given(
    VALUES,
    st.sampled_from(["data.slots", "data.train", "data.dense", "train", "train.epochs", "serve.token", "name"]),
)
def test_any_value_is_accepted_or_refused(value: Any, key: str) -> None:
    section, _, name = key.partition(".")
    raw = {**SLOTS, section: {**SLOTS.get(section, {}), name: value} if name else value}
    try:
        parse_job(raw, base=BASE)
    except ConfigError as error:
        assert all(line.startswith("job: ") for line in str(error).splitlines())


def test_set_changes_any_key() -> None:
    job = make("train.epochs=3", "train.checkpoint.keep=9", "data.train=[a, b]", "data.train.1=c", "data.eval.0=d")
    assert (job.train.epochs, job.train.checkpoint.keep) == (3, 9)
    assert (job.data.train, job.data.eval) == (("/base/a", "/base/c"), ("/base/d",))


def test_the_last_set_wins() -> None:
    assert make("train.epochs=0", "train.epochs=3").train.epochs == 3
    assert refusal("train.epochs=3", "train.epochs=0") == "--set train.epochs=0: expected at least 1, got 0"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.epochs=0", "--set train.epochs=0: expected at least 1, got 0"),
        ("train.epochs=abc", "--set train.epochs=abc: expected an integer, got `abc`"),
        ("train={epochs: 0}", "--set train={epochs: 0}: train.epochs: expected at least 1, got 0"),
        ("train.epoch=1", "--set train.epoch=***: unknown key, did you mean `epochs`?"),
        ("data.slots.3=1", "--set data.slots.3=1: expected an index from 0 to 1, got `3`"),
        ("data.slots.x=1", "--set data.slots.x=***: expected an index from 0 to 1, got `x`"),
        ("data.train.0=x", "--set data.train.0=x: `data.train` is a single value and has no `0`"),
        ("name=[", "--set name=[:1: not valid YAML: "),
        ("train.epochs", "--set: expected KEY=VALUE such as `train.epochs=3`"),
        ("=3", "--set: expected KEY=VALUE such as `train.epochs=3`"),
        ("a..b=3", "--set: expected KEY=VALUE such as `train.epochs=3`"),
    ],
)
def test_an_invalid_set_is_named(override: str, message: str) -> None:
    assert refusal(override).startswith(message)
