"""The sections `publish` and `cube`: accepted values, and the message of every mistake."""

from pathlib import Path
from typing import Any

import pytest

from elasticrec.config import Job, differences, parse_job
from elasticrec.errors import ConfigError

RAW: dict[str, Any] = {"name": "demo", "data": {"format": "slots", "train": "logs", "slots": ["0-2"]}}
HOURS: dict[str, Any] = {**RAW, "data": {**RAW["data"], "hours": {"start": "2026-01-01T00"}}}


def make(*overrides: str, raw: dict[str, Any] = RAW) -> Job:
    return parse_job(raw, base=Path("/base"), source="job.yaml", overrides=overrides)


def refusal(section: str, raw: dict[str, Any] = RAW, **keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_job({**raw, section: keys}, base=Path("/base"), source="job.yaml")
    return str(caught.value)


def test_defaults() -> None:
    job = make()
    assert (job.publish.repository, job.publish.model, job.publish.every) == ("models", "demo", None)
    assert (job.publish.base_every, job.publish.row_type, job.publish.outputs, job.publish.keep) == (60, "f32", None, 3)
    assert (job.publish.gate.min_auc, job.publish.gate.max_row_loss) == (None, 0.5)
    assert (job.cube.shards, job.cube.replicas, job.cube.addresses, job.cube.min_ready) == (1, 1, (), None)
    assert (job.cube.keep_loaded, job.cube.poll_s, job.cube.token, job.cube.insecure) == (2, 0.5, None, False)


def test_forms_of_publish_every() -> None:
    texts = {"epoch": "epoch", "30s": 30.0, "2m": 120.0, "1h": 3600.0, "45": 45.0, "0.5": 0.5, "null": None}
    for text, value in texts.items():
        job = make(f"publish.every={text}")
        assert job.publish.every == value
        assert make(raw=job.to_dict()).publish.every == value
    assert make("publish.every=hour", raw=HOURS).publish.every == "hour"


def test_forms_of_publish_repository() -> None:
    for location in ("models", "/abs/models", "s3://bucket/models", "hdfs://name:9000/models", "memory://x"):
        assert make(f"publish.repository={location}").publish.repository == location


def test_publish_settings_do_not_affect_the_parameters() -> None:
    changed = make("publish.every=30s", "publish.keep=9", "cube.replicas=2", "publish.gate.min_auc=0.7")
    assert differences(make(), changed) == []


def test_a_store_by_its_addresses() -> None:
    job = make(
        "cube.shards=2",
        "cube.replicas=2",
        "cube.addresses=[['127.0.0.1:1', 'localhost:2'], ['[::1]:3', '127.0.0.2:4']]",
    )
    assert job.cube.addresses == (("127.0.0.1:1", "localhost:2"), ("[::1]:3", "127.0.0.2:4"))
    assert make(raw=job.to_dict()).cube == job.cube
    assert make("cube.addresses=['127.0.0.1:1']").cube.addresses == (("127.0.0.1:1",),)
    assert make("cube.replicas=3", "cube.min_ready=3").cube.min_ready == 3


def test_a_store_on_other_machines() -> None:
    remote = "cube.addresses=['10.0.0.7:8600']"
    make(remote, "cube.insecure=true")
    make(remote, "cube.token='${TOKEN}'", "cube.tls.ca=ca.pem")


@pytest.mark.parametrize(
    ("section", "keys", "line"),
    [
        ("publish", {"every": "day"}, "every: expected `epoch`, `hour` or a duration such as `30s`, got `day`"),
        ("publish", {"every": True}, "every: expected `epoch`, `hour` or a duration such as `30s`, got `true`"),
        ("publish", {"every": [1]}, "every: expected `epoch`, `hour` or a duration such as `30s`, got a list"),
        ("publish", {"every": "10ms"}, "every: expected from 0.5 to 1e+09 seconds, got `10ms`"),
        ("publish", {"every": 0}, "every: expected from 0.5 to 1e+09 seconds, got 0"),
        (
            "publish",
            {"every": "hour"},
            " `every`: `hour` needs `data.hours`, expected `epoch` or a duration such as `1h`",
        ),
        ("publish", {"base_every": -1}, "base_every: expected at least 0, got -1"),
        ("publish", {"row_type": "f64"}, "row_type: expected `f32`, `f16` or `int8`, got `f64`"),
        ("publish", {"outputs": []}, "outputs: expected at least 1 item, got 0"),
        ("publish", {"outputs": ["buy"]}, " `outputs`: expected labels from `click`, got `buy`"),
        ("publish", {"outputs": ["click", "click"]}, "outputs: label `click` is given twice, expected each once"),
        ("publish", {"keep": 0}, "keep: expected at least 1, got 0"),
        (
            "publish",
            {"repository": "S3://x"},
            "repository: expected a path or a URL such as `s3://bucket/models`, got `S3://x`",
        ),
        (
            "publish",
            {"repository": "sftp://me:hidden@host/models"},
            "repository: expected a URL without a password; credentials come from the environment",
        ),
        ("publish", {"repository": ""}, "repository: expected at least 1 character, got 0"),
        ("publish", {"gate": {"min_auc": 1.5}}, "gate.min_auc: expected at most 1, got 1.5"),
        ("publish", {"gate": {"auc": 0.5}}, "gate.auc: unknown key, did you mean `min_auc`?"),
        ("cube", {"shards": 0}, "shards: expected at least 1, got 0"),
        (
            "cube",
            {"addresses": ["nowhere"]},
            "addresses.0.0: expected an address such as `10.0.0.7:8600`, got `nowhere`",
        ),
        (
            "cube",
            {"addresses": ["127.0.0.1:99999"]},
            "addresses.0.0: expected an address such as `10.0.0.7:8600`, got `127.0.0.1:99999`",
        ),
        (
            "cube",
            {"shards": 2, "addresses": ["127.0.0.1:1"]},
            " `addresses`: expected a list for each of the 2 shards, got 1",
        ),
        ("cube", {"replicas": 2, "addresses": ["127.0.0.1:1"]}, " `addresses.0`: expected 2 replicas, got 1"),
        (
            "cube",
            {"shards": 2, "addresses": ["127.0.0.1:1", "127.0.0.1:1"]},
            " `addresses.1`: `127.0.0.1:1` is given twice, expected each once",
        ),
        ("cube", {"replicas": 2, "min_ready": 3}, " `min_ready`: expected at most `replicas`, 2, got 3"),
        (
            "cube",
            {"addresses": ["a.b:1"]},
            " `addresses`: `a.b:1` is another machine, which needs `token` (or `cube.insecure: true`)",
        ),
        (
            "cube",
            {"addresses": ["a.b:1"], "token": "${T}"},
            " `addresses`: `a.b:1` is another machine, which needs `tls.ca` (or `cube.insecure: true`)",
        ),
        (
            "cube",
            {"token": "literal"},
            "token: expected a secret as `${ENV}` or `file:PATH`, got a literal (not shown)",
        ),
    ],
)
def test_mistakes_are_one_line(section: str, keys: dict[str, Any], line: str) -> None:
    message = refusal(section, **keys)
    # A mistake in a combination of keys is reported for the section.
    assert message == f"job.yaml: {section}" + (f":{line}" if line.startswith(" ") else f".{line}")


def test_hourly_jobs_do_not_publish_by_epoch() -> None:
    assert refusal("publish", HOURS, every="epoch") == (
        "job.yaml: publish: `every`: with `data.hours` expected `hour` or a duration, got `epoch`"
    )
