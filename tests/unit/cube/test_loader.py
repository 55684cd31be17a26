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
        self.told: list[tuple[str, int]] = []
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
        self.told.append((kind, version))
        self._held = sorted({*self._held, version})

    def retire(self, version: int) -> None:
        self.told.append(("retire", version))
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
        self.server.told.clear()
        self.loader.poll()
        return list(self.server.told)


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")


@pytest.fixture
def setting(tmp_path: Path) -> LoaderSetup:
    return LoaderSetup(tmp_path)


def test_the_newest_version_is_loaded_delta_by_delta(setting: LoaderSetup, caplog: pytest.LogCaptureFixture) -> None:
    assert setting.poll() == []
    base = write_version(setting.repository).number
    first = write_version(setting.repository, base).number
    second = write_version(setting.repository, first).number
    assert setting.poll() == [("base", base), ("delta", first), ("delta", second)]
    assert setting.poll() == []
    third = write_version(setting.repository, second).number
    assert setting.poll() == [("delta", third)]
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


def test_a_rollback_is_followed_and_newer_versions_are_not_loaded(setting: LoaderSetup) -> None:
    base = write_version(setting.repository).number
    delta = write_version(setting.repository, base).number
    setting.repository.offer(delta)
    setting.poll()
    old = LoaderSetup(Path(setting.repository.location).parent)
    setting.repository.rollback(base)
    write_version(setting.repository)
    assert setting.poll() == []
    assert old.poll() == [("base", base)], "a new process does not load newer versions"
    setting.repository.resume()
    assert setting.poll() == [("base", 3)]


def test_the_target_of_a_rollback_is_loaded_beside_the_current_version(setting: LoaderSetup) -> None:
    first, second = write_version(setting.repository).number, write_version(setting.repository).number
    setting.repository.offer(second)
    assert setting.poll() == [("base", second)]
    setting.repository.rollback(first, is_loaded=False)
    assert setting.poll() == [("base", first)]
    assert setting.server.versions() == [first, second]
    assert setting.repository.complete_rollback(first)
    state = setting.repository.state()
    assert state is not None and (state.version, state.is_held, state.wanted) == (first, True, None)
    assert not setting.repository.complete_rollback(first), "it is complete already"


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


def test_only_the_end_of_a_long_chain_is_reported(setting: LoaderSetup) -> None:
    """The rollout may offer any reported version, so reported versions must stay loaded."""
    number = write_version(setting.repository).number
    setting.repository.offer(number)
    setting.poll()
    told = set[int]()
    setting.loader._on_change = lambda: told.update(setting.loader.status()["versions"])
    for _ in range(40):
        number = write_version(setting.repository, number).number
    setting.poll()
    assert told == {1, *range(26, 42)} == set(setting.server.versions())


def test_a_version_that_is_offered_during_a_load_stays(setting: LoaderSetup, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(loader.time, "monotonic", lambda: now[0])
    first = write_version(setting.repository).number
    setting.repository.offer(first)
    setting.poll()
    numbers = [first]
    for _ in range(30):
        numbers.append(write_version(setting.repository, numbers[-1]).number)
        setting.poll()
        now[0] += 100
    number = setting.server.versions()[1]
    setting.loader._on_change = lambda: setting.repository.offer(number)
    write_version(setting.repository, numbers[-1])
    setting.poll()
    assert number in setting.server.versions()


def test_failed_versions_are_retried_with_back_off(
    setting: LoaderSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(loader.time, "monotonic", lambda: now[0])
    base = write_version(setting.repository)
    delta = write_version(setting.repository, base.number).number
    setting.repository.offer(base.number)
    path = Path(setting.repository.location) / base.name / base.parts[0]
    path.write_bytes(b"damaged")
    for _ in range(5):
        setting.poll()
    assert setting.loader.figures.failures == 2 and len(caplog.messages) == 2
    now[0] += 1.1
    setting.poll()
    assert setting.loader.figures.failures == 4 and len(caplog.messages) == 2
    assert setting.loader.status()["failed"]["version"] == delta


def test_a_bug_does_not_stop_the_loader(
    setting: LoaderSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OverflowError("cannot convert float infinity to integer")

    monkeypatch.setattr(setting.repository, "state", fail)
    setting.poll()
    assert caplog.messages == ["OverflowError: cannot convert float infinity to integer"]


def test_the_status_shows_the_version_that_is_being_loaded(setting: LoaderSetup) -> None:
    told: list[int | None] = []
    setting.loader._on_change = lambda: told.append(setting.loader.status()["loading"])
    number = write_version(setting.repository).number
    setting.poll()
    assert told == [number, number]


def test_old_versions_are_unloaded_but_never_the_current_one(setting: LoaderSetup) -> None:
    numbers = [write_version(setting.repository).number]
    for _ in range(4):
        numbers.append(write_version(setting.repository, numbers[-1]).number)
    setting.repository.offer(numbers[0])
    setting.poll()
    assert setting.server.versions() == numbers
    setting.repository.offer(numbers[3])
    assert setting.poll() == [("retire", numbers[0]), ("retire", numbers[1])]


def test_a_damaged_version_is_named_and_retried(
    setting: LoaderSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(loader.time, "monotonic", lambda: now[0])
    base = write_version(setting.repository).number
    setting.poll()
    bad = write_version(setting.repository, base)
    path = Path(setting.repository.location) / bad.name / bad.parts[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"?")
    assert setting.poll() == []
    assert (
        caplog.messages[-1]
        == f"version {bad.number} cannot be loaded: {path}: sha-256 differs from the manifest, the file is damaged"
    )
    status = setting.loader.status()
    assert (
        status["versions"] == [base]
        and status["failed"]["version"] == bad.number
        and "sha-256" in status["failed"]["why"]
    )
    told = len(caplog.messages)
    path.write_bytes(content)
    assert setting.poll() == [], "not at once"
    now[0] += 1.1
    assert setting.poll() == [("delta", bad.number)]
    assert setting.loader.status()["failed"] is None and len(caplog.messages) == told + 1


def test_an_unreadable_repository_is_logged_once(
    setting: LoaderSetup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_version(setting.repository)
    setting.poll()

    def fail() -> None:
        raise ModelError("models/small/CURRENT: the file is damaged")

    monkeypatch.setattr(setting.repository, "state", fail)
    setting.poll()
    setting.poll()
    assert (
        caplog.messages[-1] == "models/small/CURRENT: the file is damaged"
        and caplog.messages.count(caplog.messages[-1]) == 1
    )
    assert setting.loader.status()["problem"] and setting.server.versions() == [1]


def test_target_of() -> None:
    assert target_of(None, []) is None
    assert target_of(None, [1, 2]) == 2
    assert target_of(Current(1, 5), [1, 2]) == 2
    assert target_of(Current(1, 5, is_held=True), [1, 2]) == 1
    assert target_of(Current(2, 5, is_held=True, wanted=1), [1, 2, 3]) == 1
