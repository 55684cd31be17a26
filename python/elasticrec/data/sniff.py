"""Looks at data files and says what they are: the format, slots, dense columns, the label and its rate."""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from elasticrec.config.fields import show
from elasticrec.config.files import files_of, hour_of, refuse_irregular
from elasticrec.data.encoding import non_utf8_note, refuse_other_text
from elasticrec.data.guess import Column, Feature, Roles, assign
from elasticrec.data.lines import first_lines, some_lines, some_spans, spread
from elasticrec.data.units import is_compressed
from elasticrec.errors import ConfigError, SampleError

Kind = Literal["slots", "paddlerec", "criteo", "csv", "parquet", "json"]

# How much is looked at: of a few files of many, so many lines of each.
_NUM_FILES = 3
NUM_LINES = 6000
_NUM_BYTES = 6 * 2**20
# A line may be bad here and there.
MOST = 0.98

_SLOT_LINE = re.compile(rb"[0-9]+[ \t]+[0-9]+(?:[ \t]+[^\s=:]+=\S*)*(?:[ \t]+[0-9]{1,20}:[^\s:]+)+[ \t]*")
_PADDLEREC_LINE = re.compile(rb"[ \t]*[^\s:]+:[^\s]+(?:[ \t]+[^\s:]+:[^\s]+)+[ \t]*")
# Bytes of no text; some of the others are delimiters.
_CONTROL = re.compile(rb"[\x00\x04-\x08\x0e-\x1a\x7f]")
_FOREIGN = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
    b"ORC": "ORC",
    b"Obj\x01": "Avro",
    b"SEQ": "a Hadoop sequence file",
    b"\x89HDF": "HDF5",
}


@dataclass
class Found:
    """What the data is."""

    kind: Kind
    title: str
    """As a person would say it."""
    files: list[Path]
    patterns: list[str]
    """What stands for the files in a job."""
    num_looked: int
    roles: Roles
    is_whole: bool = False
    """Every sample was looked at."""
    num_samples: int | None = None
    """About how many there are in all files; None if that cannot be told."""
    labels: list[str] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    """CSV and Parquet: `names`, `header`, `delimiter`, `null`."""
    paths: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """JSON: by the name of a feature its path in the object, and what stands between several values in one text."""
    notes: list[str] = field(default_factory=list)
    """What the user should know before training on it."""
    eval: dict[str, Any] = field(default_factory=lambda: {"ratio": 0.1})
    eval_note: str = "a share of all samples, chosen by their hash"

    def data(self) -> dict[str, Any]:
        """The `data` section of a job, but for its files; of JSON without its reader."""
        if self.kind == "criteo":
            return {"format": "criteo"}
        roles = self.roles
        slots = [slot.item() for slot in roles.slots]
        dense = [column.item() for column in roles.dense]
        if self.kind not in ("csv", "parquet"):
            data: dict[str, Any] = {"format": "reader" if self.kind == "json" else self.kind, "slots": slots}
            if self.labels != ["click"]:
                data["labels"] = self.labels
            return data | ({"dense": dense} if dense else {})
        columns: dict[str, Any] = {"labels": self.labels, "sparse": slots}
        optional = {"dense": dense, "weight": roles.weight, "time": roles.time, **self.columns}
        columns |= {key: value for key, value in optional.items() if value not in (None, [])}
        return {"format": self.kind, "columns": columns}


def sniff(sources: Sequence[str], label: str | None = None) -> Found:
    """What the files of paths, globs and directories are."""
    files, patterns = _files(sources)
    looked = spread(files, _NUM_FILES)
    kinds = {path: kind_of(path) for path in looked}
    first = kinds[looked[0]]
    for path, kind in kinds.items():
        if kind != first:
            raise SampleError(f"{path}: expected {first} as in {looked[0]}, got {kind}; give files of one format")
    found = _describe(first, looked, label)
    found.files, found.patterns = files, patterns
    found.num_samples = _num_samples(found, looked)
    _choose_eval(found)
    return found


def _files(sources: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The data files, and patterns that match them and nothing else."""
    files: list[Path] = []
    patterns: list[str] = []
    for source in sources:
        here = [Path(path) for path in sorted(files_of(source))]
        if not here:
            is_there = os.path.lexists(source)
            raise ConfigError(f"{source}: " + ("expected data files, got none" if is_there else "no such file"))
        for path in here:
            refuse_irregular(path)
            if not path.is_file():
                path.open("rb").close()
        kept = [path for path in here if path.stat().st_size > 0]
        if not kept:
            raise SampleError(f"{here[0]}: is empty, expected samples")
        kept, more = _without_strangers(source, kept)
        files += kept
        patterns += more
    return files, patterns


def _without_strangers(source: str, files: list[Path]) -> tuple[list[Path], list[str]]:
    """In a directory other files may stand beside the data, such as a job or a description; leave those out."""
    root = Path(source)
    by_suffix: dict[str, list[Path]] = {}
    for path in files:
        by_suffix.setdefault("".join(path.suffixes[-2:]) if path.suffix in (".gz", ".zst") else path.suffix, []).append(
            path
        )
    if not root.is_dir() or len(by_suffix) == 1:
        return files, [source]
    main = max(by_suffix, key=lambda suffix: sum(path.stat().st_size for path in by_suffix[suffix]))
    kind = kind_of(by_suffix[main][0])
    kept = {path for group in by_suffix.values() if _may_be(group[0], kind) for path in group}
    if len(kept) == len(files):
        return files, [source]
    patterns: dict[str, None] = {}
    for path in (path for path in files if path in kept):
        top = root / path.relative_to(root).parts[0]
        whole = top.is_dir() and all(other in kept for other in files if top in other.parents)
        patterns[str(top if whole else path)] = None
    return [path for path in files if path in kept], list(patterns)


def _may_be(path: Path, kind: Kind) -> bool:
    try:
        return kind_of(path) == kind
    except SampleError:
        return False


def kind_of(path: Path) -> Kind:
    """The format of a file, by its content."""
    with path.open("rb") as file:
        start = file.read(1 << 16)
    if start.startswith(b"PAR1"):
        return "parquet"
    for magic, name in _FOREIGN.items():
        if start.startswith(magic):
            raise SampleError(f"{path}: expected text, gzip, zstd or Parquet, got {name}")
    lines = _lines(path, 200)
    if not lines:
        raise SampleError(f"{path}: expected samples, got only blank lines")
    refuse_other_text(path, lines)
    if b"\0" in b"".join(lines[:20]) or _CONTROL.search(b"".join(lines[:20])):
        raise SampleError(f"{path}: expected text, gzip, zstd or Parquet, got binary data `{start[:8].hex(' ')}`")
    if _share(lines, lambda line: _SLOT_LINE.fullmatch(line) is not None):
        return "slots"
    if _share(lines, lambda line: line.lstrip().startswith(b"{") and line.rstrip().endswith(b"}")):
        return "json"
    if _share(lines, _is_criteo):
        return "criteo"
    if _share(lines, lambda line: _PADDLEREC_LINE.fullmatch(line) is not None):
        return "paddlerec"
    if lines[0].lstrip()[:1] not in (b"<", b"[", b"{"):
        from elasticrec.data.sniff_csv import is_table, refuse_open_quotes

        if is_table(texts_of(lines)):
            return "csv"
        refuse_open_quotes(path, texts_of(first_lines(path, 200)))
    shown = show(lines[0].decode("utf-8", "replace"), 100)
    raise SampleError(
        f"{path}: none of slot text, PaddleRec text, Criteo, CSV, JSON lines and Parquet: the first line is {shown}; "
        "write a reader for it: `data.reader: reader.py:MyReader`, see docs/guide/data.md"
    )


def _lines(path: Path, count: int) -> list[bytes]:
    try:
        return some_lines(path, count, _NUM_BYTES)
    except OSError as error:
        if "is longer than" in str(error):
            raise SampleError(f"{path}: expected text with line ends, got none for 16 MiB") from None
        raise


def texts_of(lines: Sequence[bytes]) -> list[str]:
    """Lines as text, whatever bytes they have."""
    return [line.decode("utf-8", "replace") for line in lines]


def _share(lines: Sequence[bytes], test: Any) -> bool:
    return sum(bool(test(line)) for line in lines) >= MOST * len(lines)


def _is_criteo(line: bytes) -> bool:
    fields = line.split(b"\t")
    return (
        len(fields) == 40
        and fields[0] in (b"0", b"1")
        and all(re.fullmatch(rb"-?[0-9]*(?:\.[0-9]+)?", field) for field in fields[1:14])
    )


def _describe(kind: Kind, files: list[Path], label: str | None) -> Found:
    if kind == "parquet":
        from elasticrec.data.sniff_table import describe_parquet

        return describe_parquet(files, label)
    quota = -(-NUM_LINES // len(files))
    lines = [_lines(path, quota) for path in files]
    found = _describe_lines(kind, lines, str(files[0]), label)
    found.notes += non_utf8_note([line for part in lines for line in part])
    is_cut = any(len(part) >= quota or some_spans(path, _NUM_BYTES) for path, part in zip(files, lines, strict=True))
    found.is_whole = not is_cut
    return found


def _describe_lines(kind: Kind, lines: list[list[bytes]], where: str, label: str | None) -> Found:
    everything = [line for part in lines for line in part]
    if kind == "json":
        from elasticrec.data.sniff_table import describe_json

        return describe_json(everything, where, label)
    if kind == "csv":
        from elasticrec.data.sniff_csv import describe_csv

        return describe_csv([texts_of(part) for part in lines], where, label)
    if kind == "slots":
        return _describe_slots(texts_of(everything))
    if kind == "paddlerec":
        return _describe_paddlerec(texts_of(everything), where, label)
    clicks = sum(line.startswith(b"1") for line in everything)
    roles = Roles("click", clicks / len(everything))
    roles.slots = [Feature(f"C{i}") for i in range(1, 27)]
    roles.dense = [Feature(f"I{i}") for i in range(1, 14)]
    return Found("criteo", "Criteo rows", [], [], len(everything), roles, labels=["click"])


def _describe_slots(lines: list[str]) -> Found:
    slots: Counter[str] = Counter()
    named: Counter[str] = Counter()
    shows = clicks = num_good = 0
    for line in lines:
        if not _SLOT_LINE.fullmatch(line.encode()):
            continue
        show_count, click_count, *fields = line.split()
        shows, clicks, num_good = shows + int(show_count), clicks + int(click_count), num_good + 1
        slots.update({field.rpartition(":")[2] for field in fields if ":" in field})
        named.update({field.partition("=")[0] for field in fields if ":" not in field})
    roles = Roles("click", clicks / max(shows, 1))
    numbers = sorted((name for name in slots if name.isdecimal() and str(int(name)) == name), key=int)
    roles.slots = [Feature(name) for name in [*numbers, *sorted(slots.keys() - set(numbers))]]
    labels = ["click", *(name for name, count in named.items() if count == num_good)]
    for name in named.keys() - set(labels):
        roles.left_out.append((name, "a label that some samples do not have"))
    return Found("slots", "slot text `show click sign:slot …`", [], [], num_good, roles, labels=labels)


def _describe_paddlerec(lines: list[str], where: str, label: str | None) -> Found:
    values: dict[str, list[str]] = {}
    most: Counter[str] = Counter()
    fewest: dict[str, int] = {}
    rows = [[field.partition(":")[::2] for field in line.split()] for line in lines]
    for row in rows:
        here = Counter(name for name, _ in row)
        most |= here
        for name, value in row:
            values.setdefault(name, []).append(value)
    for name in values:
        fewest[name] = 1 if len(values[name]) == len(rows) and most[name] == 1 else 0
    # once in each line, and never missing
    once = [Column(name, "whole", texts) for name, texts in values.items() if fewest[name]]
    chosen = assign([*once, Column("\0", "text", ["a", "b", "c"])], where, label)
    roles = Roles(chosen.label, chosen.label_rate)
    for name, texts in values.items():
        if name == roles.label:
            continue
        is_real = all(re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?", text) for text in texts)
        if is_real and ("dense" in name or any("." in text or "e" in text.lower() for text in texts)):
            if "." in name:
                roles.left_out.append((name, "a number whose name has a point in it"))
            else:
                roles.dense.append(Feature(name, count=most[name] if most[name] > 1 else None))
        else:
            roles.slots.append(Feature(name))
    title = "PaddleRec text `click:0 … slot:value`"
    return Found("paddlerec", title, [], [], len(rows), roles, labels=[roles.label])


def _num_samples(found: Found, looked: list[Path]) -> int | None:
    if found.kind == "parquet":
        from elasticrec.data.sniff_table import num_rows

        return num_rows(found.files)
    if found.is_whole and len(looked) == len(found.files):
        return found.num_looked
    if any(map(is_compressed, looked)):
        return None
    lines = [line for path in looked for line in _lines(path, 1000)]
    size = sum(path.stat().st_size for path in found.files)
    return round(size / max(1.0, sum(len(line) + 1 for line in lines) / len(lines)))


def _choose_eval(found: Found) -> None:
    """Evaluation on the last part of the time where the data says when samples were logged."""
    hours = [hour_of(path) for path in found.files]
    distinct = sorted({hour for hour in hours if hour is not None})
    if None not in hours and len(distinct) > 1:
        start = distinct[-max(1, len(distinct) // 10)]
        found.eval = {"time": _time_text(start)}
        found.eval_note = "the files of the last hours; their directories say when they were logged"
        if found.roles.time is not None:
            found.roles.left_out.append((found.roles.time, "the time, which the directories say too"))
            found.roles.time = None
        return
    # of compressed files only the start was looked at, which says little about the end of the time
    if found.kind not in ("csv", "parquet") or found.roles.time is None:
        return
    if found.kind == "csv" and any(is_compressed(path) for path in found.files) and not found.is_whole:
        found.eval_note += "; or by time, such as `{time: 2026-01-31T18:00}`"
        return
    times = sorted(found.roles.times)
    start = times[len(times) * 9 // 10]
    for step in (86400, 3600, 60, 1):
        rounded = start // step * step
        if sum(time >= rounded for time in times) <= 0.2 * len(times) and rounded > times[0]:
            found.eval = {"time": _time_text(rounded)}
            found.eval_note = "samples from this time on, about the last tenth"
            return


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M" + (":%S" if seconds % 60 else ""))
