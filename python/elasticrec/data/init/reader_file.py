"""The `reader.py` that `init` writes for JSON lines."""

from typing import Any

from elasticrec.data.init.detection import Detection

_READER = '''\
"""Reads JSON lines, one object per line. `parse` is called in training and for predictions."""

import json
import math


def find(row, path):
    """Return the value at a path such as `user.id`, or None."""
    if path in row:
        return row[path]
    for name in path.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def category(value, separator=None):
    """Return a value of a slot: text, a whole number or a list of these."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if separator is not None and isinstance(value, str):
        return value.split(separator)
    return value


def number(value):
    """Return a value of a dense column or a label; None for NaN and infinite numbers."""
    return None if value is None or not math.isfinite(float(value)) else float(value)


class JsonReader:
    # name in the job: path in the object, separator between several values in one text
    slots = {slots}
    dense = {dense}
    labels = {labels}

    def parse(self, line):
        """Return the values of a line by name; None skips the line."""
        row = json.loads(line)
        sample = {{name: category(find(row, path), separator) for name, (path, separator) in self.slots.items()}}
        sample |= {{name: number(find(row, path)) for name, path in self.dense.items()}}
        # Requests for predictions have no labels.
        return sample | {{name: number(find(row, name)) for name in self.labels}}
'''


def reader_text(detection: Detection) -> str:
    """Return the code of a reader for JSON lines."""
    roles = detection.roles
    slots = {slot.name: detection.paths[slot.name] for slot in roles.slots}
    dense = {column.name: detection.paths[column.name][0] for column in roles.dense}
    labels = [*detection.labels, *(["weight"] if roles.weight else [])]
    return _READER.format(slots=_literal(slots), dense=_literal(dense), labels=repr(labels))


def _literal(items: dict[str, Any]) -> str:
    lines = "".join(f"        {name!r}: {value!r},\n" for name, value in items.items())
    return "{\n" + lines + "    }" if lines else "{}"
