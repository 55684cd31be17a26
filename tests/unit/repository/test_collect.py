"""Old versions are collected by policy; versions in use are kept."""

import time
import uuid
from pathlib import Path

import pytest

from elasticrec.errors import ModelError
from elasticrec.repository.collect import collect, plan_collection
from elasticrec.repository.repository import Repository
from elasticrec.repository.verify import verify
from support.versions import write_version

# 1 ← 2 ← 3, 4 ← 5, 6, 7 ← 8
PARENTS = (None, 1, 2, None, 4, None, None, 7)


@pytest.fixture(params=["disk", "memory"])
def repository(request: pytest.FixtureRequest, tmp_path: Path) -> Repository:
    location = str(tmp_path / "models") if request.param == "disk" else f"memory://{uuid.uuid4().hex}"
    repository = Repository.open(location, "demo")
    for parent in PARENTS:
        write_version(repository, parent)
    return repository


def test_the_newest_bases_are_kept_with_their_deltas(repository: Repository) -> None:
    repository.offer(8)
    plan = plan_collection(repository, 2)
    assert plan.removed == [5, 4, 3, 2, 1]
    assert repository.versions() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert collect(repository, 2) == plan
    assert repository.versions() == [6, 7, 8]
    assert {name.split("/")[0] for name in repository.storage.find()} <= {"6", "7", "CURRENT", "NEXT", ".state.lock"}
    assert verify(repository, 8) == []
    assert collect(repository, 1).removed == [6]
    assert collect(repository, 1).removed == []
    assert write_version(repository, 8).number == 9


def test_current_and_pinned_versions_are_kept_with_their_chains(repository: Repository) -> None:
    repository.rollback(2)
    repository.pin(5)
    done = collect(repository, 1)
    assert repository.versions() == [1, 2, 4, 5, 7, 8]
    assert done.removed == [6, 3]
    assert done.kept == {
        1: "version 2 needs it",
        2: "current",
        4: "version 5 needs it",
        5: "pinned",
        7: "one of the 1 newest bases",
        8: "delta of base 7",
    }
    for number in repository.versions():
        assert verify(repository, number) == []
    repository.unpin(5)
    repository.resume()
    repository.offer(8)
    assert collect(repository, 1).removed == [5, 4, 2, 1]


def test_the_target_of_a_rollback_is_kept_with_its_chain(repository: Repository) -> None:
    repository.offer(8)
    repository.rollback(3, is_loaded=False)
    done = collect(repository, 1)
    assert done.removed == [6, 5, 4]
    assert done.kept[3] == "wanted by a rollback" and done.kept[2] == "version 3 needs it"
    assert repository.complete_rollback(3)
    assert verify(repository, 3) == []


def test_the_removed_bytes_are_reported(repository: Repository) -> None:
    repository.offer(8)
    before = sum(stat.num_bytes for stat in repository.storage.find().values())
    done = collect(repository, 1)
    after = sum(stat.num_bytes for stat in repository.storage.find().values())
    assert done.num_bytes == before - after > 0


def test_incomplete_versions_are_removed_after_an_hour(repository: Repository) -> None:
    repository.storage.write("9/cube/part-00000", b"an incomplete base")
    repository.storage.write("7/deltas/10/dense.bin", b"an incomplete delta")
    now = time.time()
    assert collect(repository, 4, now + 3500).abandoned == []
    assert collect(repository, 4, now + 3700).abandoned == ["7/deltas/10", "9"]
    assert repository.versions() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert not repository.storage.find("9")
    assert not repository.storage.find("7/deltas/10")


def test_an_empty_directory_is_removed(tmp_path: Path) -> None:
    repository = Repository.open(tmp_path, "demo")
    write_version(repository)
    for name in ("demo/2/cube", "demo/1/deltas/3/cube", "demo/notes"):
        (tmp_path / name).mkdir(parents=True)
    collect(repository, 4)
    assert (tmp_path / "demo/2").is_dir()
    collect(repository, 4, time.time() + 3700)
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == [".state.lock", "1", "NEXT", "notes"]
    assert not (tmp_path / "demo/1/deltas/3").exists()


def test_a_damaged_base_with_complete_deltas_is_kept(repository: Repository) -> None:
    repository.storage.delete("4/manifest.json")
    assert plan_collection(repository, 4, time.time() + 9999).abandoned == []


def test_nothing_is_removed_while_the_current_chain_is_broken(repository: Repository) -> None:
    repository.offer(3)
    repository.storage.delete("1/deltas/2/manifest.json")
    with pytest.raises(ModelError, match=r"1/deltas/3: its parent, version 2, is missing"):
        collect(repository, 1)
    assert repository.versions() == [1, 3, 4, 5, 6, 7, 8]
