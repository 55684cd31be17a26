"""Versions on this machine: used in place, downloaded, or unpacked."""

import errno
import functools
import gzip
import http.server
import io
import os
import re
import tarfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrec.errors import ModelError, UnavailableError
from elasticrec.manifest import encode_manifest
from elasticrec.repository import fetch as fetching
from elasticrec.repository import verify as verifying
from elasticrec.repository.fetch import FetchedVersion, default_cache, fetch, prune
from elasticrec.repository.find import find_version
from elasticrec.repository.pack import pack, unpack
from elasticrec.repository.remote import RemoteStorage
from elasticrec.repository.repository import Repository
from elasticrec.repository.verify import verify
from elasticrec.repository.version import decode_version
from support.disks import small_file_system
from support.versions import write_version


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ELASTICREC_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def remote() -> Repository:
    repository = Repository.open(f"memory://{uuid.uuid4().hex}", "demo")
    for parent in (None, 1, 2, None):
        write_version(repository, parent)
    repository.offer(3)
    return repository


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record every read of a remote storage as `name[start:end]`."""
    names: list[str] = []
    read_range = RemoteStorage.read_range

    def counted(self: RemoteStorage, name: str, start: int, end: int) -> bytes:
        names.append(f"{name}[{start}:{end}]")
        return read_range(self, name, start, end)

    monkeypatch.setattr(RemoteStorage, "read_range", counted)
    return names


def content_of(fetched: FetchedVersion) -> dict[str, bytes]:
    return {
        f"{version.name}/{name}": (fetched.model / version.name / name).read_bytes()
        for version in fetched.chain
        for name in version.files
    }


def test_a_version_on_a_disk_is_used_in_place(tmp_path: Path) -> None:
    repository = Repository.open(tmp_path / "models", "demo")
    for parent in (None, 1):
        write_version(repository, parent)
    fetched = fetch(repository, 2, tmp_path / "cache")
    assert fetched.directory == tmp_path / "models/demo/1/deltas/2"
    assert [fetched.parts(version)[0].is_file() for version in fetched.chain] == [True, True]
    assert not (tmp_path / "cache").exists()


def test_a_remote_version_is_copied_once_and_completely(remote: Repository, reads: list[str]) -> None:
    fetched = fetch(remote, 3, default_cache())
    assert [version.number for version in fetched.chain] == [1, 2, 3]
    assert content_of(fetched) == {name: remote.storage.read(name) for name in content_of(fetched)}
    # the copy is a repository itself
    assert verify(Repository.open(fetched.model), 3) == []
    assert len(reads) == 7
    fetch(remote, 3, default_cache())
    assert len(reads) == 7
    # both bases have the same graph, so it is not read again
    fetch(remote, 4, default_cache())
    assert [name.partition("[")[0] for name in reads[7:]] == ["4/cube/part-00000", "4/dense.bin"]


HALVES = (range(2), range(2, 4))


def test_fetching_some_partitions_fetches_only_their_files(reads: list[str]) -> None:
    remote = Repository.open(f"memory://{uuid.uuid4().hex}", "demo")
    write_version(remote, owned=HALVES)
    write_version(remote, 1, owned=(range(1), range(1, 3), range(3, 4)))
    write_version(remote, 2)
    fetched = fetch(remote, 3, default_cache(), partitions=range(2, 4))
    parts = [[path.name for path in fetched.parts(version)] for version in fetched.chain]
    # the third version has one file with all partitions
    assert parts == [["part-00001"], ["part-00001", "part-00002"], ["part-00000"]]
    assert all(path.is_file() for version in fetched.chain for path in fetched.parts(version))
    assert len(reads) == 4, "reads only these four files"
    assert [
        len(fetch(remote, 3, default_cache(), partitions=range(1)).parts(version)) for version in fetched.chain
    ] == [
        1,
        1,
        1,
    ]
    assert len(reads) == 6
    # fetching the whole version reads the missing files
    whole = fetch(remote, 3, default_cache())
    assert content_of(whole) == {name: remote.storage.read(name) for name in content_of(whole)}
    assert verify(Repository.open(whole.model), 3) == []
    assert len(reads) == 10


def test_local_versions_return_only_the_parts_asked_for(tmp_path: Path) -> None:
    repository = Repository.open(tmp_path / "models", "demo")
    version = write_version(repository, owned=HALVES)
    for partitions, expected in ((range(1), [0]), (range(2, 3), [1]), (range(1, 3), [0, 1]), (None, [0, 1])):
        fetched = fetch(repository, 1, tmp_path / "cache", partitions=partitions)
        assert [int(path.name[-5:]) for path in fetched.parts(version)] == expected


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"cube/part-00000": [0, 4]}, "table.parts: expected cube/part-00000, cube/part-00001, got cube/part-00000"),
        ({"cube/part-00000": [0, 2], "cube/part-00001": [2, 5]}, "cube/part-00001: expected a range within 0 to 4"),
        ({"cube/part-00000": [0, 2], "cube/part-00001": [2, 2]}, "cube/part-00001: expected a range within 0 to 4"),
        ({"cube/part-00000": [0, 2], "cube/part-00001": [2, 3, 4]}, "a key is missing or has the wrong type"),
        ({"cube/part-00000": [0, 2], "cube/part-00001": 2}, "a key is missing or has the wrong type"),
        ([0, 2], "a key is missing or has the wrong type"),
    ],
)
def test_invalid_ranges_of_parts_are_refused(tmp_path: Path, parts: Any, message: str) -> None:
    version = write_version(Repository.open(tmp_path / "models", "demo"), owned=HALVES)
    table = version.manifest["table"] | {"parts": parts}
    body = {
        key: value for key, value in version.manifest.items() if key not in ("format", "kind", "self_sha256", "files")
    }
    content = encode_manifest("model", {**body, "table": table}, version.files, format=2)
    with pytest.raises(ModelError, match=re.escape(message)):
        decode_version(content, "1", "models/demo")


def test_a_url_is_accepted_wherever_a_model_is(remote: Repository) -> None:
    for text, number in (
        (remote.location, 3),
        (f"{remote.location}:4", 4),
        (f"{remote.location}/4", 4),
        (f"{remote.location}/1/deltas/2", 2),
    ):
        path, manifest = find_version(text)
        assert manifest["version"] == number
        assert (path / "manifest.json").is_file()
        assert (path / "dense.bin").is_file()
    with pytest.raises(ModelError, match="not a model"):
        find_version(f"memory://{uuid.uuid4().hex}/models/none")


def test_an_interrupted_download_is_resumed(
    remote: Repository, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "_CHUNK_BYTES", 100)
    counted = RemoteStorage.read_range

    def cut(self: RemoteStorage, name: str, start: int, end: int) -> bytes:
        if name == "1/cube/part-00000" and start >= 300:
            raise UnavailableError("the network was cut")
        return counted(self, name, start, end)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStorage, "read_range", cut)
        with pytest.raises(UnavailableError, match="cut"):
            fetch(remote, 1, default_cache())
    with pytest.raises(ModelError):
        Repository.open(next(default_cache().glob("*/demo")) if list(default_cache().glob("*/demo")) else "none").chain(
            1
        )
    reads.clear()
    fetched = fetch(remote, 1, default_cache())
    assert reads[0] == "1/cube/part-00000[300:400]"
    assert content_of(fetched) == {name: remote.storage.read(name) for name in content_of(fetched)}
    assert not list(default_cache().rglob("*.part"))


def test_a_damaged_partial_download_is_discarded(remote: Repository) -> None:
    entry = remote.version(1).files["cube/part-00000"]
    part = default_cache() / "blobs" / f"{entry.sha256}.part"
    for rest in (b"other bytes", bytes(entry.num_bytes + 1)):
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(rest)
        blob = part.with_suffix("")
        blob.unlink(missing_ok=True)
        assert fetch(remote, 1, default_cache()).version.number == 1
        assert not part.exists() or not blob.exists()
        for path in default_cache().rglob("manifest.json"):
            path.unlink()


def test_a_flipped_bit_is_named_and_the_next_fetch_starts_over(remote: Repository) -> None:
    good = remote.storage.read("1/dense.bin")
    remote.storage.write("1/dense.bin", bytes([good[0] ^ 1, *good[1:]]))
    with pytest.raises(ModelError) as caught:
        fetch(remote, 1, default_cache())
    assert str(caught.value) == (
        f"{remote.location}/1/dense.bin: sha-256 differs from the manifest, the file is damaged"
    )
    assert not list(default_cache().rglob("manifest.json"))
    remote.storage.write("1/dense.bin", good)
    assert fetch(remote, 1, default_cache()).directory.is_dir()


def test_free_space_is_checked_before_a_download(remote: Repository, reads: list[str], tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "4m") as path:
        with pytest.raises(ModelError, match=r"version 3 does not fit: expected [\d,]+ bytes free, got "):
            fetch(remote, 3, path / "cache")
    assert reads == []


def test_unused_copies_are_removed(remote: Repository) -> None:
    fetch(remote, 3, default_cache())
    fetch(remote, 4, default_cache())
    model = fetch(remote, 3, default_cache()).model
    prune(remote, {2, 4}, default_cache())
    assert sorted(path.parent.relative_to(model).as_posix() for path in model.rglob("manifest.json")) == [
        "1",
        "1/deltas/2",
        "4",
    ]
    assert verify(Repository.open(model), 2) == []
    prune(remote, {4}, default_cache())
    assert verify(Repository.open(model), 4) == []
    assert len(list((default_cache() / "blobs").iterdir())) == 3
    prune(remote, set(), default_cache())
    assert list((default_cache() / "blobs").iterdir()) == []


def test_copies_are_kept_during_a_fetch(remote: Repository) -> None:
    import fcntl

    fetch(remote, 3, default_cache())
    with fetching._lock_cache(default_cache(), fcntl.LOCK_SH):
        prune(remote, set(), default_cache())
    assert verify(Repository.open(fetch(remote, 3, default_cache()).model), 3) == []


def test_a_pack_is_accepted_wherever_a_model_is(remote: Repository, tmp_path: Path) -> None:
    out = tmp_path / "demo.tar.gz"
    size = pack(fetch(remote, 3, default_cache()), out)
    assert size == out.stat().st_size
    path, manifest = find_version(str(out))
    assert (manifest["version"], path.name) == (3, "3")
    model = unpack(out, default_cache())
    assert verify(Repository.open(model), 3) == []
    assert Repository.open(model).versions() == [1, 2, 3]
    # a pack with the same content is unpacked once
    before = {entry: entry.stat().st_mtime_ns for entry in model.rglob("*")}
    assert unpack(out, default_cache()) == model
    assert {entry: entry.stat().st_mtime_ns for entry in model.rglob("*")} == before
    again = tmp_path / "again.tgz"
    pack(fetch(remote, 3, default_cache()), again)
    assert again.read_bytes() == out.read_bytes()


def test_a_pack_is_opened_from_a_url(remote: Repository, tmp_path: Path) -> None:
    pack(fetch(remote, 3, default_cache()), tmp_path / "demo.tar.gz")
    (tmp_path / "cut.tar.gz").write_bytes((tmp_path / "demo.tar.gz").read_bytes()[:300])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        path, manifest = find_version(f"{url}/demo.tar.gz")
        with pytest.raises(ModelError, match=re.escape(f"{url}/cut.tar.gz: not a `.tar.gz`, or damaged")):
            find_version(f"{url}/cut.tar.gz")
        with pytest.raises(FileNotFoundError, match="none"):
            find_version(f"{url}/none.tar.gz")
        server.shutdown()
    assert manifest["version"] == 3 and path.is_relative_to(default_cache())


def test_unused_packs_are_removed(remote: Repository, tmp_path: Path) -> None:
    for number in (1, 2, 3):
        pack(fetch(remote, number, default_cache()), tmp_path / f"{number}.tar.gz")
    models = [unpack(tmp_path / f"{number}.tar.gz", default_cache()) for number in (1, 2)]
    for model in models:
        os.utime(model.parent, (0, 0))
    # opened again, so it counts as used
    unpack(tmp_path / "2.tar.gz", default_cache())
    unpack(tmp_path / "3.tar.gz", default_cache())
    assert [model.exists() for model in models] == [False, True]


def test_a_pack_that_cannot_be_written_leaves_nothing(
    remote: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = fetch(remote, 3, default_cache())
    (tmp_path / "out").mkdir()

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        monkeypatch.context() as full,
        pytest.raises(OSError, match=r"No space left on device: '.*/out/demo\.tar\.gz'"),
    ):
        full.setattr(tarfile.TarFile, "addfile", fail)
        pack(fetched, tmp_path / "out" / "demo.tar.gz")
    assert list((tmp_path / "out").iterdir()) == []
    os.unlink(fetched.directory / "dense.bin")
    with pytest.raises(FileNotFoundError):
        pack(fetched, tmp_path / "out" / "demo.tar.gz")
    assert list((tmp_path / "out").iterdir()) == []


def member(name: str, content: bytes = b"x", **changes: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in changes.items():
        setattr(info, key, value)
    return info, content


def write_tar(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))


CURRENT = member("m/CURRENT", b'{"version": 1, "generation": 1}')
HOSTILE: dict[str, tuple[list[tuple[tarfile.TarInfo, bytes]], str]] = {
    "parent": ([CURRENT, member("m/../../x")], "expected names within the directory of a model"),
    "absolute": ([CURRENT, member("/etc/x")], "expected names within the directory of a model"),
    "dot": ([CURRENT, member("m/./x")], "expected names within the directory of a model"),
    "top": ([CURRENT, member("x")], "expected names within the directory of a model"),
    "hidden": ([member("..m/CURRENT")], "expected names within the directory of a model"),
    "backslash": ([CURRENT, member("m/a\\b")], "expected names within the directory of a model"),
    "link": ([CURRENT, member("m/x", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")], "a link or a device"),
    "hard link": ([CURRENT, member("m/x", b"", type=tarfile.LNKTYPE, linkname="m/CURRENT")], "a link or a device"),
    "device": ([CURRENT, member("m/x", b"", type=tarfile.CHRTYPE)], "a link or a device"),
    "twice": ([CURRENT, CURRENT], "occurs twice"),
    "two models": ([CURRENT, member("n/x")], "expected one directory with `CURRENT` in it"),
    "nothing": ([], "expected one directory with `CURRENT` in it"),
}


@pytest.mark.parametrize(("members", "words"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pack_is_refused(members: list[tuple[tarfile.TarInfo, bytes]], words: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.tar.gz"
    write_tar(path, *members)
    with pytest.raises(ModelError) as caught:
        unpack(path, default_cache())
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value) or not members
    assert "\n" not in str(caught.value)
    assert list((default_cache() / "packs").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-9],
        lambda content: content[: len(content) // 2],
        lambda _: b"not a pack",
        lambda _: b"",
    ],
    ids=["end", "half", "other", "empty"],
)
def test_a_damaged_pack_is_refused(damage: Callable[[bytes], bytes], remote: Repository, tmp_path: Path) -> None:
    path = tmp_path / "demo.tar.gz"
    pack(fetch(remote, 3, default_cache()), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ModelError, match="damaged"):
        unpack(path, default_cache())
    assert list((default_cache() / "packs").iterdir()) == []


def test_a_pack_larger_than_the_disk_is_refused(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "20m") as path:
        write_tar(tmp_path / "large.tar.gz", CURRENT, member("m/x", bytes(10 << 20)))
        assert (tmp_path / "large.tar.gz").stat().st_size < 100_000
        with pytest.raises(ModelError, match="does not fit into"):
            unpack(tmp_path / "large.tar.gz", path)
        assert list((path / "packs").iterdir()) == []
    assert gzip.decompress((tmp_path / "large.tar.gz").read_bytes())
