"""The storages of a repository: a disk, fsspec, a real S3 server and HTTP give the same guarantees."""

import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.repository.local import LocalStorage
from elasticrec.repository.lock import Check, hold_lock
from elasticrec.repository.remote import RemoteStorage
from elasticrec.repository.storage import Storage, is_url, open_storage
from support.disks import fill, small_file_system
from support.object_store import environment, file_server, make_bucket, s3_server
from support.store import wait_until

KINDS = ("disk", "memory", "renaming", "s3", "http")


class LikeHdfs(LocalFileSystem):  # type: ignore[misc]
    """Like HDFS: writes to another name and renames; creates a file by opening it without `overwrite`."""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        if mode != "overwrite":
            raise ValueError("Mode xb is not supported")
        super().pipe_file(path, value, **kwargs)

    def open(self, path: str, mode: str = "rb", overwrite: bool = True, **kwargs: Any) -> Any:
        return super().open(path, mode if overwrite else "xb", **kwargs)

    def mv(self, path1: str, path2: str, overwrite: bool = False) -> None:
        if not overwrite and self.exists(path2):
            raise FileExistsError(path2)
        os.replace(path1, path2)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve a directory over HTTP; return its URL."""
    monkeypatch.setenv("ELASTICREC_TOKEN", "secret")
    with file_server(tmp_path / "served", "secret") as url:
        yield url


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    if request.param == "disk":
        return open_storage(tmp_path / "root")
    if request.param == "memory":
        return open_storage(f"memory://{uuid.uuid4().hex}/models")
    if request.param == "http":
        return open_storage(f"{request.getfixturevalue('files')}/models")
    if request.param == "renaming":
        root = str(tmp_path / "renaming")
        return RemoteStorage(LikeHdfs(), root, root, is_object_store=False)
    for name, value in environment(request.getfixturevalue("server")).items():
        monkeypatch.setenv(name, value)
    return open_storage(f"{make_bucket()}/models")


def test_files_are_written_read_and_listed(store: Storage, tmp_path: Path) -> None:
    assert store.find() == {}
    assert not store.exists("a")
    with pytest.raises(FileNotFoundError):
        store.read("a/b")
    store.write("a/b", b"0123456789")
    store.write("c", b"")
    (tmp_path / "local").write_bytes(b"put")
    store.put(tmp_path / "local", "a/d/e")
    assert store.read("a/b") == b"0123456789"
    assert store.read("a/d/e") == b"put"
    assert store.read_range("a/b", 3, 7) == b"3456"
    found = store.find()
    assert {name: stat.num_bytes for name, stat in found.items()} == {"a/b": 10, "a/d/e": 3, "c": 0}
    assert all(stat.modified_s > 1.7e9 for stat in found.values())
    assert list(store.find("a/d")) == ["a/d/e"]
    assert list(store.subdirectory("a").find()) == ["b", "d/e"]
    assert store.subdirectory("a").read("b") == b"0123456789"
    assert (store.exists("a/b"), store.exists("a")) == (True, False)


def test_files_are_replaced_and_directories_deleted(store: Storage) -> None:
    store.write("a/b", b"first")
    store.write("a/b", b"2")
    assert store.read("a/b") == b"2"
    store.write("ab", b"beside")
    store.delete("a")
    store.delete("a")
    store.delete("nothing/there")
    assert list(store.find()) == ["ab"]
    store.delete("ab")
    assert store.find() == {}


def test_only_one_of_two_writers_creates_a_file(store: Storage) -> None:
    store.create("x/lock", b"first")
    with pytest.raises(FileExistsError):
        store.create("x/lock", b"second")
    assert store.read("x/lock") == b"first"
    assert list(store.find()) == ["x/lock"]
    store.delete("x/lock")

    barrier, done = threading.Barrier(4), []

    def create(number: int) -> None:
        barrier.wait()
        try:
            store.create("race", str(number).encode())
        except FileExistsError:
            return
        done.append(str(number).encode())

    threads = [threading.Thread(target=create, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.read("race")] == done


def test_a_lock_has_one_holder_and_errors_name_it(store: Storage) -> None:
    with hold_lock(store, ".lock", "publishing") as check:
        check()
        with pytest.raises(ConfigError, match=r": another process is publishing it: process \d+ on ") as caught:
            with hold_lock(store, ".lock", "publishing"):
                pass
        assert str(caught.value).startswith(store.location)
    with hold_lock(store, ".lock", "publishing"):
        pass


def test_a_lock_waits_for_its_holder(store: Storage) -> None:
    entered, free = threading.Event(), threading.Event()

    def hold() -> None:
        with hold_lock(store, ".lock", "changing"):
            entered.set()
            free.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert entered.wait(60)
    threading.Timer(0.2, free.set).start()
    with hold_lock(store, ".lock", "changing", wait_s=60):
        assert free.is_set()
    thread.join()


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_an_expired_lease_is_taken_over_and_a_lost_one_is_noticed(store: Storage) -> None:
    store.write(".lock", b'{"owner": "a dead one", "id": "x", "until": 1.0}')
    with hold_lock(store, ".lock", "publishing") as check:
        check()
        store.write(".lock", b'{"owner": "another", "id": "y", "until": 9e9}')
        with pytest.raises(UnavailableError, match="the lock was lost to another"):
            check()
    # releasing a lost lease leaves the lease of its new holder
    assert b"another" in store.read(".lock")


def test_urls_and_paths_are_told_apart() -> None:
    assert is_url("s3://bucket/models")
    assert not is_url("models/demo")
    assert not is_url(Path("s3://bucket"))
    assert open_storage("models").location == "models"
    assert isinstance(open_storage("file:///tmp/models"), LocalStorage)
    for location, words in (
        ("nosuch://x/y", "expected a URL that fsspec supports"),
        ("S3://x", "expected a path or a URL such as"),
    ):
        with pytest.raises(ConfigError, match=words):
            open_storage(location)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "hdfs_native.fsspec", None)
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.fs", None)
    with pytest.raises(ConfigError, match=r"hdfs://name/x: .*pip install 'elasticrec\[hdfs\]'"):
        open_storage("hdfs://name/x")


def test_an_unreachable_storage_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment("http://127.0.0.1:9").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with pytest.raises((UnavailableError, OSError)) as caught:
        open_storage("s3://nobody/models").read("CURRENT")
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "2m") as path:
        store = LocalStorage(path)
        store.write("CURRENT", b"old")
        (tmp_path / "large").write_bytes(bytes(3 << 20))
        with pytest.raises(OSError, match="No space left"):
            store.put(tmp_path / "large", "1/part")
        fill(path / "rest", 0)
        with pytest.raises(OSError, match="No space left"):
            store.write("CURRENT", bytes(100_000))
        assert store.read("CURRENT") == b"old"
        assert list(store.find()) == ["CURRENT", "rest"]


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_only_one_process_takes_over_an_expired_lease(store: Storage) -> None:
    store.write(".lock", b'{"owner": "a dead one", "id": "x", "until": 1.0}')
    begin, end = threading.Barrier(4), threading.Barrier(4)
    inside: list[int] = []

    def take() -> None:
        begin.wait()
        try:
            with hold_lock(store, ".lock", "publishing") as check:
                check()
                inside.append(1)
                end.wait(60)
        except ConfigError:
            end.wait(60)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == [1]


@pytest.fixture
def both(files: str, tmp_path: Path) -> tuple[Storage, Storage]:
    """Return two storages of the same directory: local, and over HTTP."""
    (tmp_path / "served/m").mkdir(parents=True)
    return open_storage(tmp_path / "served/m"), open_storage(f"{files}/m")


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("has_stale_file", [False, True])
def test_the_disk_and_http_exclude_each_other(both: tuple[Storage, Storage], first: int, has_stale_file: bool) -> None:
    if has_stale_file:
        # left by a process that died or finished
        with hold_lock(both[0], ".lock", "publishing"):
            pass
    holder, waiter = both[first], both[1 - first]
    with hold_lock(holder, ".lock", "publishing") as check:
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"another process is publishing it: process \d+ on "):
                with hold_lock(waiter, ".lock", "publishing"):
                    pass
            check()
    with hold_lock(waiter, ".lock", "publishing") as check:
        check()


def test_http_does_not_break_a_kernel_lock(both: tuple[Storage, Storage]) -> None:
    disk, over_http = both
    with hold_lock(disk, ".state.lock", "changing") as check:
        for act in (
            lambda: over_http.delete(".state.lock"),
            lambda: over_http.write(".state.lock", b"{}"),
            lambda: over_http.create(".state.lock", b"{}"),
        ):
            with pytest.raises(FileExistsError):
                act()
        check()
    over_http.write(".state.lock", b"{}")
    over_http.delete(".state.lock")
    over_http.delete(".state.lock")


def test_a_lock_whose_file_was_removed_is_lost(tmp_path: Path) -> None:
    with hold_lock(LocalStorage(tmp_path), ".lock", "publishing") as check:
        (tmp_path / ".lock").unlink()
        with pytest.raises(UnavailableError, match=r"\.lock: the lock was lost: its file was removed"):
            check()


def test_local_and_http_writers_count_without_lost_updates(both: tuple[Storage, Storage]) -> None:
    both[0].write("count", b"0")

    def add(store: Storage) -> None:
        for _ in range(4):
            with hold_lock(store, ".state.lock", "changing", wait_s=120):
                found = int(store.read("count"))
                store.write("count", str(found + 1).encode())

    threads = [threading.Thread(target=add, args=(store,)) for store in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert both[0].read("count") == b"8"


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_lease_is_renewed_while_its_holder_lives(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    # long enough to survive a stall of the machine
    monkeypatch.setattr("elasticrec.repository.lock.LEASE_S", 4.0)
    with hold_lock(store, ".lock", "publishing") as check:
        before = store.read(".lock")
        wait_until(lambda: store.read(".lock") != before, lambda: "not renewed")
        check()

        def fail(*_: Any) -> None:
            raise OSError("no network")

        monkeypatch.setattr(store.__class__, "write", fail)
        # not renewed any more: the holder notices before the lease expires
        wait_until(lambda: _is_lost(check), lambda: "still counts as held")


def _is_lost(check: Check) -> bool:
    try:
        check()
    except UnavailableError:
        return True
    return False
