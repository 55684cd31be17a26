"""A reader of the user's own: a class in a file of theirs that turns a line into named values."""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from elasticrec import _core
from elasticrec.errors import ConfigError, SampleError

# Bad records that are shown in full; the rest are only counted.
SHOWN_BAD = 5


class Reader(Protocol):
    """What a reader must have. Other methods and any state are the user's own."""

    def parse(self, line: str) -> Mapping[str, Any] | None:
        """Values of slots, dense columns and labels by name; None passes a line over that is no sample."""


def load_class(spec: str, what: str) -> type[Any]:
    """The class that `path/file.py:Class` names; whatever goes wrong in the file is one line with its place."""
    path, _, name = spec.rpartition(":")
    module = _load_module(Path(path), what)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type) and not key.startswith("_")]
        hint = f", it has {', '.join(f'`{key}`' for key in classes)}" if classes else ""
        raise ConfigError(f"{what}: {path}: expected a class `{name}`{hint}")
    return found


def _load_module(path: Path, what: str) -> ModuleType:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{what}: {path}: {error.strerror}") from None
    name = f"_elasticrec_{path.stem}_{hashlib.sha256(source).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # classes that are pickled or have annotations look their module up
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{what}: {place_of(error, path)}: {type(error).__name__}: {error}") from None
    return module


def place_of(error: BaseException, path: Path | str) -> str:
    """`file:line` of the user's own line that an error came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


class LineReader:
    """Makes batches of lines with the user's reader."""

    def __init__(self, spec: str, parser: _core.Parser, *, labels: bool) -> None:
        self._path = spec.rpartition(":")[0]
        made = load_class(spec, "data.reader")
        try:
            self._reader: Reader = made()
        except Exception as error:
            raise ConfigError(
                f"data.reader: {place_of(error, self._path)}: {made.__name__}(): {type(error).__name__}: {error}"
            ) from None
        if not callable(getattr(self._reader, "parse", None)):
            raise ConfigError(f"data.reader: {self._path}: expected a method `parse(self, line)` in `{made.__name__}`")
        self._maker = _core.BatchMaker(parser, labels=labels)
        self._num_shown = 0

    def batch(self, records: _core.RecordBatch) -> _core.Batch:
        """A batch of records; bad ones are counted, the first few described."""
        num_bad = num_records = 0
        bad: list[str] = []
        for index in range(len(records)):
            try:
                num_records += self._add(records[index])
            except SampleError as error:
                num_records += 1
                num_bad += 1
                if self._num_shown < SHOWN_BAD:
                    self._num_shown += 1
                    bad.append(f"{records.place(index)}: {error}")
        return self._maker.finish(
            unit=records.unit,
            index=records.index,
            num_records=num_records,
            bad=bad,
            num_bad=num_bad,
            places=records.places,
        )

    def parse(self, text: bytes) -> _core.Batch:
        """A batch of lines in memory; the first bad one raises `SampleError`."""
        num_records = 0
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    num_records += self._add(line)
                except SampleError as error:
                    self._maker.finish(unit=0, index=0, num_records=0, bad=[], num_bad=0, places="")
                    raise SampleError(f"line {number}: {error}") from None
        return self._maker.finish(unit=0, index=0, num_records=num_records, bad=[], num_bad=0, places="")

    def _add(self, line: bytes) -> bool:
        """Add the sample of a line; false if the reader passes the line over."""
        parse: Callable[[str], Any] = self._reader.parse
        try:
            sample = parse(line.decode("utf-8"))
        except UnicodeDecodeError:
            raise SampleError("expected UTF-8 text") from None
        except Exception as error:
            raise SampleError(f"{place_of(error, self._path)}: {type(error).__name__}: {error}") from None
        if sample is None:
            return False
        if not isinstance(sample, Mapping):
            raise SampleError(f"{self._path}: parse: expected a mapping or None, got {type(sample).__name__}")
        self._maker.add(sample if isinstance(sample, dict) else dict(sample))
        return True
