"""Units: every record is read once, and a batch name always has the same samples."""

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elasticrec import _core
from elasticrec.data.units import Unit, UnitSplit, check_unchanged, plan_units, read_units, write_units
from elasticrec.errors import ModelError, SampleError

FEATURES = {
    "format": "slots",
    "hash": 1,
    "slots": [{"name": "0", "pooling": "sum"}],
    "dense": [],
    "labels": ["click"],
}
PARSER = _core.Parser(json.dumps(FEATURES))


def split(unit_bytes: int, *, shuffle: bool = True, seed: int = 5) -> UnitSplit:
    return UnitSplit(unit_bytes=unit_bytes, shuffle=shuffle, seed=seed, digest="d1935")


def read(
    units: list[Unit], *, batch_size: int = 3, shuffle: bool = True, workers: int = 1, skip_batches: int = 0
) -> dict[tuple[int, int], list[int]]:
    """Return signs by batch name, in reading order."""
    reader = _core.BatchReader(
        PARSER,
        [unit.core() for unit in units],
        _core.BatchOptions(
            batch_size=batch_size, shuffle=shuffle, seed=5, skip_batches=skip_batches, piece_bytes=1 << 20, select=None
        ),
        labels=True,
        workers=workers,
    )
    batches = {}
    for batch in reader:
        assert batch.num_bad == 0, batch.bad
        assert batch.num_samples == batch.num_records <= batch_size
        assert (batch.unit, batch.index) not in batches
        batches[batch.unit, batch.index] = batch.signs.tolist()
    reader.close()
    return batches


def write_signs(path: Path, count: int, *, first: int = 0) -> Path:
    path.write_text("".join(f"1 0 {first + sign}:0\n" for sign in range(count)))
    return path


Ends = st.sampled_from(["\n", "\r\n", "\n\n", "\r\n\r\n", "\n \t\n"])


@pytest.mark.parametrize("shuffle", [False, True])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    widths=st.lists(st.tuples(st.integers(0, 40), Ends), max_size=40),
    unit_bytes=st.integers(1, 200),
    ends_with_newline=st.booleans(),
)
@example(widths=[(0, "\r\n")] * 9, unit_bytes=9, ends_with_newline=False)
@example(widths=[], unit_bytes=1, ends_with_newline=True)
def test_every_record_is_read_once(
    tmp_path: Path, widths: list[tuple[int, str]], unit_bytes: int, ends_with_newline: bool, shuffle: bool
) -> None:
    text = ""
    for sign, (spaces, end) in enumerate(widths):
        text += f"1 0 {' ' * spaces}{sign}:0"
        text += end if ends_with_newline or sign + 1 < len(widths) else ""
    path = tmp_path / "part.txt"
    path.write_bytes(text.encode())
    units = plan_units([path], split(unit_bytes, shuffle=shuffle), epoch=0, first_id=0)
    signs = [sign for batch in read(units, shuffle=shuffle).values() for sign in batch]
    assert Counter(signs) == Counter(range(len(widths)))
    if not shuffle:
        assert signs == sorted(signs)


def test_units_cover_every_byte_of_every_file_once(tmp_path: Path) -> None:
    files = [write_signs(tmp_path / f"{count}.txt", count) for count in (0, 1, 7, 500)]
    units = plan_units(files, split(100), epoch=0, first_id=40)
    assert [unit.id for unit in units] == list(range(40, 40 + len(units)))
    for path in files:
        own = sorted((unit for unit in units if unit.path == str(path)), key=lambda unit: unit.start)
        size = path.stat().st_size
        assert {unit.size for unit in own} <= {size}
        assert {unit.modified_ns for unit in own} <= {path.stat().st_mtime_ns}
        assert [0, *[unit.end for unit in own]] == [*[unit.start for unit in own], size]
        assert all(unit.end - unit.start <= 100 for unit in own)


def test_a_batch_name_always_has_the_same_samples(tmp_path: Path) -> None:
    path = write_signs(tmp_path / "part.txt", 500)
    units = plan_units([path], split(300), epoch=2, first_id=10)
    batches = read(units)
    for workers in (1, 3):
        again = read(plan_units([path], split(300), epoch=2, first_id=10), workers=workers)
        assert list(again.items()) == list(batches.items())
    # Each unit alone, in another order, and from the middle of a unit.
    for unit in reversed(units):
        alone = {name: signs for name, signs in batches.items() if name[0] == unit.id}
        assert read([unit]) == alone
        assert list(read([unit], skip_batches=2).items()) == list(alone.items())[2:]


def test_epochs_and_seeds_have_their_own_order(tmp_path: Path) -> None:
    files = [write_signs(tmp_path / f"{at}.txt", 100, first=100 * at) for at in range(4)]

    def order(epoch: int, seed: int = 5, *, shuffle: bool = True) -> list[tuple[str, int]]:
        return [(unit.path, unit.start) for unit in plan_units(files, split(100, seed=seed, shuffle=shuffle), epoch, 0)]

    assert order(0) == order(0)
    assert len({tuple(order(epoch, seed)) for epoch in range(3) for seed in range(3)}) == 9
    assert order(1, shuffle=False) == sorted(order(0))
    signs = [
        [sign for batch in read(plan_units(files, split(10**6), epoch, 0)).values() for sign in batch]
        for epoch in range(2)
    ]
    assert signs[0] != signs[1]
    assert sorted(signs[0]) == sorted(signs[1]) == list(range(400))


def test_written_units_are_read_back(tmp_path: Path) -> None:
    units = plan_units([write_signs(tmp_path / "tag-\u00e4.txt", 100)], split(100), epoch=3, first_id=7)
    path = tmp_path / "units" / "epoch-00003.jsonl"
    write_units(path, units)
    assert read_units(path) == units
    assert {unit.split_digest for unit in units} == {"d1935"}
    keys = ["id", "path", "size", "modified_ns", "start", "end", "epoch", "cut", "day"]
    assert list(json.loads(path.read_bytes().splitlines()[0])) == keys
    write_units(path, units[:1])
    assert read_units(path) == units[:1]
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_paths_do_not_depend_on_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_signs(Path("part.txt"), 10)
    (unit,) = plan_units([Path("part.txt")], split(10**6), epoch=0, first_id=0)
    assert unit.path == str(tmp_path / "part.txt")


def test_an_error_names_the_changed_file(tmp_path: Path) -> None:
    path = write_signs(tmp_path / "part.txt", 100)
    units = plan_units([path], split(100), epoch=0, first_id=0)
    check_unchanged(units)
    stat = path.stat()
    for change in ("longer", "touched"):
        if change == "longer":
            write_signs(path, 101)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        else:
            write_signs(path, 100)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        with pytest.raises(SampleError) as caught:
            check_unchanged(units)
        assert str(caught.value).startswith(f"{path}: changed since its units were recorded: expected ")
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        check_unchanged(units)


def test_a_file_truncated_after_planning_is_refused(tmp_path: Path) -> None:
    path = write_signs(tmp_path / "part.txt", 100)
    units = plan_units([path], split(100, shuffle=False), epoch=0, first_id=0)
    os.truncate(path, 500)
    with pytest.raises(SampleError, match=r"part.txt: changed since its units"):
        read(units)


def test_a_missing_file_is_an_os_error_with_its_name(tmp_path: Path) -> None:
    (unit,) = plan_units([write_signs(tmp_path / "part.txt", 1)], split(100), epoch=0, first_id=0)
    with pytest.raises(FileNotFoundError) as caught:
        read([dataclasses.replace(unit, path=str(tmp_path / "none.txt"))])
    assert caught.value.filename == str(tmp_path / "none.txt")


def test_damaged_units_are_refused(tmp_path: Path) -> None:
    (tmp_path / "part.txt").write_text("1 0 5:0\n" * 2000)
    unit_split = UnitSplit(unit_bytes=4096, shuffle=True, seed=1, digest="x")
    path = tmp_path / "units" / "epoch-00000.jsonl"
    write_units(path, plan_units([tmp_path / "part.txt"], unit_split, 0, 0))
    content = path.read_bytes()
    assert len(read_units(path)) == 4
    for damaged in (
        b"",
        content[: len(content) // 2],
        content.replace(b'"start": 4', b'"start": 5', 1),
        b'{"id": 1}\n',
    ):
        path.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"epoch-00000\.jsonl: the checksum in its last line differs"):
            read_units(path)
