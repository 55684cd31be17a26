"""New files of samples: compressed by name, written completely or not at all, never over a user's files."""

import contextlib
import gzip
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from elasticrec.config.files import files_of
from elasticrec.durable import sync_directory
from elasticrec.errors import ConfigError


def refuse_existing(paths: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to replace existing files unless `overwrite` is set."""
    for path in paths:
        if path.is_dir():
            raise ConfigError(f"{path}: is a directory, expected a file name")
        if path.exists() and not overwrite:
            raise ConfigError(f"{path}: exists already (--overwrite replaces it)")


def refuse_other_files(directory: Path, paths: Iterable[Path]) -> None:
    """Refuse a directory with files other than `paths`: they would be read together with the new ones."""
    own = {path.absolute() for path in paths}
    if directory.exists():
        for path in files_of(str(directory)):
            if Path(path).absolute() not in own:
                raise ConfigError(f"{directory}: expected an empty directory, got {path} in it; remove it first")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that becomes `path` at the end, or is removed after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        # The caller removes the file if there is nothing to write.
        if temporary.exists():
            with temporary.open("rb") as file:
                os.fchmod(file.fileno(), 0o644)
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def open_text(path: Path, named: Path) -> Iterator[IO[bytes]]:
    """Open a text file for writing, compressed as the name `named` implies."""
    with contextlib.ExitStack() as stack:
        if named.suffix == ".zst":
            import pyarrow as pa

            stream: Any = pa.output_stream(str(path), compression="zstd")
        elif named.suffix == ".gz":
            # Without a name and a time in the header, equal samples give equal bytes.
            stream = gzip.GzipFile("", "wb", 6, stack.enter_context(path.open("wb")), mtime=0)
        else:
            stream = path.open("wb")
        yield stack.enter_context(stream)


def relative_names(files: list[Path]) -> list[Path]:
    """Return the files relative to their common directory."""
    parents = [str(path.absolute().parent) for path in files]
    top = Path(os.path.commonpath(parents))
    return [path.absolute().relative_to(top) for path in files]
