"""Versions of a table through the binding: changes of a version, retries, and an unknown last publish."""

import json
from pathlib import Path

import numpy as np
import pytest

from elasticrec import _core
from elasticrec.errors import ConfigError
from support.online import Rows, rows_of, rows_of_table

PARTITIONS = 4
SPEC = {
    "name": "main",
    "seed": 7,
    "partitions": PARTITIONS,
    "columns": [{"name": "deep", "width": 2, "init_scale": 0.5, "late": False}],
    "admit_after": 0,
    "optimizer": {"kind": "sgd", "learning_rate": 0.125},
}
FEATURES = {
    "format": "slots",
    "hash": 1,
    "slots": [{"name": "0", "pooling": "sum"}],
    "dense": [],
    "labels": ["click"],
}


class Published:
    """A table and the view of its last committed version."""

    def __init__(self, directory: Path, table: _core.Table | None = None) -> None:
        self.table = table or _core.Table(json.dumps(SPEC))
        self.view: _core.CubeView | None = None
        self.committed: str | None = None
        self._paths: list[str] = []
        self._parser = _core.Parser(json.dumps(FEATURES))
        self._directory, self._number = directory, 0

    def push(self, *signs: int, value: float = 1.0, seen: int = 0) -> None:
        text = " ".join(["1 0", *(f"{sign}:0" for sign in signs)])
        batch = self._parser.parse(text.encode(), labels=True)
        pooled = np.zeros((1, 1, 2), np.float32)
        self.table.pull(batch, pooled)
        self.table.push(batch, np.full((1, 1, 2), value, np.float32), 1.0, seen)

    def publish(self, *, base: bool = False, commit: bool = True) -> tuple[int, int, int]:
        """Publish; return (changed, removed, whole partitions). A committed version is compared with the table."""
        self._number += 1
        name, path = str(self._number), self._directory / str(self._number)
        figures = self.table.publish(name, committed=self.committed, is_base=base, row_type="f32", path=str(path))
        assert figures["bytes"] == path.stat().st_size and figures["rows"] == len(self.table)
        if commit:
            self.committed = name
            self._paths = [str(path)] if base else [*self._paths, str(path)]
            self.view = _core.CubeView(self._paths[:1], [[delta] for delta in self._paths[1:]])
            assert self.online() == rows_of_table(self.table)
        return figures["changed"], figures["removed"], figures["whole"]

    @property
    def _view(self) -> _core.CubeView:
        assert self.view is not None
        return self.view

    def online(self) -> Rows:
        return rows_of(self._view)


@pytest.fixture
def published(tmp_path: Path) -> Published:
    """A base of a hundred rows."""
    found = Published(tmp_path)
    found.push(*range(100))
    assert found.publish(base=True) == (100, 0, PARTITIONS)
    return found


def test_changes_are_published_once(published: Published) -> None:
    published.push(3, 5, 200)
    assert published.publish() == (3, 0, 0)
    assert published.publish() == (0, 0, 0), "nothing changed since"
    published.push(5)
    assert published.publish() == (1, 0, 0)
    # a base has all rows and resets the changes
    published.push(7)
    assert published.publish(base=True)[0] == 101
    published.push(8)
    assert published.publish() == (1, 0, 0)


def test_changes_of_a_failed_publish_are_published_again(published: Published) -> None:
    published.push(3, 5)
    assert published.publish(commit=False) == (2, 0, 0)
    published.push(5, 7)
    assert published.publish(commit=False) == (3, 0, 0)
    # this base was not committed either
    assert published.publish(base=True, commit=False)[0] == 100
    assert published.publish() == (3, 0, 0)
    assert published.publish() == (0, 0, 0)


def test_changes_that_cannot_be_written_are_published_again(published: Published, tmp_path: Path) -> None:
    published.push(3, 5)
    path = tmp_path / "taken"
    path.mkdir()
    with pytest.raises(OSError, match="taken"):
        published.table.publish("x", committed="1", is_base=False, row_type="f32", path=str(path))
    with pytest.raises(ConfigError, match="row_type: expected `f32`, `f16` or `int8`, got `f64`"):
        published.table.publish("y", committed="1", is_base=False, row_type="f64", path=str(tmp_path / "y"))
    assert published.publish() == (2, 0, 0)


def test_removed_rows_are_published_and_decay_is_not(published: Published) -> None:
    published.push(*range(90), seen=5)
    assert published.publish() == (90, 0, 0)
    published.table.decay(0.5, 1)
    published.table.restart_time()
    assert published.publish() == (0, 0, 0), "decay and restart_time change no weight"
    published.push(*range(90), seen=5)
    published.publish()
    evicted = published.table.evict(nonclk_coeff=1.0, click_coeff=1.0, min_score=None, now=5, max_age=1)
    assert evicted == 10
    published.push(95)
    assert published.publish(commit=False) == (1, 9, 0)
    # row 96 is learned again before its removal was committed; row 95, learned again, is evicted
    published.push(96)
    published.table.evict(nonclk_coeff=1.0, click_coeff=1.0, min_score=None, now=5, max_age=1)
    published.push(96)
    assert published.publish() == (1, 9, 0)
    assert 96 in published.online() and 95 not in published.online()


def test_gradients_that_are_not_finite_change_nothing(published: Published) -> None:
    published.push(3, value=float("nan"))
    assert published.publish() == (0, 0, 0)


def test_a_loaded_table_publishes_all_rows(published: Published, tmp_path: Path) -> None:
    """The loaded table is older: the last version has rows and weights that the table does not have."""
    published.table.snapshot(str(tmp_path / "saved"))
    published.push(3, 5, 200)
    published.publish()
    # a new table, as in another process, and a table that published before it was loaded
    for has_published in (False, True):
        table = _core.Table(json.dumps(SPEC))
        if has_published:
            name = str(published.committed)
            table.publish(name, committed=None, is_base=True, row_type="f32", path=str(tmp_path / "empty"))
        table.load([str(tmp_path / "saved")])
        published.table = table
        assert published.publish() == (100, 0, PARTITIONS)
        assert 200 not in published.online()
        published.push(4)
        assert published.publish() == (1, 0, 0)


def test_an_unknown_committed_publish_publishes_all_rows(published: Published) -> None:
    published.push(3)
    published.committed = "of another process"
    assert published.publish() == (100, 0, PARTITIONS)
