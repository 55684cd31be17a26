"""A first job for data that nobody has described yet: what was found, with every doubt as a comment."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.config import parse_job
from elasticrec.config.columns import NUMBER
from elasticrec.config.document import parse
from elasticrec.data.guess import INFINITE, Feature
from elasticrec.data.header import with_names
from elasticrec.data.look import warnings_of
from elasticrec.data.sniff import Found, sniff
from elasticrec.durable import write_atomically
from elasticrec.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z_./*][\w./*-]*")
_RESERVED = frozenset("y n yes no on off true false null none nan inf".split())

# Below this many samples smaller batches give the model enough steps.
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
# A job: what is trained on what. Every key that is left out has a default: `elasticrec check job.yaml` prints them all.
# `elasticrec init --from FILE` looks at your data and fills this in; the guide is docs/guide/data.md.
name: {name}
data:
  # slots: `show click sign:slot sign:slot …`; or paddlerec, criteo, csv, parquet, or a reader of your own
  format: slots
  # files, directories or patterns, from the directory of this file
  train: [data/train]
  # files like those of `train`, or a part of them: {{ratio: 0.1}} or {{time: 2026-01-31T18:00}}
  eval: {{ratio: 0.1}}
  # names or numbers of the slots to use
  slots: [0-25]
  # csv and parquet: instead of `slots`
  # columns: {{labels: click, sparse: [user, item], dense: [price]}}
{model}  batch_size: 512
"""

_READER = '''\
"""Reads JSON lines, an object a line. `parse` is called in training and for predictions alike."""

import json
import math


def find(row, path):
    """The value at a path such as `user.id`; None if there is none."""
    if path in row:
        return row[path]
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def category(value, separator=None):
    """A value of a slot: text, a whole number or a list of them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if separator is not None and isinstance(value, str):
        return value.split(separator)
    return value


def number(value):
    """A value of a dense column or a label; NaN and infinite numbers are none."""
    return None if value is None or not math.isfinite(float(value)) else float(value)


class JsonReader:
    # by the name in the job: the path in the object, and what stands between several values in one text
    slots = {slots}
    dense = {dense}
    labels = {labels}

    def parse(self, line):
        """Values by name; None passes a line over that is no sample."""
        row = json.loads(line)
        sample = {{name: category(find(row, path), separator) for name, (path, separator) in self.slots.items()}}
        sample |= {{name: number(find(row, path)) for name, path in self.dense.items()}}
        # a request for a prediction has no labels
        return sample | {{name: number(find(row, name)) for name in self.labels}}
'''


@dataclass(frozen=True)
class Written:
    """What `init` wrote, and what it has to say about it."""

    path: Path
    found: Found | None
    warnings: list[str]


def write_job(directory: Path, sources: Sequence[str], *, label: str | None = None, force: bool = False) -> Written:
    """Write `job.yaml`, and `reader.py` where the data needs one, into a directory; nothing is written if it fails."""
    path = directory / "job.yaml"
    found = sniff(sources, label) if sources else None
    files = {path: _blank(directory) if found is None else job_text(found, directory)}
    if found is not None and found.kind == "json":
        files[directory / "reader.py"] = reader_text(found)
    if not force:
        for name in files:
            if name.exists():
                raise ConfigError(f"{name}: is there already (--force replaces it)")
    directory.mkdir(parents=True, exist_ok=True)
    raw = parse(files[path], str(path))
    job = parse_job(raw, base=directory.resolve(), source=str(path))
    for name, text in reversed(files.items()):
        write_atomically(name, text.encode())
    return Written(path, found, [*found.notes, *warnings_of(with_names(job))] if found is not None else [])


def _name_of(directory: Path) -> str:
    name = re.sub(r"[^a-z0-9._-]+", "-", directory.resolve().name.lower()).strip("._-")[:63]
    return name or "job"


def _blank(directory: Path) -> str:
    return _BLANK.format(name=flow(_name_of(directory)), model=_MODEL)


def flow(value: Any) -> str:
    """A value on one line of YAML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str) and not (_PLAIN.fullmatch(value) and value.lower() not in _RESERVED):
        return (
            value if re.fullmatch(r"[0-9]+-[0-9]+", value) else json.dumps(value, ensure_ascii=not value.isprintable())
        )
    return value if isinstance(value, str) else json.dumps(value)


def job_text(found: Found, directory: Path) -> str:
    """The job file for what was found."""
    data = found.data()
    lines = [
        f"# Written by `elasticrec init`: {found.title}; {found.num_looked:,} samples looked at, "
        f"{found.roles.label_rate:.2%} with a click.",
        "# Every key that is left out has a default: `elasticrec check job.yaml` prints them all.",
        *(f"# {_comment(note)}" for note in found.notes),
        f"name: {flow(_name_of(directory))}",
        "data:",
        f"  format: {data['format']}",
    ]
    if found.kind == "json":
        lines += ["  # turns a line into named values; it is yours to change", "  reader: reader.py:JsonReader"]
    lines += [
        "  # files, directories or patterns, from the directory of this file",
        f"  train: {flow([_from(directory, pattern) for pattern in found.patterns])}",
        f"  # {found.eval_note}",
        f"  eval: {flow(found.eval)}",
    ]
    if found.kind in ("csv", "parquet"):
        lines += _column_lines(found, data["columns"])
    elif found.kind != "criteo":
        lines += _slot_lines(found, data)
    small = found.num_samples is not None and found.num_samples < _SMALL
    batch_size = "  # few samples: small batches give the model enough steps\n  batch_size: 64\n" if small else None
    return "\n".join(lines) + "\n" + _MODEL + (batch_size or "  batch_size: 512\n")


def _from(directory: Path, pattern: str) -> str:
    """A path as the job file has it: relative where it is not far away."""
    relative = os.path.relpath(Path(pattern).expanduser().absolute(), directory.absolute())
    return relative if relative.count("..") <= 2 else str(Path(pattern).absolute())


def _column_lines(found: Found, columns: dict[str, Any]) -> list[str]:
    roles = found.roles
    lines = ["  columns:", f"    labels: {flow(columns['labels'])}", "    # categories, each a slot", "    sparse:"]
    lines += [_item(slot, "      ") for slot in roles.slots]
    if roles.dense:
        lines += ["    # numbers; `normalize: log` if not said otherwise", "    dense:"]
        lines += [_item(column, "      ") for column in roles.dense]
    if roles.left_out:
        lines += ["    # columns that are not used:"]
        lines += [f"    #   {_comment(name)}: {reason}" for name, reason in roles.left_out]
    for key in ("weight", "time", "null", "delimiter", "header"):
        if key in columns:
            lines += _column_notes(found, key, columns[key])
            lines.append(f"    {key}: {flow(columns[key])}")
    if "names" in columns:
        lines += [
            "    # the columns in the order of a line; give them names of your own",
            f"    names: {flow(columns['names'])}",
        ]
    return lines


def _column_notes(found: Found, key: str, value: Any) -> list[str]:
    if key == "time" and found.roles.time_note:
        return [f"    # {_comment(found.roles.time_note)}"]
    if key != "null":
        return []
    infinite = [f"`{text}`" for text in INFINITE if text in value]
    more = f"; {' and '.join(infinite)} too: a model cannot learn from infinite numbers" if infinite else ""
    return [f"    # texts that are read as no value{more}"]


def _slot_lines(found: Found, data: dict[str, Any]) -> list[str]:
    roles = found.roles
    lines = []
    if found.labels != ["click"]:
        lines.append(f"  labels: {flow(found.labels)}")
    if found.kind == "slots":
        lines.append(f"  slots: {flow(_ranges([slot.name for slot in roles.slots]))}")
        lines.append("  # equal signs of two slots have one row; with this they have a row each")
        lines.append("  # separate_slots: true")
    elif any(slot.note for slot in roles.slots):
        lines += ["  slots:", *(_item(slot, "    ") for slot in roles.slots)]
    else:
        lines.append(f"  slots: {flow(_ranges([slot.name for slot in roles.slots]))}")
    if roles.dense:
        lines += ["  dense:", *(_item(column, "    ") for column in roles.dense)]
    if found.kind == "paddlerec":
        lines += ["  # a value that only fills a place, if the data has one", "  # padding: 0"]
    if roles.left_out:
        lines += ["  # values that are not used:"]
        lines += [f"  #   {_comment(name)}: {reason}" for name, reason in roles.left_out]
    return lines


def _item(feature: Feature, indent: str) -> str:
    line = f"{indent}- {flow(feature.item())}"
    return f"{line}  # {_comment(feature.note)}" if feature.note else line


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)


def _ranges(names: Sequence[str]) -> list[str]:
    """Numbered slots that follow each other as ranges."""
    shown: list[str] = []
    run: list[int] = []

    def close() -> None:
        shown.extend([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))
        run.clear()

    for name in names:
        if NUMBER.fullmatch(name):
            if run and int(name) != run[-1] + 1:
                close()
            run.append(int(name))
        else:
            close()
            shown.append(name)
    close()
    return shown


def reader_text(found: Found) -> str:
    """A reader for JSON lines, whole: it runs as it is."""
    roles = found.roles
    slots = {slot.name: found.paths[slot.name] for slot in roles.slots}
    dense = {column.name: found.paths[column.name][0] for column in roles.dense}
    labels = [*found.labels, *(["weight"] if roles.weight else [])]
    return _READER.format(slots=_literal(slots), dense=_literal(dense), labels=repr(labels))


def _literal(items: dict[str, Any]) -> str:
    lines = "".join(f"        {name!r}: {value!r},\n" for name, value in items.items())
    return "{\n" + lines + "    }" if lines else "{}"


def summary_lines(written: Written) -> list[str]:
    """What was found and what comes next, for people."""
    found = written.found
    command_path = shlex.quote(str(written.path))
    if found is None:
        return [
            f"wrote {written.path}: a job to fill in",
            f"  then: elasticrec check {command_path}",
            "  or let your data fill it in: elasticrec init --from FILE",
        ]
    roles = found.roles
    about = "" if found.num_samples is None else f" of about {found.num_samples:,}"
    lines = [
        f"found {found.title}: {_count(len(found.files), 'file')}, {found.num_looked:,}{about} samples looked at",
        f"  label `{roles.label}`: {roles.label_rate:.2%}",
        f"  {_count(len(roles.slots), 'slot')}: {_some([slot.name for slot in roles.slots])}",
    ]
    if roles.dense:
        lines.append(f"  {_count(len(roles.dense), 'dense column')}: {_some([column.name for column in roles.dense])}")
    if roles.left_out:
        lines.append(f"  not used: {_some([name for name, _ in roles.left_out])} (the job says why)")
    lines.append(f"  for evaluation: {flow(found.eval)}, {found.eval_note}")
    return [
        *lines,
        f"wrote {written.path}{' and reader.py beside it' if found.kind == 'json' else ''}; read its comments, then:",
        f"  elasticrec check {command_path}",
        f"  elasticrec data stats {command_path}",
        f"  elasticrec train {command_path}",
    ]


def _count(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _some(names: Sequence[str], most: int = 12) -> str:
    shown = ", ".join(_ranges(names)[:most])
    more = len(_ranges(names)) - most
    return f"{shown} and {more} more" if more > 0 else shown
