"""Load classes from custom files; errors in custom code name file and line."""

import hashlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from elasticrec.errors import ElasticRecError, ModelError


def load_class(location: str, source: bytes | None = None) -> type[Any]:
    """Load the class `path/to/file.py:Name`; the file is executed on every call.

    `source` is the content of the file, if the caller has read it already.
    """
    file, _, name = location.rpartition(":")
    path = Path(file)
    if source is None:
        source = path.read_bytes()
    digest = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    module = ModuleType(f"elasticrec_user_{path.stem}_{digest}")
    module.__file__ = file
    # dataclasses and pickle look up a class by the name of its module.
    sys.modules[module.__name__] = module
    with locate_errors(path):
        # Compile the bytes directly: an import could use a cached older version of the file.
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)
    found = getattr(module, name, None)
    if not isinstance(found, type):
        classes = [key for key, value in vars(module).items() if isinstance(value, type)]
        got = ", ".join(f"`{key}`" for key in classes) or "none"
        raise ModelError(f"{path}: expected a class `{name}`, got {got}")
    return found


@contextmanager
def locate_errors(path: Path) -> Iterator[None]:
    """Convert exceptions of custom code to a `ModelError` with one line: `file:line: type: message`."""
    try:
        yield
    except ElasticRecError:
        raise
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(error_line(error, path)) from error


def error_line(error: BaseException, path: Path) -> str:
    """Format an error of custom code as `file:line: type: message`."""
    first = (str(error).strip().splitlines() or [""])[0]
    what = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return f"{_error_location(error, path)}: {what}"


def _error_location(error: BaseException, path: Path) -> str:
    """Return the last line of the custom file in the traceback."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}:{error.lineno}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{frames[-1].lineno}" if frames else str(path)
