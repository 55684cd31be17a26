"""The versions of a model: numbers, chains, CURRENT, rollback, pins, and the state after a crash or on a full disk."""

import json
import multiprocessing
import os
import signal
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrec.errors import ConfigError, ModelError, UnavailableError
from elasticrec.manifest import MANIFEST, FileEntry, encode_manifest, write_manifest
from elasticrec.repository.collect import collect
from elasticrec.repository.find import find_version, open_model
from elasticrec.repository.remote import RemoteStorage
from elasticrec.repository.repository import CURRENT, Current, Repository
from elasticrec.repository.verify import verify
from elasticrec.repository.version import GRAPH_FILE, MissingVersionError
from support.disks import fill, small_file_system
from support.versions import content, read_current, write_version

# nested deeper than a JSON parser allows
DEEP = b"[" * 100_000


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTICREC_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["disk", "memory"])
def repository(request: pytest.FixtureRequest) -> Repository:
    return Repository.open("models" if request.param == "disk" else f"memory://{uuid.uuid4().hex}", "demo")


def local() -> Repository:
    return Repository.open("models", "demo")


def refusal(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        find_version(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def numbers(repository: Repository, version: int) -> list[int]:
    return [one.number for one in repository.chain(version)]


def test_versions_count_up_and_the_offered_one_is_current(repository: Repository) -> None:
    assert (repository.name, repository.versions(), repository.current()) == ("demo", [], None)
    for number in range(1, 12):
        assert write_version(repository).number == number
        assert repository.offer(number)
        assert repository.state() == Current(number, number)
    assert repository.versions() == list(range(1, 12))
    # an older version does not replace a newer one
    for number in (3, 11):
        assert not repository.offer(number)
    assert repository.state() == Current(11, 11)


def test_the_oldest_sufficient_format_is_written() -> None:
    repository = local()
    assert write_version(repository).manifest["format"] == 1
    repository.offer(1)
    assert read_current(Path("models/demo")) == {"version": 1, "generation": 1}
    assert "parent" not in json.loads(Path("models/demo/1/manifest.json").read_bytes())
    delta = write_version(repository, 1, changed=7, removed=2)
    assert (delta.manifest["format"], delta.manifest["base"], delta.manifest["parent"]) == (2, 1, 1)
    assert (delta.manifest["table"]["changed"], delta.manifest["table"]["removed"]) == (7, 2)
    assert GRAPH_FILE not in delta.manifest["files"]
    half = write_version(repository, row_type="f16")
    assert (half.manifest["format"], half.manifest["base"], half.manifest["parent"]) == (2, None, None)
    assert "changed" not in half.manifest["table"]
    chosen = write_version(repository, labels=("click",))
    assert (chosen.manifest["format"], chosen.manifest["graph"]["labels"]) == (2, ["click"])


def test_deltas_are_stored_in_their_base_and_share_its_numbering(repository: Repository) -> None:
    assert [write_version(repository, parent).number for parent in (None, 1, 2, None, 4)] == [1, 2, 3, 4, 5]
    assert repository.directories() == {1: "1", 2: "1/deltas/2", 3: "1/deltas/3", 4: "4", 5: "4/deltas/5"}
    assert numbers(repository, 3) == [1, 2, 3]
    assert numbers(repository, 5) == [4, 5]
    assert numbers(repository, 1) == [1]
    assert [version.base for version in repository.chain(3)] == [1, 1, 1]
    repository.offer(3)
    assert repository.current() == 3


def test_a_delta_without_its_base_or_parent_is_rejected_by_name(repository: Repository) -> None:
    for parent in (None, 1, 2):
        write_version(repository, parent)
    path = f"{repository.location}/1/deltas/3"
    with pytest.raises(MissingVersionError, match="no version 9; available: 1, 2, 3"):
        repository.begin_delta(9)
    repository.remove("1/deltas/2")
    with pytest.raises(MissingVersionError) as caught:
        repository.chain(3)
    assert str(caught.value) == f"{path}: its parent, version 2, is missing"
    repository.storage.delete(f"1/{MANIFEST}")
    for use in (repository.chain, repository.offer, repository.rollback, repository.pin, repository.begin_delta):
        with pytest.raises(MissingVersionError) as caught:
            use(3)
        assert str(caught.value) == f"{path}: its base, version 1, is missing"
    assert (repository.current(), repository.pins()) == (None, [])


def test_a_parent_removed_before_the_commit_rejects_it(repository: Repository) -> None:
    write_version(repository)
    write_version(repository, 1)
    with pytest.raises(MissingVersionError, match="no version 2"), repository.begin_delta(2) as draft:
        repository.remove("1/deltas/2")
        repository.commit(draft, content(), {})
    assert repository.versions() == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 3}, "version: expected 2, got 3"),
        ({"base": 2}, "base: expected an earlier version or null, got 2"),
        ({"base": None}, "expected `base` and `parent` or neither, got None and 1"),
        ({"parent": "1"}, "parent: expected an earlier version or null, got 1"),
        ({"format": 3}, "format: expected 1 or 2, got 3"),
        ({"table": None}, "table: expected an object, got NoneType"),
        ({"table": {}}, "a key is missing or has the wrong type: 'rows'"),
        ({"table": {"rows": "7"}}, "table.rows: expected a count, got 7"),
    ],
)
def test_an_invalid_manifest_is_named(changes: dict[str, Any], words: str) -> None:
    repository = local()
    write_version(repository)
    version = write_version(repository, 1)
    body = {key: value for key, value in (version.manifest | changes).items() if key not in ("kind", "self_sha256")}
    format = body.pop("format")
    body.pop("files")
    repository.storage.write("1/deltas/2/manifest.json", encode_manifest("model", body, {}, format=format))
    with pytest.raises(ModelError) as caught:
        repository.chain(2)
    assert str(caught.value) == f"models/demo/1/deltas/2/manifest.json: {words}"


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../b", "a//b", "./a", "", "a\\b", "manifest.json", "a\0"])
def test_names_of_files_stay_within_the_directory(name: str) -> None:
    repository = local()
    version = write_version(repository)
    keys = ("kind", "self_sha256", "files", "format")
    body = {key: value for key, value in version.manifest.items() if key not in keys}
    repository.storage.write(
        "1/manifest.json", encode_manifest("model", body, {**version.files, name: FileEntry(1, "0" * 64)})
    )
    with pytest.raises(ModelError, match="files: expected a path within the directory, got"):
        repository.version(1)


def test_an_incomplete_version_is_not_listed(repository: Repository) -> None:
    write_version(repository)
    draft = repository.begin()
    (draft.directory / "cube" / "part-00000").write_bytes(b"half")
    assert repository.versions() == [1]
    with pytest.raises(MissingVersionError):
        repository.offer(draft.number)
    assert repository.current() is None
    with repository.begin() as other:
        pass
    repository.abandon(draft)
    assert [name for name in repository.storage.find() if not name.startswith((".", "NEXT"))] == [
        f"1/{name}" for name in ("cube/part-00000", "dense.bin", "graph.onnx", MANIFEST)
    ]
    assert not other.is_open


def test_a_late_file_of_a_failed_draft_is_in_no_other_version() -> None:
    repository = local()
    write_version(repository)
    draft = repository.begin_delta(1)
    assert draft.directory == Path("models/demo/1/deltas/2")
    # the process of the draft is dead, so the draft is not abandoned
    again = repository.begin_delta(1)
    assert again.number == 3
    (draft.directory / "cube/part-00000").write_bytes(b"late")
    assert list((again.directory / "cube").iterdir()) == []
    assert repository.begin().number == 4


def test_version_numbers_are_never_reused(repository: Repository) -> None:
    write_version(repository)
    with repository.begin() as abandoned:
        assert abandoned.number == 2
    # nor a number without files, nor by another process
    assert Repository(repository.storage).begin_delta(1).number == 3
    repository.abandon(abandoned)
    again = Repository(repository.storage).begin_delta(1)
    assert again.number == 4
    # a late write goes into no other version
    repository.storage.write(f"{abandoned.name}/cube/part-00000", b"late")
    assert not repository.storage.find(again.name)
    repository.abandon(again)
    repository.remove("1")
    assert write_version(repository).number == 5
    repository.storage.write("NEXT", b'{"version": 1e999}')
    with pytest.raises(ModelError, match=r'NEXT: expected {"version": N}, the file is damaged; remove it'):
        repository.begin()


def test_an_interrupt_after_the_manifest_leaves_the_version(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version(repository)
    write = repository.storage.__class__.write

    def interrupt(self: Any, name: str, found: bytes) -> None:
        write(self, name, found)
        if name.endswith(MANIFEST):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(repository.storage.__class__, "write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_version(repository, 1)
    assert repository.versions() == [1, 2]
    assert verify(repository, 2) == []
    assert write_version(repository, 2).number == 3


def test_a_commit_with_missing_or_changed_files_is_rejected(repository: Repository) -> None:
    for size, words in ((3, "expected 3 bytes, got 4"), (None, "named in the manifest but missing")):
        with pytest.raises(ModelError, match=words), repository.begin() as draft:
            (draft.directory / GRAPH_FILE).write_bytes(b"")
            if size is not None:
                (draft.directory / "dense.bin").write_bytes(b"1234")
            files = {"dense.bin": FileEntry(size or 4, ""), GRAPH_FILE: FileEntry(0, "")}
            repository.commit(draft, content(), files)
    assert list(repository.storage.find()) == ["NEXT"]
    with pytest.raises(ModelError, match=r"expected `graph\.onnx` among its files"), repository.begin() as draft:
        repository.commit(draft, content(), {})


def test_other_files_are_ignored() -> None:
    repository = local()
    write_version(repository)
    for name in ("notes", "1.bak", "01", "1/deltas/x"):
        Path("models/demo", name).mkdir(parents=True)
        Path("models/demo", name, MANIFEST).touch()
    assert repository.versions() == [1]
    assert write_version(repository).number == 2


def test_a_rollback_holds_until_it_is_resumed(repository: Repository) -> None:
    for parent in (None, 1, 2):
        repository.offer(write_version(repository, parent).number)
    assert repository.rollback(2) == Current(2, 4, is_held=True)
    assert repository.state() == Current(2, 4, is_held=True)
    # newer deltas are not offered during the hold
    for parent in (3, 4, 5):
        assert not repository.offer(write_version(repository, parent).number)
    assert repository.state() == Current(2, 4, is_held=True)
    # the next rollback is a new generation
    assert repository.rollback(1) == Current(1, 5, is_held=True)
    assert repository.resume() == Current(1, 6)
    assert repository.resume() == Current(1, 6)
    assert repository.offer(6)
    assert repository.state() == Current(6, 7)


def test_a_rollback_needs_an_existing_version(repository: Repository) -> None:
    for parent in (None, None, 2):
        write_version(repository, parent)
    repository.offer(3)
    with pytest.raises(MissingVersionError, match="no version 9; available: 1, 2, 3"):
        repository.rollback(9)
    repository.storage.delete("1/dense.bin")
    with pytest.raises(ModelError, match=r"1/dense\.bin: named in the manifest but missing"):
        repository.rollback(1)
    repository.storage.write("2/dense.bin", b"short")
    with pytest.raises(ModelError, match=r"2/dense\.bin: expected 8 bytes, got 5"):
        repository.rollback(3)
    assert repository.state() == Current(3, 1)


def test_resuming_before_the_first_offer(repository: Repository) -> None:
    with pytest.raises(ModelError, match="no version was offered yet"):
        repository.resume()


def test_pins(repository: Repository) -> None:
    for parent in (None, 1):
        write_version(repository, parent)
    assert repository.pins() == []
    repository.pin(2)
    repository.pin(1)
    repository.pin(2)
    assert repository.pins() == [1, 2]
    repository.unpin(1)
    assert json.loads(repository.storage.read("PINS")) == {"versions": [2]}
    with pytest.raises(ConfigError, match="version 1 is not pinned; pinned: 2"):
        repository.unpin(1)
    with pytest.raises(MissingVersionError):
        repository.pin(7)
    for damage in (b"[]", b'{"versions": [1e999]}', DEEP):
        repository.storage.write("PINS", damage)
        with pytest.raises(ModelError, match="the file is damaged"):
            repository.pins()
    repository.storage.write("1/manifest.json", DEEP)
    with pytest.raises(ModelError, match="not JSON, the file is damaged"):
        repository.version(1)


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"3",
        b"[]",
        b'{"version": "x", "generation": 1}',
        b'{"version": 1}',
        b"\xff",
        b'{"version": 1e999, "generation": 1}',
        b'{"version": 1, "generation": 1, "wanted": -1e999}',
        b'{"version": -1, "generation": 1}',
        DEEP,
    ],
)
def test_a_damaged_current_is_refused_and_not_replaced(damage: bytes) -> None:
    repository = local()
    write_version(repository)
    current = Path("models/demo", CURRENT)
    current.write_bytes(damage)
    message = (
        'models/demo/CURRENT: expected {"version": N, "generation": N}, the file is damaged; remove it and publish'
    )
    assert refusal(Path("models/demo")) == message
    for act in (lambda: repository.offer(1), lambda: repository.rollback(1), repository.begin):
        with pytest.raises(ModelError) as caught:
            act()
        assert str(caught.value) == message
    assert current.read_bytes() == damage


def test_one_process_publishes_at_a_time(repository: Repository) -> None:
    with repository.locked():
        other = Repository(repository.storage)
        with pytest.raises(ConfigError, match=r"another process is publishing it: process \d+ on "), other.locked():
            pass
        # offers, rollbacks and pins do not need the publish lock
        repository.offer(write_version(repository).number)
        other.rollback(1)
        other.pin(1)


STOLEN = b'{"owner": "another", "id": "y", "until": 9e9}'


@pytest.fixture
def in_memory() -> Repository:
    return Repository.open(f"memory://{uuid.uuid4().hex}", "demo")


def test_without_its_lock_a_publisher_neither_commits_nor_offers(in_memory: Repository) -> None:
    repository = in_memory
    with repository.locked():
        first = write_version(repository)
        repository.storage.write(".lock", STOLEN)
        with pytest.raises(UnavailableError, match="the lock was lost to another"):
            repository.offer(first.number)
        with pytest.raises(UnavailableError, match="the lock was lost to another"):
            write_version(repository)
    assert (repository.versions(), repository.current()) == ([1], None)


@pytest.mark.parametrize("change", ["offer", "rollback", "resume", "complete"])
def test_without_the_state_lock_current_is_not_changed(
    in_memory: Repository, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    repository = in_memory
    for _ in range(3):
        write_version(repository)
    repository.offer(2)
    if change in ("resume", "complete"):
        repository.rollback(1, is_loaded=False)
    before = repository.state()
    asked = Repository.state

    def lose(self: Repository) -> Current | None:
        self.storage.write(".state.lock", STOLEN)
        return asked(self)

    acts = {
        "offer": lambda: repository.offer(3),
        "rollback": lambda: repository.rollback(1),
        "resume": repository.resume,
        "complete": lambda: repository.complete_rollback(1),
    }
    with monkeypatch.context() as patch:
        patch.setattr(Repository, "state", lose)
        with pytest.raises(UnavailableError, match="the lock was lost to another"):
            acts[change]()
    assert repository.state() == before


def test_a_chain_across_bases_is_refused(repository: Repository) -> None:
    for parent in (None, 1, None, 3):
        write_version(repository, parent)
    version = repository.version(4)
    keys = ("kind", "self_sha256", "files", "format")
    body = {key: value for key, value in version.manifest.items() if key not in keys}
    for parent, base in ((2, 1), (3, 3)):
        body |= {"parent": parent, "base": 1, "version": 5}
        repository.storage.write("1/deltas/5/manifest.json", encode_manifest("model", body, version.files, format=2))
        if base == 1:
            assert numbers(repository, 5) == [1, 2, 5]
        else:
            with pytest.raises(ModelError) as caught:
                repository.chain(5)
            path = f"{repository.location}/1/deltas/5"
            assert str(caught.value) == f"{path}: its parent, version 3, belongs to base 3, not 1"


def test_a_version_is_found_by_its_directory_or_by_its_model() -> None:
    repository = local()
    for parent in (None, None, 2):
        write_version(repository, parent)
    repository.offer(1)
    for text, wanted in (
        ("models/demo", "models/demo/1"),
        ("models/demo/2", "models/demo/2"),
        ("models/demo:2", "models/demo/2"),
        ("models/demo:3", "models/demo/2/deltas/3"),
        ("models/demo/2/deltas/3", "models/demo/2/deltas/3"),
        ("demo", "models/demo/1"),
        ("demo:2", "models/demo/2"),
    ):
        path, manifest = find_version(text)
        assert (str(path), manifest["version"]) == (wanted, int(path.name)), text
    # a directory of the same name, such as the data of a job, is not the model
    Path("demo").mkdir()
    assert find_version("demo:2")[1]["version"] == 2
    os.chdir("models/demo/2")
    assert find_version(".")[1]["version"] == 2
    assert open_model("deltas/3").repository.chain(3)[0].number == 2


def test_a_copy_of_a_version_under_another_name_is_a_version() -> None:
    write_version(local())
    Path("models/demo/1").rename("copy")
    assert find_version("copy")[1]["version"] == 1
    with pytest.raises(ModelError, match="copy: not inside a model"):
        open_model("copy")


def test_a_location_without_a_model_is_explained() -> None:
    models = Path("models")
    assert refusal(models / "demo") == (
        "models/demo: no such model, expected <repository>/<model> or <repository>/<model>/<version>"
    )
    models.mkdir()
    assert refusal(models) == "models: not a model, expected `CURRENT` or `manifest.json` in it"
    for name in ("b", "a"):
        repository = Repository.open(models, name)
        write_version(repository)
        repository.offer(1)
    assert refusal(models) == "models: not a model, expected `CURRENT` or `manifest.json` in it; models in it: a, b"
    write_manifest(models / "a" / "1", "checkpoint", {}, {})
    assert refusal(models / "a") == "models/a/1/manifest.json: kind: expected model, got checkpoint"


def test_a_current_that_names_a_missing_version() -> None:
    repository = local()
    write_version(repository)
    repository.offer(1)
    Path("models/demo", CURRENT).write_bytes(b'{"version": 9, "generation": 1}')
    assert refusal(Path("models/demo")) == "models/demo: no version 9; available: 1"
    # the number is not used again
    assert write_version(repository).number == 10


def test_verify_names_every_damage(repository: Repository) -> None:
    for parent in (None, 1, 2):
        write_version(repository, parent)
    assert verify(repository, 3) == []
    part = bytearray(repository.storage.read("1/deltas/2/cube/part-00000"))
    part[7] ^= 1
    repository.storage.write("1/deltas/2/cube/part-00000", bytes(part))
    repository.storage.write("1/graph.onnx", b"the graph of all and more")
    repository.storage.delete("1/deltas/3/dense.bin")
    location = repository.location
    assert verify(repository, 3) == [
        f"{location}/1/graph.onnx: expected 16 bytes, got more",
        f"{location}/1/deltas/2/cube/part-00000: sha-256 differs from the manifest, the file is damaged",
        f"{location}/1/deltas/3/dense.bin: named in the manifest but missing",
    ]
    repository.storage.write("1/graph.onnx", b"short")
    assert verify(repository, 1) == [f"{location}/1/graph.onnx: expected 16 bytes, got 5"]
    repository.remove("1/deltas/2")
    assert verify(repository, 3) == [f"{location}/1/deltas/3: its parent, version 2, is missing"]


def test_verify_reports_values_that_are_not_finite(repository: Repository) -> None:
    write_version(repository, dense=np.array([1.0, np.nan], np.float32).tobytes())
    assert verify(repository, 1) == [f"{repository.location}/1/dense.bin: `w` has values that are not finite"]


def test_the_storage_calls_of_a_publish_do_not_grow_with_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("read", "write", "create", "put", "exists", "find", "delete"):
        asked = getattr(RemoteStorage, name)

        def counted(self: RemoteStorage, *arguments: Any, name: str = name, asked: Any = asked) -> Any:
            calls.append(name)
            return asked(self, *arguments)

        monkeypatch.setattr(RemoteStorage, name, counted)
    repository = Repository.open(f"memory://{uuid.uuid4().hex}", "demo")
    counts, parent = [], None
    for _ in range(20):
        calls.clear()
        parent = write_version(repository, parent).number
        repository.offer(parent)
        collect(repository, 3)
        counts.append(len(calls))
    assert counts[2] == counts[-1] <= 28


def test_manifests_of_removed_versions_leave_the_cache(repository: Repository) -> None:
    for parent in (None, 1, None, 3):
        repository.offer(write_version(repository, parent).number)
    repository.chain(2)
    collect(repository, 1)
    assert repository.versions() == [3, 4]
    assert set(repository._cache) <= {"3", "3/deltas/4"}


def test_a_full_disk_leaves_nothing_and_the_next_publish_works(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "4m") as path:
        repository = Repository.open(path, "demo")
        with repository.locked():
            repository.offer(write_version(repository).number)
            before = repository.storage.find("1")
            fill(path / "rest", 2000)
            for parent in (None, 1):
                with pytest.raises(OSError, match="No space left"):
                    # the manifest does not fit
                    write_version(repository, parent, metrics={"train": ["x" * 100_000]})
            assert repository.storage.find("1") == before
            assert [found.name for found in (path / "demo").iterdir() if found.is_dir()] == ["1"]
            assert list((path / "demo/1").glob("deltas/*")) == []
            (path / "rest").unlink()
            assert repository.offer(write_version(repository, 1).number)


def _publish_for_ever(location: str, ready: Any) -> None:
    repository = Repository.open(location, "demo")
    ready.set()
    parent = None
    while True:
        version = write_version(repository, parent)
        repository.offer(version.number)
        parent = version.number if version.number % 7 else None


def test_a_publisher_killed_at_any_moment_leaves_complete_versions(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    location = str(tmp_path / "killed")
    repository = Repository.open(location, "demo")
    for _ in range(3):
        ready = context.Event()
        process = context.Process(target=_publish_for_ever, args=(location, ready))
        process.start()
        assert process.pid is not None
        assert ready.wait(300)
        first = len(repository.versions())
        while len(repository.versions()) < first + 5:
            assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        versions = repository.versions()
        for number in versions:
            assert verify(repository, number) == []
        current = repository.current()
        assert current in (versions[-1], versions[-2])
    # the lock ends with its process
    with repository.locked():
        repository.offer(write_version(repository).number)
