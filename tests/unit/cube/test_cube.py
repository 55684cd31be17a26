"""Cubes and deltas through the binding: write, open together, look up and list."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from elasticrec import _core
from elasticrec.errors import ConfigError, ModelError

COLUMNS = [("wide", 1), ("deep", 2)]
# partition_of(sign, 256), from docs/formats/part.md
PARTITIONS = {0: 0, 2: 58, 2**64 - 1: 100, 2**63: 143, 1: 180}


def u64(*signs: int) -> npt.NDArray[np.uint64]:
    return np.array(signs, np.uint64)


def rows_of(count: int, value: float) -> npt.NDArray[np.float32]:
    return np.full((count, 3), value, np.float32)


def write_base(path: Path, row_type: str = "f32") -> str:
    writer = _core.CubeWriter(str(path), COLUMNS, row_type=row_type, num_partitions=256)
    for partition in range(256):
        signs = [sign for sign, owner in PARTITIONS.items() if owner == partition]
        writer.add(partition, u64(*signs), rows_of(len(signs), 1.0))
    assert writer.finish()[0] == path.stat().st_size
    return str(path)


def write_delta(path: Path, changed: dict[int, float], removed: list[int], row_type: str = "f32") -> str:
    writer = _core.DeltaWriter(str(path), COLUMNS, row_type=row_type, num_partitions=256)
    for partition in sorted({PARTITIONS[sign] for sign in [*changed, *removed]}):
        signs = [sign for sign in changed if PARTITIONS[sign] == partition]
        rows = np.concatenate([rows_of(1, changed[sign]) for sign in signs] or [rows_of(0, 0)])
        writer.add(partition, u64(*signs), rows, u64(*[sign for sign in removed if PARTITIONS[sign] == partition]))
    writer.finish()
    return str(path)


@pytest.mark.parametrize("row_type", ["f32", "f16", "int8"])
def test_a_view_combines_a_base_and_its_deltas(tmp_path: Path, row_type: str) -> None:
    base = write_base(tmp_path / "base", row_type)
    first = write_delta(tmp_path / "first", {2: 3.0, 1: 4.0}, [0], row_type)
    second = write_delta(tmp_path / "second", {1: 5.0, 0: 6.0}, [2], row_type)
    view = _core.CubeView([base], [[first], [second]])
    assert (view.num_rows, view.columns, view.width, view.num_partitions) == (4, COLUMNS, 3, 256)
    assert view.row_type == row_type
    rows, present = view.lookup(u64(0, 1, 2, 3, 2**63, 2**64 - 1))
    np.testing.assert_allclose(rows[:, 2], [6, 5, 0, 0, 1, 1], rtol=1e-6)
    assert present.tolist() == [True, True, False, False, True, True]

    listed = {int(sign): float(row[0]) for signs, rows in view.items() for sign, row in zip(signs, rows, strict=True)}
    assert listed == {0: 6.0, 1: 5.0, 2**63: 1.0, 2**64 - 1: 1.0}
    before = _core.CubeView([base], [[first]])
    assert before.lookup(u64(0, 1))[1].tolist() == [False, True]
    assert view.lookup(u64(0, 1))[1].tolist() == [True, True]


def test_a_shard_opens_only_its_partitions(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    delta = write_delta(tmp_path / "delta", {2: 3.0, 1: 4.0}, [2**63])
    view = _core.CubeView([base], [[delta]], partitions=(0, 128))
    assert view.num_rows == 3
    assert view.lookup(u64(0, 2, 2**64 - 1, 2**63, 1))[1].tolist() == [True, True, True, False, False]


def test_damaged_parts_are_named(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    with pytest.raises(ConfigError, match="row_type: expected `f32`, `f16` or `int8`, got `int4`"):
        _core.CubeWriter(str(tmp_path / "x"), COLUMNS, row_type="int4", num_partitions=1)
    with pytest.raises(FileNotFoundError):
        _core.CubeView([str(tmp_path / "none")])
    with pytest.raises(ModelError, match=r"base: expected kind 4 \(cube delta\), got 2"):
        _core.CubeView([base], [[base]])
    other = write_delta(tmp_path / "other", {1: 1.0}, [], "f16")
    with pytest.raises(ModelError, match="expected the columns and row type of the version that it changes"):
        _core.CubeView([base], [[other]])
    writer = _core.DeltaWriter(str(tmp_path / "delta"), COLUMNS, row_type="f32", num_partitions=256)
    with pytest.raises(ValueError, match=r"rows: expected shape \[1, 3\], got \[1, 2\]"):
        writer.add(180, u64(1), np.zeros((1, 2), np.float32), u64())
    with pytest.raises(ModelError, match="partition 180: sign 1 is both changed and removed"):
        writer.add(180, u64(1), rows_of(1, 0), u64(1))
    writer.finish()
    with pytest.raises(ValueError, match="the file is already complete"):
        writer.finish()


def test_the_benchmark_measures(tmp_path: Path) -> None:
    bench = _core.CubeBench(str(tmp_path), 20_000)
    assert bench.row_bytes == 40
    assert bench.file_bytes / 20_000 - 40 < 13
    assert bench.change(500)[3] < 500 * 50 + 1024
    lookup, probe = bench.measure(3)
    assert min(lookup, probe, bench.build_s, bench.open_s) > 0
