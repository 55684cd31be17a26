"""Detection of the text formats without columns: slot text, PaddleRec text and Criteo rows."""

import re
from collections import Counter

from elasticrec.config.data import CRITEO_DENSE, CRITEO_SLOTS
from elasticrec.data.init.columns import Column
from elasticrec.data.init.detection import Detection
from elasticrec.data.init.roles import Feature, Roles, assign_roles

_SLOT_LINE = re.compile(rb"[0-9]+[ \t]+[0-9]+(?:[ \t]+[^\s=:]+=\S*)*(?:[ \t]+[0-9]{1,20}:[^\s:]+)+[ \t]*")
_PADDLEREC_LINE = re.compile(rb"[ \t]*[^\s:]+:[^\s]+(?:[ \t]+[^\s:]+:[^\s]+)+[ \t]*")
_CRITEO_NUMBER = re.compile(rb"-?[0-9]*(?:\.[0-9]+)?")


def is_slot_text(line: bytes) -> bool:
    """Return whether a line is slot text."""
    return _SLOT_LINE.fullmatch(line) is not None


def is_paddlerec(line: bytes) -> bool:
    """Return whether a line is PaddleRec text."""
    return _PADDLEREC_LINE.fullmatch(line) is not None


def is_criteo(line: bytes) -> bool:
    """Return whether a line is a Criteo row."""
    fields = line.split(b"\t")
    return (
        len(fields) == 40 and fields[0] in (b"0", b"1") and all(_CRITEO_NUMBER.fullmatch(text) for text in fields[1:14])
    )


def describe_criteo(lines: list[bytes]) -> Detection:
    """Describe Criteo rows, whose columns are fixed."""
    clicks = sum(line.startswith(b"1") for line in lines)
    roles = Roles("click", clicks / len(lines))
    roles.slots = [Feature(name) for name in CRITEO_SLOTS]
    roles.dense = [Feature(name) for name in CRITEO_DENSE]
    return Detection("criteo", "Criteo rows", len(lines), roles, ["click"])


def describe_slots(lines: list[str]) -> Detection:
    """Describe slot text: its slots, and labels that every sample has."""
    slots: Counter[str] = Counter()
    more_labels: Counter[str] = Counter()
    shows = clicks = num_good = 0
    for line in lines:
        if not is_slot_text(line.encode()):
            continue
        show, click, *fields = line.split()
        shows, clicks, num_good = shows + int(show), clicks + int(click), num_good + 1
        slots.update({field.rpartition(":")[2] for field in fields if ":" in field})
        more_labels.update({field.partition("=")[0] for field in fields if ":" not in field})
    roles = Roles("click", clicks / max(shows, 1))
    numbers = sorted((name for name in slots if name.isdecimal() and str(int(name)) == name), key=int)
    roles.slots = [Feature(name) for name in [*numbers, *sorted(slots.keys() - set(numbers))]]
    labels = ["click", *(name for name, count in more_labels.items() if count == num_good)]
    for name in more_labels.keys() - set(labels):
        roles.left_out.append((name, "a label that some samples do not have"))
    return Detection("slots", "slot text `show click sign:slot …`", num_good, roles, labels)


def describe_paddlerec(lines: list[str], where: str, label: str | None) -> Detection:
    """Describe PaddleRec text: names that occur once per line may be labels, real numbers are dense values."""
    values: dict[str, list[str]] = {}
    most: Counter[str] = Counter()
    rows = [[field.partition(":")[::2] for field in line.split()] for line in lines]
    for row in rows:
        most |= Counter(name for name, _ in row)
        for name, value in row:
            values.setdefault(name, []).append(value)
    once = [
        Column(name, "whole", texts) for name, texts in values.items() if len(texts) == len(rows) and most[name] == 1
    ]
    # The column named "\0" stands for the slots, so that `assign_roles` finds one.
    chosen = assign_roles([*once, Column("\0", "text", ["a", "b", "c"])], where, label)
    roles = Roles(chosen.label, chosen.label_rate)
    for name, texts in values.items():
        if name == roles.label:
            continue
        is_real = all(re.fullmatch(r"[-+]?[0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?", text) for text in texts)
        if is_real and ("dense" in name or any("." in text or "e" in text.lower() for text in texts)):
            if "." in name:
                roles.left_out.append((name, "a number whose name contains a dot"))
            else:
                roles.dense.append(Feature(name, count=most[name] if most[name] > 1 else None))
        else:
            roles.slots.append(Feature(name))
    return Detection("paddlerec", "PaddleRec text `click:0 … slot:value`", len(rows), roles, [roles.label])
