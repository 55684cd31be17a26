"""Detection of data files: their format by content, a description of their samples, and the evaluation data."""

import os
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from elasticrec.config.fields import show
from elasticrec.config.files import files_of, hour_of, refuse_irregular
from elasticrec.data.init import detect_csv, detect_text, detect_typed
from elasticrec.data.init.detection import MIN_GOOD, NUM_LINES, Detection, Kind
from elasticrec.data.init.encoding import non_utf8_note, refuse_other_text
from elasticrec.data.raw_lines import first_lines, some_lines, some_spans, spread, suffix_of
from elasticrec.data.units import is_compressed
from elasticrec.errors import ConfigError, SampleError

_NUM_FILES = 3
_NUM_BYTES = 6 * 2**20

# Control characters that are not delimiters: text does not contain them.
_CONTROL = re.compile(rb"[\x00\x04-\x08\x0e-\x1a\x7f]")
_UNSUPPORTED = {
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
    b"ORC": "ORC",
    b"Obj\x01": "Avro",
    b"SEQ": "a Hadoop sequence file",
    b"\x89HDF": "HDF5",
}


def detect(sources: Sequence[str], label: str | None = None) -> Detection:
    """Describe the data files of paths, globs and directories; `label` names the label column."""
    files, patterns = _data_files(sources)
    inspected = spread(files, _NUM_FILES)
    kinds = {path: kind_of(path) for path in inspected}
    first = kinds[inspected[0]]
    for path, kind in kinds.items():
        if kind != first:
            raise SampleError(f"{path}: expected {first} as in {inspected[0]}, got {kind}; give files of one format")
    detection = _describe(first, inspected, label)
    detection.files, detection.patterns = files, patterns
    detection.num_samples = _estimate_samples(detection, inspected)
    _choose_eval(detection)
    return detection


def _data_files(sources: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return the data files, and patterns that match exactly these files."""
    files: list[Path] = []
    patterns: list[str] = []
    for source in sources:
        paths = [Path(path) for path in sorted(files_of(source))]
        if not paths:
            exists = os.path.lexists(source)
            raise ConfigError(f"{source}: " + ("expected data files, got none" if exists else "no such file"))
        for path in paths:
            refuse_irregular(path)
            if not path.is_file():
                # Raises the error of the system: the path is missing or a directory.
                path.open("rb").close()
        filled = [path for path in paths if path.stat().st_size > 0]
        if not filled:
            raise SampleError(f"{paths[0]}: is empty, expected samples")
        own_files, own_patterns = _without_other_files(source, filled)
        files += own_files
        patterns += own_patterns
    return files, patterns


def _without_other_files(source: str, files: list[Path]) -> tuple[list[Path], list[str]]:
    """Leave out files of other formats in a data directory, such as a job or a description."""
    root = Path(source)
    by_suffix: dict[str, list[Path]] = {}
    for path in files:
        by_suffix.setdefault(suffix_of(path), []).append(path)
    if not root.is_dir() or len(by_suffix) == 1:
        return files, [source]
    main = max(by_suffix, key=lambda suffix: sum(path.stat().st_size for path in by_suffix[suffix]))
    kind = kind_of(by_suffix[main][0])
    kept = {path for group in by_suffix.values() if _has_kind(group[0], kind) for path in group}
    if len(kept) == len(files):
        return files, [source]
    patterns: dict[str, None] = {}
    for path in (path for path in files if path in kept):
        top = root / path.relative_to(root).parts[0]
        is_complete = top.is_dir() and all(other in kept for other in files if top in other.parents)
        patterns[str(top if is_complete else path)] = None
    return [path for path in files if path in kept], list(patterns)


def _has_kind(path: Path, kind: Kind) -> bool:
    try:
        return kind_of(path) == kind
    except SampleError:
        return False


def kind_of(path: Path) -> Kind:
    """Return the format of a file, by its content."""
    with path.open("rb") as file:
        start = file.read(1 << 16)
    if start.startswith(b"PAR1"):
        return "parquet"
    for magic, name in _UNSUPPORTED.items():
        if start.startswith(magic):
            raise SampleError(f"{path}: expected text, gzip, zstd or Parquet, got {name}")
    lines = _lines(path, 200)
    if not lines:
        raise SampleError(f"{path}: expected samples, got only blank lines")
    refuse_other_text(path, lines)
    if _CONTROL.search(b"".join(lines[:20])):
        raise SampleError(f"{path}: expected text, gzip, zstd or Parquet, got binary data `{start[:8].hex(' ')}`")
    if _matches_most(lines, detect_text.is_slot_text):
        return "slots"
    if _matches_most(lines, lambda line: line.lstrip().startswith(b"{") and line.rstrip().endswith(b"}")):
        return "json"
    if _matches_most(lines, detect_text.is_criteo):
        return "criteo"
    if _matches_most(lines, detect_text.is_paddlerec):
        return "paddlerec"
    if lines[0].lstrip()[:1] not in (b"<", b"[", b"{"):
        if detect_csv.is_csv(_texts(lines)):
            return "csv"
        detect_csv.refuse_open_quotes(path, _texts(first_lines(path, 200)))
    shown = show(lines[0].decode("utf-8", "replace"), 100)
    raise SampleError(
        f"{path}: expected slot text, PaddleRec text, Criteo rows, CSV, JSON lines or Parquet, got the first line "
        f"{shown}; write a reader for it: `data.reader: reader.py:MyReader`, see docs/guide/data.md"
    )


def _lines(path: Path, count: int) -> list[bytes]:
    try:
        return some_lines(path, count, _NUM_BYTES)
    except OSError as error:
        if "is longer than" in str(error):
            raise SampleError(f"{path}: expected text with line ends, got none for 16 MiB") from None
        raise


def _texts(lines: Sequence[bytes]) -> list[str]:
    """Decode lines; bytes that are not UTF-8 become replacement characters."""
    return [line.decode("utf-8", "replace") for line in lines]


def _matches_most(lines: Sequence[bytes], test: Callable[[bytes], bool]) -> bool:
    return sum(test(line) for line in lines) >= MIN_GOOD * len(lines)


def _describe(kind: Kind, files: list[Path], label: str | None) -> Detection:
    if kind == "parquet":
        return detect_typed.describe_parquet(files, label)
    quota = -(-NUM_LINES // len(files))
    lines = [_lines(path, quota) for path in files]
    detection = _describe_lines(kind, lines, str(files[0]), label)
    detection.notes += non_utf8_note([line for part in lines for line in part])
    has_more = any(len(part) >= quota or some_spans(path, _NUM_BYTES) for path, part in zip(files, lines, strict=True))
    detection.is_complete = not has_more
    return detection


def _describe_lines(kind: Kind, lines: list[list[bytes]], where: str, label: str | None) -> Detection:
    everything = [line for part in lines for line in part]
    if kind == "json":
        return detect_typed.describe_json(everything, where, label)
    if kind == "csv":
        return detect_csv.describe_csv([_texts(part) for part in lines], where, label)
    if kind == "slots":
        return detect_text.describe_slots(_texts(everything))
    if kind == "paddlerec":
        return detect_text.describe_paddlerec(_texts(everything), where, label)
    return detect_text.describe_criteo(everything)


def _estimate_samples(detection: Detection, inspected: list[Path]) -> int | None:
    if detection.kind == "parquet":
        return detect_typed.num_rows(detection.files)
    if detection.is_complete and len(inspected) == len(detection.files):
        return detection.num_inspected
    if any(map(is_compressed, inspected)):
        return None
    lines = [line for path in inspected for line in _lines(path, 1000)]
    size = sum(path.stat().st_size for path in detection.files)
    return round(size / max(1.0, sum(len(line) + 1 for line in lines) / len(lines)))


def _choose_eval(detection: Detection) -> None:
    """Hold out the newest samples for evaluation if directories or a column give the time of samples."""
    roles = detection.roles
    hours = [hour_of(path) for path in detection.files]
    distinct = sorted({hour for hour in hours if hour is not None})
    if None not in hours and len(distinct) > 1:
        start = distinct[-max(1, len(distinct) // 10)]
        detection.eval = {"time": _time_text(start)}
        detection.eval_note = "the files of the last hours, by the names of their directories"
        if roles.time is not None:
            roles.left_out.append((roles.time, "the time, which the directories give too"))
            roles.time = None
        return
    if detection.kind not in ("csv", "parquet") or roles.time is None:
        return
    # Only the start of a compressed file was inspected, so the time of its newest samples is unknown.
    is_start = detection.kind == "csv" and any(is_compressed(path) for path in detection.files)
    if is_start and not detection.is_complete:
        detection.eval_note += "; or by time, such as `{time: 2026-01-31T18:00}`"
        return
    times = sorted(roles.times)
    start = times[len(times) * 9 // 10]
    for step in (86400, 3600, 60, 1):
        rounded = start // step * step
        if sum(time >= rounded for time in times) <= 0.2 * len(times) and rounded > times[0]:
            detection.eval = {"time": _time_text(rounded)}
            detection.eval_note = "samples from this time on, about the last tenth"
            return


def _time_text(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M" + (":%S" if seconds % 60 else ""))
