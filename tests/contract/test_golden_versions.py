"""A repository with manifests of format 2, written by the release that introduced it: this release reads the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.repository.find import find_chain, find_version
from elasticrec.repository.repository import Current, Repository
from elasticrec.repository.rows import open_rows
from elasticrec.repository.verify import verify
from elasticrec.serving.onnxruntime import library_path

GOLDEN = Path(__file__).parent / "golden" / "versions-2"


def expected_of(version: int) -> Any:
    return json.loads((GOLDEN / "expected.json").read_bytes())[str(version)]


def test_the_repository_is_read() -> None:
    repository = Repository.open(GOLDEN / "model")
    assert repository.directories() == {1: "1", 2: "1/deltas/2"}
    assert (repository.state(), repository.pins()) == (Current(1, 3, is_held=True), [2])
    base, delta = repository.chain(2)
    assert (base.manifest["format"], base.manifest["base"], base.manifest["parent"]) == (2, None, None)
    assert (delta.manifest["format"], delta.base, delta.parent) == (2, 1, 1)
    assert (delta.manifest["table"]["changed"], delta.manifest["table"]["removed"]) == (3, 1)
    assert base.manifest["graph"]["labels"] == ["buy", "click"]
    for version in (1, 2):
        assert verify(repository, version) == []
    for path in GOLDEN.rglob("*"):
        assert path.is_dir() or path.stat().st_size < 20_000, path
        assert path.is_dir() or str(Path.home()).encode() not in path.read_bytes(), path


@pytest.mark.parametrize("version", [1, 2])
def test_rows_and_scores_have_not_changed(version: int) -> None:
    expected = expected_of(version)
    view = open_rows(find_chain(f"{GOLDEN / 'model'}:{version}"))
    signs = [int(sign) for sign in expected["rows"]]
    rows, present = view.lookup(np.array([*signs, *expected["absent"]], np.uint64))
    assert present.tolist() == [True] * len(signs) + [False] * len(expected["absent"])
    np.testing.assert_array_equal(rows[: len(signs)], np.array(list(expected["rows"].values()), np.float32))
    path, _ = find_version(f"{GOLDEN / 'model'}:{version}")
    scores = _core.Predictor(str(path), str(library_path())).predict("\n".join(expected["lines"]).encode())
    np.testing.assert_allclose(scores, expected["scores"], atol=1e-5)


def test_the_delta_changes_scores_and_rows() -> None:
    assert expected_of(1)["scores"] != expected_of(2)["scores"]
    assert (len(expected_of(1)["absent"]), len(expected_of(2)["absent"])) == (1, 2)
