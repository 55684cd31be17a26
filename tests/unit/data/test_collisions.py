"""`check` warns about slots of slot text that share signs by mistake."""

import gzip
import random
from pathlib import Path

import pytest
import yaml

from elasticrec import cli
from elasticrec.config import Job, load_job
from elasticrec.data.checks import some_batches
from elasticrec.data.collisions import CollisionCounter, Collisions, collision_warning

Capture = pytest.CaptureFixture[str]


def write(directory: Path, *, disjoint: bool, compress: bool = False, **data: object) -> Path:
    """Write slot text with three slots whose signs overlap, or are `disjoint`."""
    chance = random.Random(1)
    lines = []
    for _ in range(4000):
        signs = [chance.randrange(300) + (1000 * slot if disjoint or slot == 2 else 0) for slot in range(3)]
        lines.append(f"1 {chance.randint(0, 1)} " + " ".join(f"{sign}:{slot}" for slot, sign in enumerate(signs)))
    text = ("\n".join(lines) + "\n").encode()
    (directory / "train.txt").write_bytes(gzip.compress(text) if compress else text)
    job = directory / "job.yaml"
    job.write_text(
        yaml.safe_dump({"name": "a", "data": {"format": "slots", "train": "train.txt", "slots": "0-2"} | data})
    )
    return job


def find_collisions(job: Job) -> Collisions | None:
    counter = CollisionCounter(job)
    for batch in some_batches(job):
        counter.add(batch)
    return counter.collisions()


@pytest.mark.parametrize("compress", [False, True])
def test_shared_signs_are_reported_with_the_remedy(tmp_path: Path, capsys: Capture, compress: bool) -> None:
    job = write(tmp_path, disjoint=False, compress=compress)
    assert cli.main(["check", str(job)]) == 0
    (line, last) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {job}: data.slots: 50.0% of 600 inspected signs occur in several slots")
    assert "(`0`, `1`)" in line and "`data.separate_slots: true`" in line
    assert last == "ok: 1 training files, 0 evaluation files"
    found = find_collisions(load_job(job))
    assert found is not None and (found.num_signs, found.num_shared) == (600, 300)


@pytest.mark.parametrize(
    ("disjoint", "data"),
    [
        (True, {}),
        # With a modulo, signs collide on purpose.
        (True, {"modulo": 50}),
        (False, {"separate_slots": True}),
        (False, {"slots": ["0", {"name": "1", "share": "0"}, "2"]}),
        (False, {"slots": ["0", "2"]}),
    ],
)
def test_no_warning_without_collisions(tmp_path: Path, disjoint: bool, data: dict[str, object]) -> None:
    job = load_job(write(tmp_path, disjoint=disjoint, **data))
    assert collision_warning(job, find_collisions(job)) is None


def test_a_few_shared_signs_give_no_warning(tmp_path: Path) -> None:
    path = write(tmp_path, disjoint=True)
    with (tmp_path / "train.txt").open("a") as file:
        file.write("1 0 7:0 7:1 7:2\n" * 50)
    job = load_job(path)
    found = find_collisions(job)
    assert found is not None and found.num_shared == 1
    assert collision_warning(job, found) is None


def test_bad_lines_and_empty_files_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, disjoint=True)
    (tmp_path / "train.txt").write_text("what\n1 0 5:0\n")
    found = find_collisions(load_job(path))
    assert found is not None and found.num_signs == 1
    (tmp_path / "train.txt").write_text("")
    job = load_job(path)
    assert collision_warning(job, find_collisions(job)) is None
