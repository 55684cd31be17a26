"""Files over HTTP: ranges, checksums, access with a token, and names that leave the directory."""

import hashlib
import http.client
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from elasticrec.errors import ConfigError, ModelError, UnavailableError
from elasticrec.repository.fetch import fetch
from elasticrec.repository.files import DIGEST, digest_header, parse_digest
from elasticrec.repository.http import HttpStorage
from elasticrec.repository.local import LocalStorage
from elasticrec.repository.repository import Repository
from elasticrec.repository.storage import open_storage
from support.disks import fill, small_file_system
from support.object_store import file_server
from support.store import wait_until
from support.versions import write_version


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with file_server(tmp_path / "served", "secret") as found:
        yield found


@pytest.fixture
def store(url: str) -> HttpStorage:
    return HttpStorage(url, "secret")


def ask(
    url: str, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send one plain request; return the status, the headers and the body."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    fields = {"Authorization": "Bearer secret"} | {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, fields)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content


def test_ranges_and_checksums(url: str, store: HttpStorage) -> None:
    content = bytes(range(256)) * 1000
    store.write("a/b", content)
    status, headers, body = ask(url, "GET", "/files/a/b")
    assert (status, body) == (200, content)
    assert parse_digest(headers[DIGEST.lower()]) == hashlib.sha256(content).digest()
    status, headers, body = ask(url, "GET", "/files/a/b", Range="bytes=100-199")
    assert (status, body, headers["content-range"]) == (206, content[100:200], f"bytes 100-199/{len(content)}")
    assert ask(url, "GET", "/files/a/b", Range="bytes=999999-")[0] == 416
    # a replaced file has another checksum
    store.write("a/b", b"other")
    assert store.read("a/b") == b"other"


def test_a_replaced_file_is_read_completely_with_its_own_checksum(store: HttpStorage, tmp_path: Path) -> None:
    disk, stop = LocalStorage(tmp_path / "served"), threading.Event()
    disk.write("CURRENT", b"0")

    def replace() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            disk.write("CURRENT", str(number).encode() * (1 + number % 7))

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(100):
            assert store.read("CURRENT")
    finally:
        stop.set()
        thread.join()


def test_an_upload_damaged_in_transit_is_discarded(url: str, store: HttpStorage, tmp_path: Path) -> None:
    right = digest_header(hashlib.sha256(b"right").digest())
    status, _, body = ask(url, "PUT", "/files/a", b"wrong", Repr_Digest=right)
    assert status == 400 and b"sha-256 differs from the header" in body
    assert ask(url, "PUT", "/files/a", b"right")[0] == 400
    assert ask(url, "PUT", "/files/a", b"right", Repr_Digest="sha-256=:AAAA:")[0] == 400
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0)) as cut:
        fields = ("Host: x", "Authorization: Bearer secret", f"{DIGEST}: {right}", "Content-Length: 5")
        cut.sendall(("PUT /files/a HTTP/1.1\r\n" + "\r\n".join(fields) + "\r\n\r\nri").encode())
    wait_until(lambda: store.find() == {}, lambda: str(store.find()))
    assert ask(url, "PUT", "/files/a", b"right", Repr_Digest=right)[0] == 201
    assert store.read("a") == b"right"
    assert [path.name for path in (tmp_path / "served").iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["../x", "a/../../x", "%2e%2e/x", "a//../x", "..%2fx", "a%00b", "a%5cb"])
def test_names_that_leave_the_directory_are_refused(url: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "x").write_text("not for you")
    digest = digest_header(hashlib.sha256(b"y").digest())
    for method, body in (("GET", None), ("PUT", b"y"), ("DELETE", None)):
        status, _, answer = ask(url, method, f"/files/{name}", body, Repr_Digest=digest)
        assert status in (400, 404), (method, status)
        assert b"not for you" not in answer
    assert (tmp_path / "x").read_text() == "not for you"


@pytest.mark.parametrize(
    "name", ["x" * 300, "é" * 110, "/".join("x" * 100), "m/" + "y" * 250 + "/z", "x/" * 3000 + "z"]
)
def test_names_that_are_too_long_are_refused(url: str, name: str) -> None:
    digest = digest_header(hashlib.sha256(b"y").digest())
    for method, body in (("GET", None), ("HEAD", None), ("PUT", b"y"), ("DELETE", None)):
        path = f"/files/{quote(name)}"
        assert ask(url, method, path, body, Repr_Digest=digest)[0] == 400, method
    assert ask(url, "GET", f"/files/{quote(name)}?list")[0] == 400


def test_a_file_is_not_a_directory(url: str, store: HttpStorage) -> None:
    store.write("a", b"x")
    digest = digest_header(hashlib.sha256(b"y").digest())
    statuses = [ask(url, method, "/files/a/b", b"y", Repr_Digest=digest)[0] for method in ("GET", "PUT", "DELETE")]
    assert statuses == [404, 412, 204]
    assert store.read("a") == b"x"


def test_without_the_token_nothing_is_read_or_written(url: str, store: HttpStorage) -> None:
    store.write("a", b"secret rows")
    digest = digest_header(hashlib.sha256(b"y").digest())
    for method, path, body in (("GET", "a", None), ("GET", "?list", None), ("PUT", "a", b"y"), ("DELETE", "a", None)):
        for token in ("", "Bearer wrong"):
            status, _, answer = ask(url, method, f"/files/{path}", body, Repr_Digest=digest, Authorization=token)
            assert status == 401 and b"secret rows" not in answer
    assert store.read("a") == b"secret rows"
    with pytest.raises(ConfigError, match="missing or wrong token; set `ELASTICREC_TOKEN`"):
        HttpStorage(url, "wrong").read("a")


def test_a_full_disk_is_reported_and_leaves_no_files(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small", "4m") as disk, file_server(disk, "secret") as url:
        store = HttpStorage(url, "secret")
        store.write("before", b"x")
        fill(disk / "filler", 1 << 20)
        with pytest.raises(UnavailableError, match="no space left on device"):
            store.write("big", bytes(2 << 20))
        assert list(store.find("big")) == [] and not [path for path in disk.iterdir() if path.name.startswith(".big")]


def test_a_version_is_published_and_fetched_over_http(store: HttpStorage, tmp_path: Path) -> None:
    repository = Repository(store.subdirectory("small"))
    base = write_version(repository).number
    delta = write_version(repository, base).number
    assert repository.offer(delta)
    fetched = fetch(repository, delta, tmp_path / "cache")
    assert [version.number for version in fetched.chain] == [base, delta]
    assert fetched.parts(fetched.version)[0].read_bytes() == b"rows of 2" * 50
    local = Repository.open(tmp_path / "served", "small")
    assert local.versions() == [base, delta] and local.current() == delta
    with pytest.raises(ModelError, match="no version 9"):
        repository.version(9)


def test_a_download_damaged_in_transit_is_refused(store: HttpStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write("a", b"right")
    monkeypatch.setattr("elasticrec.repository.files.digest_header", lambda _: digest_header(bytes(32)))
    with pytest.raises(UnavailableError, match="/files/a: sha-256 differs, the file was damaged in transit"):
        store.read("a")


def test_no_token_goes_to_another_machine_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    far = "http://10.255.255.1:7160/files/m"
    monkeypatch.setenv("ELASTICREC_TOKEN", "secret")
    asked: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        asked.append("asked")
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr("urllib3.HTTPConnectionPool.urlopen", refuse)
    with pytest.raises(ConfigError) as caught:
        open_storage(far).read("CURRENT")
    assert str(caught.value) == (
        f"{far}: the token would go to another machine in clear text: expected https://, `--insecure`, or "
        "`ELASTICREC_INSECURE=1`"
    )
    with pytest.raises(ConfigError, match="in clear text"):
        open_storage(far).subdirectory("x").find()
    assert asked == []
    # with `insecure`, or without a token, the request is sent
    insecure = open_storage(far, insecure=True)
    for store in (insecure, insecure.subdirectory("x"), HttpStorage(far)):
        with pytest.raises(UnavailableError):
            store.read("CURRENT")
    monkeypatch.setenv("ELASTICREC_INSECURE", "1")
    with pytest.raises(UnavailableError):
        open_storage(far).read("CURRENT")
    assert len(asked) == 4


def test_a_server_that_does_not_answer_is_reported_in_one_line(tmp_path: Path) -> None:
    with file_server(tmp_path, "secret") as url:
        pass
    with pytest.raises(UnavailableError, match=r"/files/a did not answer: .*refused"):
        HttpStorage(url, "secret").read("a")
