"""Small jobs and their data, for tests that train."""

from pathlib import Path
from typing import Any

import pytest

from elasticrec.config import Job
from elasticrec.config.load import parse_job
from support.small import MakeJob, WriteSamples, sample_lines


@pytest.fixture
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in the test's directory; modules request it with `pytestmark`."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def make_job(tmp_path: Path) -> MakeJob:
    """Return a function that makes a job over `train.txt` in the test's directory; keywords change its sections."""

    def make(**sections: Any) -> Job:
        raw: dict[str, Any] = {
            "name": "small",
            "data": {"format": "slots", "train": "train.txt", "slots": "0-2"},
            "model": {"kind": "wide_deep", "dim": 4, "hidden": [8, 8]},
            "sparse": {"partitions": 4},
            "train": {"threads": 1, "batch_size": 64},
        }
        for name, value in sections.items():
            raw[name] = {**raw.get(name, {}), **value} if isinstance(value, dict) else value
        return parse_job(raw, base=tmp_path, source="job.yaml")

    return make


@pytest.fixture
def write_samples(tmp_path: Path) -> WriteSamples:
    """Return a function that writes slot text to a file in the test's directory."""

    def write(name: str = "train.txt", count: int = 1000, seed: int = 1) -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in sample_lines(count, seed)))
        return path

    return write
