"""Secrets of a job: read when used, and never shown."""

import pickle
import traceback
from pathlib import Path
from typing import Any

import pytest

from elasticrec.config import Job, Secret, load_job, parse_job
from elasticrec.config.document import parse
from elasticrec.errors import ConfigError

BASE = Path("/base")
PLANTED = "pl4nted-s3cret"
SLOTS: dict[str, Any] = {"name": "demo", "data": {"format": "slots", "train": "logs", "slots": ["0-2"]}}


def make(*overrides: str, raw: dict[str, Any] = SLOTS) -> Job:
    return parse_job(raw, base=BASE, source="job.yaml", overrides=overrides)


def write(directory: Path, text: str) -> Path:
    path = directory / "job.yaml"
    path.write_text(text, "utf-8")
    return path


def test_a_secret_is_read_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_TOKEN", PLANTED)
    assert Secret("${DEMO_TOKEN}").reveal() == PLANTED
    (tmp_path / "token").write_text(f"{PLANTED}\n")
    job = parse_job({**SLOTS, "serve": {"token": "file:token"}}, base=tmp_path)
    assert job.serve.token is not None
    assert job.serve.token.reference == f"file:{tmp_path}/token"
    assert job.serve.token.reveal() == PLANTED


@pytest.mark.parametrize("reference", ["${DEMO_TOKEN}", "file:token"])
def test_a_missing_secret(reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DEMO_TOKEN", raising=False)
    secret = Secret(reference, tmp_path)
    with pytest.raises(ConfigError) as caught:
        secret.reveal()
    assert f"secret `{secret.reference}`: " in str(caught.value)


def test_an_empty_or_binary_secret(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff" + PLANTED.encode())
    with pytest.raises(ConfigError, match="got an empty text"):
        Secret("file:empty", tmp_path).reveal()
    with pytest.raises(ConfigError, match="not UTF-8 text") as caught:
        Secret("file:binary", tmp_path).reveal()
    assert caught.value.__context__ is None


def test_dumps_mask_a_secret_and_keep_its_reference_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_TOKEN", PLANTED)
    job = make("serve.token=${DEMO_TOKEN}")
    assert job.serve.token is not None
    job.serve.token.reveal()
    shown = [
        job.to_yaml(),
        str(job.to_dict()),
        repr(job),
        str(job),
        job.model_dump_json(),
        str(job.model_dump()),
    ]
    for text in shown:
        assert "***" in text
        assert "DEMO_TOKEN" not in text
    assert "token: ${DEMO_TOKEN}" in job.to_yaml(references=True)
    for text in (*shown, job.to_yaml(references=True), str(pickle.dumps(job))):
        assert PLANTED not in text
    reloaded = parse_job(parse(job.to_yaml(references=True), "copy"), base=Path("/other"))
    assert reloaded.to_dict(references=True) == job.to_dict(references=True)


LITERALS = [
    f"name: demo\nserve: {{token: {PLANTED}}}\n",
    f"name: demo\nserve: {{tokn: {PLANTED}}}\n",
    f"name: demo\nserve: {PLANTED}\n",
    f"name: demo\nserve: [{PLANTED}]\n",
    f"name: demo\nserve: {{token: [{PLANTED}]}}\n",
    f"name: demo\nserve: {{token: *{PLANTED}}}\n",
    f"name: demo\nserve: {{token: !{PLANTED} x}}\n",
    f"name: demo\nserve: {{token: !{PLANTED}!x x}}\n",
    f"name: demo\nserve: {{token: '{PLANTED}\n",
    f"name: demo\nserve:\n  token: %{PLANTED}\n",
    f"name: demo\nserve:\n  token: {PLANTED}: x\n",
    f"name: demo\nserve:\n  token: ${{{PLANTED}}}\n",
    f"{PLANTED}\n",
]


@pytest.mark.parametrize("text", LITERALS)
def test_a_literal_secret_in_the_file_is_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_job(write(tmp_path, text))
    assert_not_repeated(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        f"serve.token={PLANTED}",
        f"serve.token=[{PLANTED}",
        f"serve.token=*{PLANTED}",
        f"serve.tokn={PLANTED}",
        f"serv.token={PLANTED}",
        f"serve={{token: {PLANTED}}}",
        f"serve={PLANTED}",
        f"serve.token.x={PLANTED}",
        f"serve.0={PLANTED}",
        f"serve token {PLANTED}",
    ],
)
def test_a_literal_secret_in_set_is_refused_and_not_repeated(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(override)
    assert_not_repeated(caught.value)


def test_a_literal_secret_in_code_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        Secret(PLANTED)
    assert PLANTED not in str(caught.value)


def assert_not_repeated(error: ConfigError) -> None:
    assert error.__context__ is None
    assert error.__cause__ is None
    assert PLANTED not in str(error)
    assert PLANTED not in repr(error)
    own = traceback.TracebackException.from_exception(error)
    assert PLANTED not in "".join(own.format_exception_only())
