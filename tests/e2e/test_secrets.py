"""A secret of a job works, and appears in no output of a run."""

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from elasticrec.config import parse_job
from elasticrec.errors import ConfigError
from elasticrec.serving.server import start_server
from support.harness import elasticrec, serving, succeed, write_job

SECRET = "correct-horse-7f3a-battery"
ENV = {"TEST_TOKEN": SECRET}


def text_of(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(response.read().decode())


def ask(url: str, token: str | None) -> int:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.slow
def test_a_planted_secret_appears_nowhere(tmp_path: Path) -> None:
    write_job(tmp_path, format="slots", kind="dnn", samples=1000, serve__token="${TEST_TOKEN}")
    outputs = []
    for arguments in (["check", "job.yaml"], ["train", "job.yaml"], ["publish", "tiny"]):
        result = elasticrec(*arguments, cwd=tmp_path, env=ENV)
        assert result.returncode == 0, result.stderr
        outputs += [result.stdout, result.stderr]
    assert "token: '***'" in outputs[0]
    with serving("models/tiny", "--job", "job.yaml", cwd=tmp_path, env=ENV, log=tmp_path / "serve.log") as server:
        url = f"{server.url}/v1/models/tiny"
        assert [ask(url, None), ask(url, "wrong"), ask(url, SECRET)] == [401, 401, 200]
        assert ask(f"{server.url}/health", None) == 200
        assert ask(f"{server.url}/metrics", None) == 401
        outputs.append(text_of(f"{server.url}/metrics", SECRET) + text_of(url, SECRET))
        command = Path(f"/proc/{server.process.pid}/cmdline").read_bytes().decode()
        outputs.append(command)
        (part,) = (tmp_path / "data/20260101/01").glob("*.txt")
        predict = ["predict", str(part), "--server", server.url]
        scores = succeed(*predict, "--token", "${TEST_TOKEN}", cwd=tmp_path, env=ENV)
        assert len(scores.splitlines()) == 500
        refused = elasticrec(*predict, "--token", "${TEST_TOKEN}", cwd=tmp_path, env={"TEST_TOKEN": "wrong"})
        assert refused.returncode == 2 and "401" in refused.stderr
        literal = elasticrec(*predict, "--token", SECRET, cwd=tmp_path, env=ENV)
        assert literal.returncode == 2
        outputs += [scores, refused.stderr, literal.stdout, literal.stderr]
    for text in outputs:
        assert SECRET not in text
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"job.yaml", "manifest.json", "metrics.jsonl", "serve.log"} <= {path.name for path in written}
    for path in written:
        assert SECRET.encode() not in path.read_bytes(), path


@pytest.mark.parametrize("secret", [f"{SECRET}\nsecond line", f"{SECRET}✓", f"{SECRET} {SECRET}"])
def test_a_token_that_http_cannot_carry_is_refused_and_not_shown(tmp_path: Path, secret: str) -> None:
    (tmp_path / "token").write_text(secret)
    (tmp_path / "samples.txt").write_text("1 0 5:0\n")
    result = elasticrec(
        *("predict", "samples.txt", "--server", "http://127.0.0.1:9", "--token", "file:token"), cwd=tmp_path
    )
    assert result.returncode == 2 and "expected visible ASCII" in result.stderr
    assert SECRET not in result.stdout + result.stderr
    settings = parse_job(
        {"name": "x", "data": {"format": "criteo", "train": "x"}, "serve": {"token": "file:token"}}, base=tmp_path
    ).serve
    with pytest.raises(ConfigError, match="expected visible ASCII"):
        start_server(settings, [("demo", [("", 1.0)])])


def test_a_literal_secret_is_refused_and_not_printed(tmp_path: Path) -> None:
    write_job(tmp_path, format="slots", kind="dnn", samples=100, serve__token=SECRET)
    for arguments in (["check", "job.yaml"], ["check", "job.yaml", "--set", f"serve.token={SECRET}"]):
        result = elasticrec(*arguments, cwd=tmp_path)
        assert result.returncode == 2
        assert "${ENV}" in result.stderr and SECRET not in result.stdout + result.stderr


def test_the_schema_names_the_form_of_a_secret(tmp_path: Path) -> None:
    schema = json.loads(succeed("schema", cwd=tmp_path))
    assert "file:" in json.dumps(schema["$defs"]["Serve"]["properties"]["token"])
