"""Runs: one directory per training, found by job file, name or path."""

from pathlib import Path

import pytest

from elasticrec.config import Job, load_job, parse_job
from elasticrec.errors import ConfigError
from elasticrec.run import Run, resolve_run

JOB = "name: {name}\ndata: {{format: criteo, train: day.tsv}}\nserve: {{token: '${{DEMO_TOKEN}}'}}\n"


pytestmark = pytest.mark.usefixtures("own_directory")


def job_file(path: str = "job.yaml", name: str = "demo") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(JOB.format(name=name))
    return file


def make_job(name: str = "demo", *overrides: str) -> Job:
    return load_job(job_file(name=name), overrides)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_run(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_directory_of_a_run() -> None:
    run = Run.create(make_job())
    assert run.path == Path("runs/demo")
    assert run.name == "demo"
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "job.yaml"]
    assert (run.metrics_path, run.units) == (run.path / "metrics.jsonl", run.path / "units")


def test_the_copy_of_the_job_is_the_same_in_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEMO_TOKEN", "pl4nted")
    job = make_job("demo", "train.epochs=3")
    run = Run(Run.create(job).path.resolve())
    monkeypatch.chdir("/")
    assert run.job().to_dict(references=True) == job.to_dict(references=True)
    assert run.job().data.train == (str(tmp_path / "day.tsv"),)
    assert "pl4nted" not in run.job_path.read_text()
    token = run.job().serve.token
    assert token is not None
    assert token.reveal() == "pl4nted"


def test_forms_of_run_names(tmp_path: Path) -> None:
    run = Run.create(make_job())
    for text in (
        "job.yaml",
        "demo",
        "runs/demo",
        "runs/demo/",
        str(tmp_path / "runs/demo"),
        "runs/demo/job.yaml",
    ):
        found = resolve_run(text)
        assert found.path.resolve() == run.path.resolve(), text
        assert found.name == "demo", text


def test_a_run_is_found_from_its_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Run.create(make_job()).path)
    assert resolve_run(".").name == "demo"
    assert resolve_run("job.yaml").name == "demo"


def test_a_directory_named_like_the_job_is_not_its_run() -> None:
    job = load_job(job_file("demo/job.yaml"))
    assert refusal("demo") == "demo: no such run, runs/ contains no runs"
    assert "not a run" in refusal("./demo/")
    run = Run.create(job)
    assert resolve_run("demo") == run
    assert resolve_run("demo/job.yaml") == run


def test_a_missing_run_is_an_error() -> None:
    assert refusal("demo") == "demo: no such run, runs/ contains no runs"
    job_file()
    assert refusal("job.yaml") == "runs/demo: no such run, train it first: elasticrec train job.yaml"
    for name in ("demo-1", "demo-2", "other"):
        Run.create(make_job(name))
    Path("runs/stray").mkdir()
    assert refusal("demo1") == "demo1: no such run, did you mean `demo-1` or `demo-2`?"
    assert refusal("zzz") == "zzz: no such run, runs/ contains `demo-1`, `demo-2`, `other`"
    assert refusal("runs/othr") == "runs/othr: no such run, did you mean `other`?"
    assert refusal("") == "run: expected a job file, a name or a directory of a run, got nothing"
    with pytest.raises(FileNotFoundError):
        resolve_run("missing.yaml")


def test_another_root(tmp_path: Path) -> None:
    root = tmp_path / "elsewhere"
    run = Run.create(make_job(), root)
    assert resolve_run("demo", root) == run


def test_the_copy_is_updated_until_the_first_checkpoint() -> None:
    Run.create(make_job())
    run = Run.create(make_job("demo", "train.batch_size=64"))
    assert run.job().train.batch_size == 64


def test_a_changed_job_does_not_resume_and_keeps_the_copy() -> None:
    run = Run.create(make_job())
    (run.checkpoints / "1").mkdir()
    before = run.job_path.read_text()
    with pytest.raises(ConfigError) as caught:
        Run.create(make_job("demo", "train.batch_size=64", "model.dim=4"))
    assert str(caught.value) == (
        "job.yaml: differs from the job of runs/demo in `model.dim`, `train.batch_size`; "
        "change it back, rename the job, or remove runs/demo"
    )
    assert run.job_path.read_text() == before
    assert Run.create(make_job("demo", "train.epochs=2")).job().train.epochs == 2


def test_a_copy_that_cannot_be_written_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.create(make_job())

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="no"):
        Run.create(make_job("demo", "train.epochs=2"))
    assert run.job().train.epochs == 1
    assert sorted(path.name for path in run.path.iterdir()) == ["checkpoints", "job.yaml"]


def test_a_run_is_locked_by_one_process(tmp_path: Path) -> None:
    run = Run(tmp_path / "runs/demo")
    with run.locked():
        with pytest.raises(ConfigError, match="another process is training it"), run.locked():
            pass
    with run.locked():
        pass


def test_a_user_directory_with_a_job_is_not_used_as_a_run(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "demo").mkdir(parents=True)
    (root / "demo/job.yaml").write_text("# mine")
    with pytest.raises(ConfigError, match="not a run"):
        Run.create(make_run_job(tmp_path), root)
    assert (root / "demo/job.yaml").read_text() == "# mine"


def test_discarding_a_run_keeps_other_files(tmp_path: Path) -> None:
    run = Run.create(make_run_job(tmp_path), tmp_path / "runs")
    (run.path / "notes.txt").write_text("mine")
    run.discard()
    assert [path.name for path in run.path.iterdir()] == ["notes.txt"]
    (run.path / "notes.txt").unlink()
    Run.create(make_run_job(tmp_path), tmp_path / "runs").discard()
    assert not run.path.exists()


def test_a_run_starts_over_after_a_crash_while_it_is_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "runs"
    run = Run.create(make_run_job(tmp_path), root)
    for name in ("step-1", "step-2"):
        (run.checkpoints / name).mkdir()
        (run.checkpoints / name / "manifest.json").touch()
    with monkeypatch.context() as patch:
        patch.setattr("elasticrec.run.shutil.rmtree", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.discard()
    assert run.exists() and not list(run.checkpoints.glob("*/manifest.json"))
    Run.create(make_run_job(tmp_path), root).discard()
    assert not run.path.exists()


def make_run_job(directory: Path) -> Job:
    raw = {"name": "demo", "data": {"format": "slots", "train": "x", "slots": [0]}}
    return parse_job(raw, base=directory)
