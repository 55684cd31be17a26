"""The rows of a version, bit for bit, to compare with those of its checkpoint."""

import tempfile
from pathlib import Path

from elasticrec import _core
from elasticrec.repository.repository import Repository
from elasticrec.run import Run
from elasticrec.training.checkpoint import Checkpoint, latest
from elasticrec.training.predict import load

Rows = dict[int, bytes]


def rows_of(view: _core.CubeView) -> Rows:
    """Return each sign with the bytes of its weights."""
    return {int(sign): row.tobytes() for signs, rows in view.items() for sign, row in zip(signs, rows, strict=True)}


def rows_of_version(repository: Repository, number: int) -> Rows:
    """Return the rows of a base, or of a base and all deltas up to this version."""
    chain = repository.chain(number)
    paths = [[str(repository.storage.path_of(f"{one.name}/{part}")) for part in one.parts] for one in chain]
    view = _core.CubeView(paths[0], paths[1:])
    assert view.num_rows == chain[-1].rows
    return rows_of(view)


def rows_of_table(table: _core.Table, row_type: str = "f32") -> Rows:
    """Return the rows of a table, written by `write_cube`, which does not track changes."""
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "cube")
        table.write_cube(path, row_type=row_type)
        return rows_of(_core.CubeView([path]))


def check_version(repository: Repository, number: int, run: Run, checkpoint: Checkpoint | None = None) -> Rows:
    """Check that a version has the rows and dense weights of a checkpoint, or of the newest one; return the rows."""
    checkpoint = checkpoint or latest(run)
    assert checkpoint is not None
    state, version = load(run.job(), checkpoint).state, repository.version(number)
    rows = rows_of_version(repository, number)
    assert rows == rows_of_table(state.embedding.table, version.manifest["table"]["row_type"])
    assert repository.storage.read(f"{version.name}/dense.bin") == state.dense.values.numpy().tobytes()
    return rows
