"""Classes out of the user's own files: loaded by path, and what goes wrong in them told with file and line."""

import hashlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from elasticrec.errors import ElasticRecError, ModelError


def load_class(place: str, source: bytes | None = None) -> type[Any]:
    """The class that `path/to/file.py:Name` stands for; the file is run anew each time.

    `source` is what the file says, where the caller has read it before and wants no later version.
    """
    file, _, name = place.rpartition(":")
    path = Path(file)
    if source is None:
        source = path.read_bytes()
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    module = ModuleType(f"elasticrec_user_{path.stem}_{digest}")
    module.__file__ = file
    # dataclasses and pickle look a class up by the name of its module
    sys.modules[module.__name__] = module
    with naming_line(path):
        # from these bytes: a loader might take an older version of the file from its cache
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        has = f"it has {', '.join(f'`{key}`' for key in classes)}" if classes else "it has none"
        raise ModelError(f"{path}: expected a class `{name}`, {has}")
    return found


@contextmanager
def naming_line(path: Path) -> Iterator[None]:
    """Whatever the user's code raises becomes one line: `file:line: kind: message`."""
    try:
        yield
    except ElasticRecError:
        raise
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(line_of(error, path)) from error


def line_of(error: BaseException, path: Path) -> str:
    """An error of the user's code as `file:line: kind: message`."""
    first = (str(error).strip().splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{_place(error, path)}: {what}"


def _place(error: BaseException, path: Path) -> str:
    """The last line of the user's file that the error came through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{frames[-1].lineno}" if frames else str(path)
