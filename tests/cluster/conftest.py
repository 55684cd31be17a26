"""Demo data that the tests of this directory share, and trainings on it."""

import json
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from elasticrec.data.demo import write_demo
from support.cluster import HOURS, NUM_SAMPLES, Trainings, Undisturbed
from support.shared import make_once


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hours of demo data, the last one for evaluation; generated once for all workers."""

    def make(directory: Path) -> None:
        write_demo(directory, samples=NUM_SAMPLES * HOURS // (HOURS - 1), slots=20, hours=HOURS, seed=1)

    return make_once(tmp_path_factory, "data", make)


@pytest.fixture
def trainings(tmp_path: Path, data: Path) -> Iterator[Trainings]:
    """Trainings in the directory of this test; they are stopped when it ends."""
    with_data = Trainings(tmp_path, data)
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
