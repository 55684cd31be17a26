"""Cubes and deltas of every released layout and row type: this release reads the same rows from them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec import _core

CUBES = sorted((Path(__file__).parent / "golden").glob("cubes-*/*"))
# Signs of the base and of the version after it, as described in `golden/make_cubes.py`.
SIGNS = {"base": [0, 1, 7, 2**63, 2**64 - 1], "delta": [1, 2, 5, 7, 2**63]}


def test_every_row_type_has_its_files() -> None:
    layouts = [f"{path.parent.name}/{path.name}" for path in CUBES]
    assert layouts == [f"cubes-{layout}/{row_type}" for layout in (0, 1) for row_type in ("f16", "f32", "int8")]
    assert all(file.stat().st_size < 5000 for path in CUBES for file in path.iterdir())


@pytest.mark.parametrize("golden", CUBES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_rows_are_read_as_they_were_written(golden: Path) -> None:
    expected: dict[str, Any] = json.loads((golden / "expected.json").read_bytes())
    base = _core.CubeView([str(golden / "base")])
    delta = _core.CubeView([str(golden / "base")], [[str(golden / "delta")]])
    views = {"base": base, "delta": delta}
    assert base.row_type == golden.name
    assert base.columns == [("wide", 1), ("deep", 3), ("side", 2)]
    for name, view in views.items():
        assert sorted(map(int, expected[name])) == SIGNS[name]
        assert view.num_rows == len(SIGNS[name])
        asked = [*SIGNS["base"], *SIGNS["delta"], 123456789]
        rows, present = view.lookup(np.array(asked, np.uint64))
        for sign, row, is_there in zip(asked, rows, present, strict=True):
            assert bool(is_there) == (sign in SIGNS[name]), sign
            np.testing.assert_array_equal(row, np.array(expected[name].get(str(sign), [0] * 6), np.float32))


@pytest.mark.parametrize("golden", CUBES, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_rows_are_close_to_the_original_values(golden: Path) -> None:
    rows, _ = _core.CubeView([str(golden / "base")]).lookup(np.array([7], np.uint64))
    original = np.array([np.sin(17 + i) * 10.0 ** (i - 2) for i in range(6)], np.float32)
    # The error of int8 depends on the largest value of a column: 10 and 1000.
    bounds = {"f32": [0] * 6, "f16": abs(original) / 2000, "int8": [0, *[10 / 254] * 3, *[1000 / 254] * 2]}
    assert (abs(rows[0] - original) <= np.array(bounds[golden.name])).all()
