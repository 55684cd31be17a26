"""The command line: its output, its exit codes, and one-line errors instead of tracebacks."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrec import cli
from elasticrec.config import load_job
from elasticrec.errors import UnavailableError

PLANTED = "pl4nted-s3cret"
JOB = "name: demo\ndata: {format: criteo, train: day.tsv}\nserve: {token: '${DEMO_TOKEN}'}\n"

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEMO_TOKEN", PLANTED)
    Path("job.yaml").write_text(JOB)
    Path("day.tsv").touch()


def fails(capsys: Capture, *arguments: str, code: int = 2) -> list[str]:
    assert cli.main(arguments) == code
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return output.err.splitlines()


def test_version_and_help_are_printed(capsys: Capture) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("elasticrec ")
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.main(arguments) == 0
        assert "check" in capsys.readouterr().out


def test_check_prints_a_job_that_loads(capsys: Capture) -> None:
    assert cli.main(["check", "job.yaml", "--set", "train.epochs=3", "--set", "model.dim=4"]) == 0
    output = capsys.readouterr()
    assert output.err == "ok: 1 training files, 0 evaluation files\n"
    assert "token: '***'" in output.out
    assert PLANTED not in output.out
    Path("copy.yaml").write_text(output.out.replace("'***'", "${DEMO_TOKEN}"))
    resolved = load_job("copy.yaml")
    assert (resolved.train.epochs, resolved.model.dim) == (3, 4)


def test_schema_prints_a_json_schema(capsys: Capture) -> None:
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Job"


def test_user_errors_are_one_line(capsys: Capture) -> None:
    assert fails(capsys, "check", "nope.yaml") == ["error: nope.yaml: no such file or directory"]
    assert fails(capsys, "check", ".") == ["error: .: is a directory"]
    assert fails(capsys, "check") == ["error: missing argument `JOB`, see `--help`"]
    (line,) = fails(capsys, "nope")
    assert line.startswith("error: no such command `nope`")
    assert len(fails(capsys, "check", "--nope")) == 1
    assert fails(capsys, "check", "job.yaml", "--set", "train.epochs=0", "--set", "model.dim=x") == [
        "error: --set model.dim=x: expected an integer, got `x`",
        "error: --set train.epochs=0: expected at least 1, got 0",
    ]
    Path("day.tsv").unlink()
    assert fails(capsys, "check", "job.yaml") == [
        f"error: job.yaml: data.train: no file matches `{Path.cwd()}/day.tsv`"
    ]


def test_a_literal_secret_is_not_printed(capsys: Capture) -> None:
    (line,) = fails(capsys, "check", "job.yaml", "--set", f"serve.token={PLANTED}")
    assert line.startswith("error: --set serve.token=***: expected a secret as `${ENV}` or `file:PATH`, got")
    assert PLANTED not in line


def raising(error: BaseException) -> Callable[..., None]:
    def load(*_: object) -> None:
        raise error

    return load


@pytest.mark.parametrize(
    ("error", "code", "lines"),
    [
        (KeyboardInterrupt(), 130, []),
        (UnavailableError("127.0.0.1:1 did not answer"), 2, ["error: 127.0.0.1:1 did not answer"]),
        (PermissionError(13, "Permission denied", "a"), 2, ["error: a: permission denied"]),
        (OSError("odd"), 2, ["error: odd"]),
    ],
)
def test_exit_codes(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, lines: list[str]
) -> None:
    monkeypatch.setattr("elasticrec.config.load_job", raising(error))
    assert fails(capsys, "check", "job.yaml", code=code) == lines


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticrec.config.load_job", raising(KeyError("bug")))
    with pytest.raises(KeyError):
        cli.main(["check", "job.yaml"])


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    package = str(Path(cli.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": package}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_exit_codes_of_a_process() -> None:
    done = python("-m", "elasticrec.cli", "check", "job.yaml")
    assert (done.returncode, done.stderr) == (0, "ok: 1 training files, 0 evaluation files\n")
    done = python("-m", "elasticrec.cli", "check", "job.yaml", "--set", "nme=x")
    assert (done.returncode, done.stderr) == (2, "error: --set nme=***: unknown key, did you mean `name`?\n")


def test_the_command_line_and_the_job_do_not_import_torch() -> None:
    code = "import elasticrec.cli, elasticrec.config, elasticrec.run, sys; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"


def test_a_closed_pipe_gives_no_traceback() -> None:
    command = f"'{sys.executable}' -m elasticrec.cli schema | true"
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run(command, shell=True, env=environment, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
