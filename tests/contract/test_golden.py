"""Files of every released format: this release still reads them and finds the same rows in them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from elasticrec import _core
from elasticrec.config import load_job
from elasticrec.manifest import FORMAT, verify_files
from elasticrec.repository.find import find_version
from elasticrec.training.checkpoint import Progress, State, open_checkpoint, restore
from elasticrec.training.dense import FlatParameters
from elasticrec.training.embedding import Embedding
from elasticrec.training.evaluate import logits_of
from elasticrec.training.metrics import MetricSums
from elasticrec.training.network import Scorer, build_model

FORMATS = sorted((Path(__file__).parent / "golden").glob("format-*"))
ABSENT = 123456789


def expected_of(golden: Path) -> dict[str, Any]:
    expected: dict[str, Any] = json.loads((golden / "expected.json").read_bytes())
    return expected


def test_the_current_format_has_golden_files() -> None:
    assert f"format-{FORMAT}" in [path.name for path in FORMATS]
    for path in (file for golden in FORMATS for file in golden.rglob("*") if file.is_file()):
        assert path.stat().st_size < 20_000, path
        assert str(Path.home()).encode() not in path.read_bytes(), path


@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_checkpoint_is_restored(golden: Path) -> None:
    job, expected = load_job(golden / "job.yaml"), expected_of(golden)
    model = build_model(job)
    state = State(Embedding(job, model.columns), FlatParameters(model, job), [MetricSums() for _ in job.data.labels])
    checkpoint = open_checkpoint(golden / "checkpoint")
    restore(checkpoint, job, state)
    assert checkpoint.progress == Progress(
        epoch=2, unit=2, batches=0, steps=16, samples=240, records=240, bad_records=0, finished=True
    )
    assert [sums.result().to_dict() for sums in state.sums] == checkpoint.manifest["metrics"]["train"]

    table = state.embedding.table
    assert len(table) == len(expected["rows"]) == 6
    assert table.get(ABSENT) is None
    for sign, row in expected["rows"].items():
        found = table.get(int(sign))
        assert found is not None
        assert list(found) == row

    parser = _core.Parser(json.dumps(job.features()))
    batch = parser.parse("\n".join(expected["lines"]).encode(), labels=False)
    logits = logits_of(state.embedding, Scorer(model), batch)
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), expected["scores"], atol=1e-5)


@pytest.mark.parametrize("golden", FORMATS, ids=lambda path: path.name)
def test_a_version_is_read(golden: Path) -> None:
    expected = expected_of(golden)
    path, manifest = find_version(golden / "version")
    verify_files(path, manifest)
    assert (manifest["model"], manifest["version"], manifest["table"]["rows"]) == ("golden", 1, 6)
    assert manifest["features"] == load_job(golden / "job.yaml").features()

    signs = [int(sign) for sign in expected["rows"]]
    rows, found = _core.read_cube([str(path / "cube/part-00000")], [*signs, ABSENT])
    assert found == len(signs)
    np.testing.assert_array_equal(rows[:-1], np.array([row[3] for row in expected["rows"].values()], np.float32))
    assert not rows[-1].any()

    session = onnxruntime.InferenceSession(path / manifest["graph"]["file"], providers=["CPUExecutionProvider"])
    (scores,) = session.run(manifest["graph"]["outputs"], {"pooled": pooled(path, manifest, expected["lines"])})
    np.testing.assert_allclose(scores, expected["scores"], atol=1e-5)


def pooled(path: Path, manifest: dict[str, Any], lines: list[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Look up and pool each slot of each line, as the manifest describes."""
    slots = manifest["features"]["slots"]
    width = sum(column["width"] for column in manifest["table"]["columns"])
    out = np.zeros((len(lines), len(slots), width), np.float32)
    for at, line in enumerate(lines):
        for number, slot in enumerate(slots):
            signs = [int(field.split(":")[0]) for field in line.split() if field.endswith(f":{slot['name']}")]
            if signs:
                rows, _ = _core.read_cube([str(path / "cube/part-00000")], signs)
                divisor = {"sum": 1, "mean": len(signs), "sqrtn": len(signs) ** 0.5}[slot["pooling"]]
                out[at, number] = rows.sum(0) / divisor
    return out
