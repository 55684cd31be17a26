"""Demo data that the tests of this directory share, and trainings on it."""

import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from elasticrec.data.demo import write_demo
from support.cluster import Trainings, Undisturbed

SAMPLES = 800_000


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data")
    write_demo(directory, samples=SAMPLES, slots=20, hours=4, seed=1)
    return directory


@pytest.fixture
def trainings(tmp_path: Path, data: Path) -> Iterator[Trainings]:
    with_data = Trainings(tmp_path, data)
    yield with_data
    with_data.stop()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, data: Path) -> Callable[[str], Undisturbed]:
    """What a strategy comes to, and how long it takes, when nothing happens; trained once."""

    @cache
    def of(strategy: str) -> Undisturbed:
        trainings = Trainings(tmp_path_factory.mktemp(strategy), data)
        training = trainings.start(f"train.strategy={strategy}")
        try:
            training.wait_for("servers 2/2")
            started = time.monotonic()
            training.finish()
        finally:
            trainings.stop()
        seconds = time.monotonic() - started
        return Undisturbed(trainings.check(), seconds, trainings.parameters())

    return of
