"""Demo data that the tests of this directory share, and trainings on it."""

import json
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from elasticrec.data.demo import write_demo
from support.cluster import HOURS, SAMPLES_PER_HOUR, Trainings, Undisturbed
from support.shared import make_once

DIRECTORY = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this directory an hour each, because a busy machine may need it."""
    for item in items:
        if DIRECTORY in item.path.parents:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hours of demo data, the last one for evaluation; generated once for all workers."""

    def make(directory: Path) -> None:
        write_demo(directory, samples=SAMPLES_PER_HOUR * HOURS, slots=20, hours=HOURS, seed=1)

    return make_once(tmp_path_factory, "data", make)


@pytest.fixture
def trainings(tmp_path: Path, data: Path) -> Iterator[Trainings]:
    """Trainings in the directory of this test; they are stopped when it ends."""
    with_data = Trainings(tmp_path, data)
    yield with_data
    with_data.stop()


@pytest.fixture
def short_trainings(tmp_path: Path, data: Path) -> Iterator[Trainings]:
    """Trainings on one hour, for tests that need a single fault or none."""
    with_data = Trainings(tmp_path, data, num_hours=1)
    yield with_data
    with_data.stop()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[[str], Undisturbed]:
    """Train a strategy without any fault, once for all workers, and return what it learned and how long it took."""

    def train(strategy: str, directory: Path) -> None:
        trainings = Trainings(directory, data)
        training = trainings.start(f"train.strategy={strategy}")
        try:
            training.wait_for("servers 2/2")
            started = time.monotonic()
            training.finish()
        finally:
            trainings.stop()
        seconds = time.monotonic() - started
        result = {"auc": trainings.check(), "seconds": seconds}
        (directory / "undisturbed.json").write_text(json.dumps(result))

    @cache
    def of(strategy: str) -> Undisturbed:
        directory = make_once(tmp_path_factory, strategy, lambda directory: train(strategy, directory))
        return Undisturbed(Trainings(directory, data), **json.loads((directory / "undisturbed.json").read_text()))

    return of
