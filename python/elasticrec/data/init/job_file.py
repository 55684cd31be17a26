"""The job file that `init` writes: the detected data, with comments where the user should check a guess."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.config import parse_job
from elasticrec.config.columns import fold_ranges
from elasticrec.config.document import parse
from elasticrec.data.checks import check_data
from elasticrec.data.header import with_names
from elasticrec.data.init.columns import INFINITE
from elasticrec.data.init.detect import detect
from elasticrec.data.init.detection import Detection
from elasticrec.data.init.reader_file import reader_text
from elasticrec.data.init.roles import Feature
from elasticrec.durable import write_atomically
from elasticrec.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z_./*][\w./*-]*")
_RESERVED = frozenset("y n yes no on off true false null none nan inf".split())

# Below this number of samples, smaller batches give the model enough steps.
_SMALL = 20_000

_MODEL = """\
model:
  kind: wide_deep
  dim: 9
  hidden: [128, 64]
train:
  epochs: 1
"""

_BLANK = """\
# A job: the data, the model and how to train it. `elasticrec check job.yaml` prints it with all defaults.
# `elasticrec init --from FILE` fills it in from your data; the guide is docs/guide/data.md.
name: {name}
data:
  # slots is text `show click sign:slot sign:slot …`; or paddlerec, criteo, csv, parquet, or your own reader
  format: slots
  # files, directories or globs, relative to this file
  train: [data/train]
  # files, or a part of the training data: {{ratio: 0.1}} or {{time: 2026-01-31T18:00}}
  eval: {{ratio: 0.1}}
  # names or numbers of the slots to use
  slots: [0-25]
  # csv and parquet use `columns` instead of `slots`
  # columns: {{labels: click, sparse: [user, item], dense: [price]}}
{model}  batch_size: 512
"""


@dataclass(frozen=True)
class WrittenJob:
    """The job file that `init` wrote."""

    path: Path
    detection: Detection | None
    """None for a job without data."""
    warnings: list[str]


def write_job(directory: Path, sources: Sequence[str], *, label: str | None = None, force: bool = False) -> WrittenJob:
    """Write `job.yaml`, and `reader.py` if the data needs one, to a directory; write nothing on an error."""
    path = directory / "job.yaml"
    detection = detect(sources, label) if sources else None
    files = {path: _blank_job(directory) if detection is None else job_text(detection, directory)}
    if detection is not None and detection.kind == "json":
        files[directory / "reader.py"] = reader_text(detection)
    if not force:
        for name in files:
            if name.exists():
                raise ConfigError(f"{name}: exists already (--force replaces it)")
    directory.mkdir(parents=True, exist_ok=True)
    raw = parse(files[path], str(path))
    job = parse_job(raw, base=directory.resolve(), source=str(path))
    for name, text in reversed(files.items()):
        write_atomically(name, text.encode())
    warnings = [] if detection is None else [*detection.notes, *check_data(with_names(job))]
    return WrittenJob(path, detection, warnings)


def _name_of(directory: Path) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", directory.resolve().name.lower()).strip("._-")[:63]
    return name or "job"


def _blank_job(directory: Path) -> str:
    return _BLANK.format(name=flow_yaml(_name_of(directory)), model=_MODEL)


def flow_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow_yaml, value)) + "]"
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and value.lower() not in _RESERVED):
        return (
            value if re.fullmatch(r"[0-9]+-[0-9]+", value) else json.dumps(value, ensure_ascii=not value.isprintable())
        )
    return value if isinstance(value, str) else json.dumps(value)


def job_text(detection: Detection, directory: Path) -> str:
    """Return the job file for detected data."""
    data = detection.data()
    lines = [
        f"# Written by `elasticrec init`: {detection.title}; {detection.roles.label_rate:.2%} of "
        f"{detection.num_inspected:,} inspected samples have a click.",
        "# `elasticrec check job.yaml` prints the job with all defaults.",
        *(f"# {_comment(note)}" for note in detection.notes),
        f"name: {flow_yaml(_name_of(directory))}",
        "data:",
        f"  format: {data['format']}",
    ]
    if detection.kind == "json":
        lines += ["  # turns a line into named values; adapt it as you need", "  reader: reader.py:JsonReader"]
    lines += [
        "  # files, directories or globs, relative to this file",
        f"  train: {flow_yaml([_relative(directory, pattern) for pattern in detection.patterns])}",
        f"  # {detection.eval_note}",
        f"  eval: {flow_yaml(detection.eval)}",
    ]
    if detection.kind in ("csv", "parquet"):
        lines += _column_lines(detection, data["columns"])
    elif detection.kind != "criteo":
        lines += _slot_lines(detection, data)
    small = detection.num_samples is not None and detection.num_samples < _SMALL
    batch_size = "  # few samples: small batches give the model enough steps\n  batch_size: 64\n" if small else None
    return "\n".join(lines) + "\n" + _MODEL + (batch_size or "  batch_size: 512\n")


def _relative(directory: Path, pattern: str) -> str:
    """Return a path for the job file: relative to its directory, or absolute if more than two levels up."""
    relative = os.path.relpath(Path(pattern).expanduser().absolute(), directory.absolute())
    return relative if relative.count("..") <= 2 else str(Path(pattern).absolute())


def _column_lines(detection: Detection, columns: dict[str, Any]) -> list[str]:
    roles = detection.roles
    lines = [
        "  columns:",
        f"    labels: {flow_yaml(columns['labels'])}",
        "    # categories: each column is a slot",
        "    sparse:",
    ]
    lines += [_item_line(slot, "      ") for slot in roles.slots]
    if roles.dense:
        lines += ["    # numbers; the default is `normalize: log`", "    dense:"]
        lines += [_item_line(column, "      ") for column in roles.dense]
    if roles.left_out:
        lines += ["    # unused columns:"]
        lines += [f"    #   {_comment(name)}: {reason}" for name, reason in roles.left_out]
    for key in ("weight", "time", "null", "delimiter", "header"):
        if key in columns:
            lines += _column_notes(detection, key, columns[key])
            lines.append(f"    {key}: {flow_yaml(columns[key])}")
    if "names" in columns:
        lines += [
            "    # the columns in the order of a line; rename them as you like",
            f"    names: {flow_yaml(columns['names'])}",
        ]
    return lines


def _column_notes(detection: Detection, key: str, value: Any) -> list[str]:
    if key == "time" and detection.roles.time_note:
        return [f"    # {_comment(detection.roles.time_note)}"]
    if key != "null":
        return []
    infinite = [f"`{text}`" for text in INFINITE if text in value]
    more = f"; {' and '.join(infinite)} too, as a model cannot learn from infinite numbers" if infinite else ""
    return [f"    # texts that mean a missing value{more}"]


def _slot_lines(detection: Detection, data: dict[str, Any]) -> list[str]:
    roles = detection.roles
    lines = []
    if detection.labels != ["click"]:
        lines.append(f"  labels: {flow_yaml(detection.labels)}")
    if detection.kind == "slots":
        lines.append(f"  slots: {flow_yaml(fold_ranges([slot.name for slot in roles.slots]))}")
        lines.append("  # equal signs in two slots share a row; uncomment to give each slot its own rows")
        lines.append("  # separate_slots: true")
    elif any(slot.note for slot in roles.slots):
        lines += ["  slots:", *(_item_line(slot, "    ") for slot in roles.slots)]
    else:
        lines.append(f"  slots: {flow_yaml(fold_ranges([slot.name for slot in roles.slots]))}")
    if roles.dense:
        lines += ["  dense:", *(_item_line(column, "    ") for column in roles.dense)]
    if detection.kind == "paddlerec":
        lines += ["  # the value that pads samples without a value, if the data has one", "  # padding: 0"]
    if roles.left_out:
        lines += ["  # unused values:"]
        lines += [f"  #   {_comment(name)}: {reason}" for name, reason in roles.left_out]
    return lines


def _item_line(feature: Feature, indent: str) -> str:
    line = f"{indent}- {flow_yaml(feature.item())}"
    return f"{line}  # {_comment(feature.note)}" if feature.note else line


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def summary_lines(written: WrittenJob) -> list[str]:
    """Return the detected data and the next commands as lines of text."""
    detection = written.detection
    command_path = shlex.quote(str(written.path))
    if detection is None:
        return [
            f"wrote {written.path}: a job to fill in",
            f"  then: elasticrec check {command_path}",
            "  or fill it in from your data: elasticrec init --from FILE",
        ]
    roles = detection.roles
    about = "" if detection.num_samples is None else f" of about {detection.num_samples:,}"
    lines = [
        f"found {detection.title}: {_count_text(len(detection.files), 'file')}, "
        f"{detection.num_inspected:,}{about} samples inspected",
        f"  label `{roles.label}`: {roles.label_rate:.2%}",
        f"  {_count_text(len(roles.slots), 'slot')}: {_shorten_names([slot.name for slot in roles.slots])}",
    ]
    if roles.dense:
        names = _shorten_names([column.name for column in roles.dense])
        lines.append(f"  {_count_text(len(roles.dense), 'dense column')}: {names}")
    if roles.left_out:
        lines.append(f"  not used: {_shorten_names([name for name, _ in roles.left_out])} (the job file says why)")
    lines.append(f"  for evaluation: {flow_yaml(detection.eval)}, {detection.eval_note}")
    return [
        *lines,
        f"wrote {written.path}{' and reader.py' if detection.kind == 'json' else ''}; check its comments, then:",
        f"  elasticrec check {command_path}",
        f"  elasticrec data stats {command_path}",
        f"  elasticrec train {command_path}",
    ]


def _count_text(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _shorten_names(names: Sequence[str], most: int = 12) -> str:
    ranges = fold_ranges(names)
    shown, more = ", ".join(ranges[:most]), len(ranges) - most
    return f"{shown} and {more} more" if more > 0 else shown
