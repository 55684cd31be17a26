"""Loading versions into a store process: the order, the versions to keep, and versions that cannot be loaded."""

from pathlib import Path

import pytest

from elasticrec.cube import loader
from elasticrec.cube.loader import LoadedVersion, Loader, target_of, versions_to_keep
from elasticrec.errors import ModelError
from elasticrec.repository.repository import Current, Repository
from support.versions import write_version


class FakeServer:
    """Records the calls; a delta needs its parent."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.paths: list[str] = []
        self._held: list[int] = []

    def install_base(self, version: int, paths: list[str]) -> None:
        assert all(Path(path).is_file() for path in paths)
        self.paths = paths
        self._install("base", version)

    def install_delta(self, version: int, parent: int, paths: list[str]) -> None:
        assert parent in self._held, "the parent must be loaded"
        self._install("delta", version)

    def _install(self, kind: str, version: int) -> None:
        self.calls.append((kind, version))
        self._held = sorted({*self._held, version})

    def retire(self, version: int) -> None:
        self.calls.append(("retire", version))
        self._held.remove(version)

    def versions(self) -> list[int]:
        return list(self._held)


class LoaderSetup:
    def __init__(self, tmp_path: Path, keep: int = 2, partitions: range | None = None) -> None:
        self.repository = Repository.open(tmp_path, "small")
        self.server = FakeServer()
        self.loader = Loader(self.repository, self.server, tmp_path / "cache", keep, partitions=partitions)

    def poll(self) -> list[tuple[str, int]]:
        """Poll once, and return the resulting calls to the server."""
        self.server.calls.clear()
        self.loader.poll()
        return list(self.server.calls)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@pytest.fixture
def setup(tmp_path: Path) -> LoaderSetup:
    return LoaderSetup(tmp_path)


def test_the_newest_version_is_loaded_delta_by_delta(setup: LoaderSetup, caplog: pytest.LogCaptureFixture) -> None:
    assert setup.poll() == []
    base = write_version(setup.repository).number
    first = write_version(setup.repository, base).number
    second = write_version(setup.repository, first).number
    assert setup.poll() == [("base", base), ("delta", first), ("delta", second)]
    assert setup.poll() == []
    third = write_version(setup.repository, second).number
    assert setup.poll() == [("delta", third)]
    assert caplog.messages[-1].startswith(f"loaded version {third} in ")


def test_a_shard_reads_and_checks_the_files_of_its_partitions(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = LoaderSetup(tmp_path, partitions=range(2)), LoaderSetup(tmp_path, partitions=range(2, 4))
    base = write_version(first.repository, owned=(range(2), range(2, 4)))
    damaged = tmp_path / "small" / base.name / base.parts[1]
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert first.poll() == [("base", base.number)]
    assert second.poll() == []
    assert f"{base.parts[1]}: sha-256 differs" in caplog.messages[-1]
    assert [Path(path).name for path in first.server.paths] == ["part-00000"]


def test_a_rollback_is_followed_and_newer_versions_are_not_loaded(setup: LoaderSetup) -> None:
    base = write_version(setup.repository).number
    delta = write_version(setup.repository, base).number
    setup.repository.offer(delta)
    setup.poll()
    old = LoaderSetup(Path(setup.repository.location).parent)
    setup.repository.rollback(base)
    write_version(setup.repository)
    assert setup.poll() == []
    assert old.poll() == [("base", base)], "a new process does not load newer versions"
    setup.repository.resume()
    assert setup.poll() == [("base", 3)]


def test_the_target_of_a_rollback_is_loaded_beside_the_current_version(setup: LoaderSetup) -> None:
    first, second = write_version(setup.repository).number, write_version(setup.repository).number
    setup.repository.offer(second)
    assert setup.poll() == [("base", second)]
    setup.repository.rollback(first, is_loaded=False)
    assert setup.poll() == [("base", first)]
    assert setup.server.versions() == [first, second]
    assert setup.repository.complete_rollback(first)
    state = setup.repository.state()
    assert state is not None and (state.version, state.is_held, state.wanted) == (first, True, None)
    assert not setup.repository.complete_rollback(first), "the rollback is already complete"


@pytest.mark.parametrize(
    ("held", "current", "target", "keep", "expected"),
    [
        ([1, 2, 3, 4], 3, 4, 2, {2, 3, 4}),
        ([1, 2, 3, 4], 3, 4, 1, {3, 4}),
        ([1, 2, 3], None, 3, 2, {1, 2, 3}),
        ([3, 9], 9, 3, 1, {3, 9}),
        (list(range(1, 41)), 1, 40, 2, {1, *range(25, 41)}),
        ([], None, None, 2, set()),
    ],
)
def test_the_current_version_and_its_neighbours_are_kept(
    held: list[int], current: int | None, target: int | None, keep: int, expected: set[int]
) -> None:
    # Deltas of one base that were loaded long ago.
    assert versions_to_keep([LoadedVersion(version, 1) for version in held], current, target, keep) == expected


def test_recent_versions_and_the_two_newest_bases_are_kept() -> None:
    """The rollout may be about to offer a recent version; bases take memory."""
    old = [LoadedVersion(version, 1) for version in range(1, 31)]
    new = [LoadedVersion(version, 1, is_new=True) for version in range(31, 61)]
    assert versions_to_keep([*old, *new], 1, 60, 2) == {1, *range(31, 61)}
    bases = [LoadedVersion(version, version, is_new=True) for version in range(1, 11)]
    assert versions_to_keep(bases, 1, 10, 2) == {1, 9, 10}
    of_the_last = [LoadedVersion(11, 10, is_new=True), LoadedVersion(12, 10, is_new=True)]
    assert versions_to_keep([*bases, *of_the_last], 1, 12, 2) == {1, 9, 10, 11, 12}


def test_only_the_end_of_a_long_chain_is_reported(setup: LoaderSetup) -> None:
    """The rollout may offer any reported version, so reported versions must stay loaded."""
    number = write_version(setup.repository).number
    setup.repository.offer(number)
    setup.poll()
    reported = set[int]()
    setup.loader._on_change = lambda: reported.update(setup.loader.status()["versions"])
    for _ in range(40):
        number = write_version(setup.repository, number).number
    setup.poll()
    assert reported == {1, *range(26, 42)} == set(setup.server.versions())


def test_a_version_offered_during_a_load_is_kept(setup: LoaderSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(loader.time, "monotonic", lambda: now[0])
    first = write_version(setup.repository).number
    setup.repository.offer(first)
    setup.poll()
    numbers = [first]
    for _ in range(30):
        numbers.append(write_version(setup.repository, numbers[-1]).number)
        setup.poll()
        now[0] += 100
    number = setup.server.versions()[1]
    setup.loader._on_change = lambda: setup.repository.offer(number)
    write_version(setup.repository, numbers[-1])
    setup.poll()
    assert number in setup.server.versions()


def test_failed_versions_are_retried_with_back_off(
    setup: LoaderSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(loader.time, "monotonic", lambda: now[0])
    base = write_version(setup.repository)
    delta = write_version(setup.repository, base.number).number
    setup.repository.offer(base.number)
    path = Path(setup.repository.location) / base.name / base.parts[0]
    path.write_bytes(b"damaged")
    for _ in range(5):
        setup.poll()
    assert setup.loader.figures.failures == 2 and len(caplog.messages) == 2
    now[0] += 1.1
    setup.poll()
    assert setup.loader.figures.failures == 4 and len(caplog.messages) == 2
    assert setup.loader.status()["failed"]["version"] == delta


def test_a_bug_does_not_stop_the_loader(
    setup: LoaderSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr(setup.repository, "state", fail)
    setup.poll()
    assert caplog.messages == ["OverflowError: cannot convert float infinity to integer"]


def test_the_status_shows_the_version_that_is_being_loaded(setup: LoaderSetup) -> None:
    loading: list[int | None] = []
    setup.loader._on_change = lambda: loading.append(setup.loader.status()["loading"])
    number = write_version(setup.repository).number
    setup.poll()
    assert loading == [number, number]


def test_old_versions_are_unloaded_but_never_the_current_one(setup: LoaderSetup) -> None:
    numbers = [write_version(setup.repository).number]
    for _ in range(4):
        numbers.append(write_version(setup.repository, numbers[-1]).number)
    setup.repository.offer(numbers[0])
    setup.poll()
    assert setup.server.versions() == numbers
    setup.repository.offer(numbers[3])
    assert setup.poll() == [("retire", numbers[0]), ("retire", numbers[1])]


def test_a_damaged_version_is_named_and_retried(
    setup: LoaderSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(loader.time, "monotonic", lambda: now[0])
    base = write_version(setup.repository).number
    setup.poll()
    bad = write_version(setup.repository, base)
    path = Path(setup.repository.location) / bad.name / bad.parts[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    assert setup.poll() == []
    assert (
        caplog.messages[-1]
        == f"version {bad.number} cannot be loaded: {path}: sha-256 differs from the manifest, the file is damaged"
    )
    status = setup.loader.status()
    assert (
        status["versions"] == [base]
        and status["failed"]["version"] == bad.number
        and "sha-256" in status["failed"]["why"]
    )
    num_messages = len(caplog.messages)
    path.write_bytes(content)
    assert setup.poll() == [], "retries after a pause"
    now[0] += 1.1
    assert setup.poll() == [("delta", bad.number)]
    assert setup.loader.status()["failed"] is None and len(caplog.messages) == num_messages + 1


def test_an_unreadable_repository_is_logged_once(
    setup: LoaderSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_version(setup.repository)
    setup.poll()

    def fail() -> None:
        raise ModelError("models/small/CURRENT: the file is damaged")

    monkeypatch.setattr(setup.repository, "state", fail)
    setup.poll()
    setup.poll()
    assert (
        caplog.messages[-1] == "models/small/CURRENT: the file is damaged"
        and caplog.messages.count(caplog.messages[-1]) == 1
    )
    assert setup.loader.status()["problem"] and setup.server.versions() == [1]


def test_target_of() -> None:
    assert target_of(None, []) is None
    assert target_of(None, [1, 2]) == 2
    assert target_of(Current(1, 5), [1, 2]) == 2
    assert target_of(Current(1, 5, is_held=True), [1, 2]) == 1
    assert target_of(Current(2, 5, is_held=True, wanted=1), [1, 2, 3]) == 1
