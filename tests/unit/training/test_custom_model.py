"""A custom model: from its file to a run, a version and a score; and the errors of a broken file."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from elasticrec import _core, cli
from elasticrec.config import Job, differences, fingerprint, load_job, match_files
from elasticrec.data.demo import write_demo
from elasticrec.errors import ConfigError, ElasticRecError, ModelError
from elasticrec.publish.export import check_exports
from elasticrec.publish.local import publish_run
from elasticrec.run import Run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.training.loop import train_job
from elasticrec.training.network import build_model
from elasticrec.training.predict import load_checkpoint
from support.small import MakeJob, WriteSamples, sample_lines

EXAMPLE = Path(__file__).parents[3] / "examples/custom_model"

MODEL = """
from torch import nn

from elasticrec.models import Column, Model


class MyModel(Model):
    def __init__(self, shape, options):
        super().__init__(shape, options)
        self.columns = (Column("deep", options.dim),)
        self.out = nn.Linear(shape.num_slots * options.dim, shape.num_labels)

    def forward(self, columns, dense):
        return self.out(columns["deep"].flatten(1))
"""


pytestmark = pytest.mark.usefixtures("own_directory")


def custom_job(make_job: MakeJob, source: str = MODEL, **model: object) -> Job:
    Path("my_model.py").write_text(source)
    return make_job(model={"kind": "my_model.py:MyModel", "dim": 2, **model})


def scores(run: Run) -> np.ndarray:
    return load_checkpoint(run).predict("".join(f"{line}\n" for line in sample_lines(50, 9)).encode())


@pytest.mark.slow
def test_the_example_is_trained_published_and_scored(tmp_path: Path) -> None:
    assert len((EXAMPLE / "my_model.py").read_text().splitlines()) < 30
    shutil.copytree(EXAMPLE, tmp_path / "example")
    write_demo(tmp_path / "example/data", samples=8000, slots=8)
    job = load_job("example/job.yaml", ["train.threads=1"])
    check_exports(job)
    summary = train_job(job)
    assert summary.evaluation is not None and summary.evaluation["click"].auc > 0.55
    published = publish_run(Run.of(job))
    text = match_files(job, "eval")[0].read_bytes()
    expected = load_checkpoint(Run.of(job)).predict(text)
    assert len(np.unique(expected.round(5))) > len(expected) / 2
    scored = _core.Predictor(str(published.path), str(library_path())).predict(text)
    np.testing.assert_allclose(scored, expected, atol=1e-5)


def test_the_guide_shows_the_example() -> None:
    _, _, code = (EXAMPLE / "my_model.py").read_text().partition('"""\n\n')
    assert code in (EXAMPLE.parents[1] / "docs/guide/model.md").read_text()


def test_a_run_resumes_without_the_original_model_file(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples()
    job = custom_job(make_job)
    train_job(job)
    run = Run.of(job)
    expected = scores(run)
    assert expected.std() > 0.001
    Path("my_model.py").unlink()
    assert np.array_equal(scores(run), expected)
    # the run has its own copy of the model file: it continues and starts over
    again = load_job(run.job_path, ["train.epochs=2"])
    assert train_job(again).progress.epoch == 2
    assert not np.array_equal(scores(run), expected)
    train_job(load_job(run.job_path, ["train.epochs=1"]), fresh=True)
    assert np.array_equal(scores(run), expected)
    with pytest.raises(ConfigError, match=r"^job\.yaml: model\.kind: .*/my_model\.py: no such file or directory$"):
        train_job(make_job(model={"kind": "my_model.py:MyModel", "dim": 2}))


def test_a_model_file_is_identified_by_its_content(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples()
    job = custom_job(make_job)
    train_job(job)
    Path("lib").mkdir()
    Path("my_model.py").rename("lib/other.py")
    moved = make_job(model={"kind": "lib/other.py:MyModel", "dim": 2})
    assert differences(job, moved) == []
    train_job(moved)
    changed = custom_job(make_job, MODEL + "\n# another version\n")
    with pytest.raises(ConfigError, match=r"differs from the job of runs/small in `model\.kind`;"):
        train_job(changed)
    assert differences(job, custom_job(make_job, options={"rate": 1})) == ["model.options"]


def test_a_running_training_ignores_changes_of_the_model_file(make_job: MakeJob) -> None:
    job = custom_job(make_job)
    before = fingerprint(job)
    Path("my_model.py").write_text("raise ValueError")
    assert fingerprint(job) == before
    build_model(job)


def test_dropout_depends_only_on_the_batch(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples()
    source = MODEL.replace(
        'columns["deep"].flatten(1)', 'nn.functional.dropout(columns["deep"].flatten(1), 0.5, self.training)'
    )
    job = custom_job(make_job, source)
    train_job(job)
    once = scores(Run.of(job))
    train_job(load_job(Run.of(job).job_path, ["train.epochs=2"]))
    resumed = scores(Run.of(job))
    torch.manual_seed(7)
    train_job(load_job(Run.of(job).job_path, ["train.epochs=2"]), fresh=True)
    assert np.array_equal(scores(Run.of(job)), resumed)
    assert not np.array_equal(once, resumed)
    train_job(custom_job(make_job), fresh=True)
    assert not np.array_equal(scores(Run.of(job)), once), "dropout changes the learned weights"


def test_options_are_passed_to_the_model(make_job: MakeJob) -> None:
    source = MODEL.replace('Column("deep", options.dim)', 'Column(options.extra["name"], options.dim)')
    model = build_model(custom_job(make_job, source.replace('columns["deep"]', "columns['x']"), options={"name": "x"}))
    assert [column.name for column in model.columns] == ["x"]


BROKEN = {
    "no_import": ("import nothing_of_the_kind\n", "1: ModuleNotFoundError: No module named 'nothing_of_the_kind'"),
    "syntax": ("class MyModel(:\n", "1: SyntaxError: invalid syntax"),
    "raises": ("\n\nraise RuntimeError('two\\nlines')\n", "3: RuntimeError: two"),
    "exits": ("raise SystemExit(3)\n", "1: SystemExit: 3"),
    "no_class": (MODEL.replace("MyModel", "Mine"), " expected a class `MyModel`, got `Column`, `Model`, `Mine`"),
    "no_model": ("class MyModel:\n    pass\n", " `MyModel`: expected a subclass of `elasticrec.models.Model`"),
    "constructor": (MODEL.replace("options.dim)", "options.size)"), "10: AttributeError: 'Options' object"),
    "columns": (
        MODEL.replace("self.columns =", "self.cols ="),
        " `MyModel`: columns: expected a tuple of `Column`, got NoneT",
    ),
    "widths": (
        MODEL.replace('("deep", options.dim)', '("deep", 0)'),
        " `MyModel`: columns: expected distinct names and wid",
    ),
    "forward": (MODEL.replace('"deep"].', '"deap"].'), "14: KeyError: 'deap'"),
    "logits": (
        MODEL.replace(".flatten(1))", ".flatten(1))[:, 0]"),
        " `MyModel`: forward: expected a tensor [2, 1] for 2 samp",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_errors_of_a_custom_model_are_one_line(
    make_job: MakeJob, write_samples: WriteSamples, source: str, message: str
) -> None:
    write_samples()
    with pytest.raises(ElasticRecError) as caught:
        train_job(custom_job(make_job, source))
    line = str(caught.value)
    assert line.startswith(f"{Path.cwd()}/my_model.py:{message}")
    assert "\n" not in line
    assert not Path("runs/small").exists(), "no run is created for a broken model"


def test_a_model_that_cannot_be_exported_fails_the_check(
    make_job: MakeJob, write_samples: WriteSamples, capsys: pytest.CaptureFixture[str]
) -> None:
    write_samples()
    source = (
        MODEL.replace("return self", "logits = self").rstrip()
        + "\n        return logits if logits.sum() > 0 else -logits\n"
    )
    job = custom_job(make_job, source)
    with pytest.raises(ModelError, match=r"^model: cannot be exported to ONNX: [^\n]+$"):
        check_exports(job)
    Path("job.yaml").write_text(
        "name: small\ndata: {format: slots, train: train.txt, slots: 0-2}\nmodel: {kind: 'my_model.py:MyModel'}\n"
    )
    assert cli.main(["check", "job.yaml"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith("error: model: cannot be exported to ONNX: ")
    assert len(output.err.splitlines()) == 1
    Path("my_model.py").write_text(MODEL)
    assert cli.main(["check", "job.yaml"]) == 0


def test_an_existing_model_file_is_not_overwritten(make_job: MakeJob, write_samples: WriteSamples) -> None:
    write_samples()
    Path("runs/small").mkdir(parents=True)
    Path("runs/small/model.py").write_text("# mine")
    with pytest.raises(ConfigError, match=r"^runs/small: not a run, but has a `model\.py`"):
        train_job(custom_job(make_job))
    assert Path("runs/small/model.py").read_text() == "# mine"
