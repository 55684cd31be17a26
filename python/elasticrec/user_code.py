"""Classes out of the user's own files: loaded by path, and what goes wrong in them told with file and line."""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticrec.errors import ElasticRecError, ModelError


def load_class(place: str) -> type[Any]:
    """The class that `path/to/file.py:Name` stands for; the file is run anew each time."""
    file, _, name = place.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(2, "No such file or directory", file)
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    spec = importlib.util.spec_from_file_location(f"elasticrec_user_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look a class up by the name of its module
    sys.modules[spec.name] = module
    with told_with_line(path):
        spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        has = f"it has {', '.join(f'`{key}`' for key in classes)}" if classes else "it has none"
        raise ModelError(f"{path}: expected a class `{name}`, {has}")
    return found


@contextmanager
def told_with_line(path: Path) -> Iterator[None]:
    """Whatever the user's code raises becomes one line: `file:line: kind: message`."""
    try:
        yield
    except ElasticRecError:
        raise
    except Exception as error:
        raise ModelError(line_of(error, path)) from error


def line_of(error: Exception, path: Path) -> str:
    """An error of the user's code as `file:line: kind: message`."""
    first = (str(error).strip().splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{_place(error, path)}: {what}"


def _place(error: Exception, path: Path) -> str:
    """The last line of the user's file that the error came through."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{frames[-1].lineno}" if frames else str(path)
