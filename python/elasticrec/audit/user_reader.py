"""Lines to samples with a custom reader."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elasticrec.audit.line_formats import PlainLines, Sample
from elasticrec.audit.signs import NOTHING, Features, Item, Items, SlotSigns
from elasticrec.audit.values import BadRecordError, check_share, check_weight, number_of
from elasticrec.config import Job
from elasticrec.user_code import load_class, locate_errors


class UserReader(PlainLines):
    """Lines that the user's reader turns into named values."""

    def __init__(self, features: Features, job: Job) -> None:
        assert job.data.reader is not None
        self._features = features
        self._dense = {column.name: column for column in features.dense}
        reader_class = load_class(job.data.reader, job.reader_source())
        with locate_errors(Path(job.data.reader.rpartition(":")[0])):
            self._reader = reader_class()

    def parse(self, line: bytes) -> Sample | None:
        """Return the sample of a line, or None if the reader skips it."""
        try:
            sample = self._reader.parse(line.decode("utf-8"))
        except Exception:
            raise BadRecordError from None
        if sample is None:
            return None
        if not isinstance(sample, Mapping):
            raise BadRecordError
        return self._sample(sample)

    def _sample(self, sample: Mapping[Any, Any]) -> Sample:
        items: list[Item] = []
        num_labels = click = 0
        for name, value in sample.items():
            if not isinstance(name, str):
                raise BadRecordError
            if value is None:
                continue
            if (slot := self._features.by_name.get(_utf8(name))) is not None:
                items += _items_of(slot, value)
            elif name in self._dense:
                items += self._dense[name].of_number(number_of(value))
            elif name in self._features.labels:
                label = check_share(number_of(value))
                num_labels += 1
                click = int(label >= 0.5) if name == self._features.labels[0] else click
            elif name == "weight":
                check_weight(number_of(value))
        if num_labels != len(self._features.labels):
            raise BadRecordError
        return 1, click, items


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadRecordError from None


def _items_of(slot: SlotSigns, value: Any) -> Items:
    if isinstance(value, list | tuple):
        return tuple(item for one in value if one is not None for item in _items_of_value(slot, one))
    return _items_of_value(slot, value)


def _items_of_value(slot: SlotSigns, value: Any) -> Items:
    if isinstance(value, str):
        return slot.of_text(_utf8(value)) if value else NOTHING
    if isinstance(value, bytes):
        return slot.of_text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return slot.of_value(str(value).encode())
    raise BadRecordError
