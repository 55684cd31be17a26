"""Files of samples that are written: compressed by their names, whole or absent, never over those of a user."""

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
    """Refuse to write over files that are there, unless that was asked for."""
    for path in paths:
        if path.is_dir():
            raise ConfigError(f"{path}: is a directory, expected a name for a file")
        if path.exists() and not overwrite:
            raise ConfigError(f"{path}: is there already (--overwrite replaces it)")


def refuse_strangers(directory: Path, paths: Iterable[Path]) -> None:
    """Refuse a directory with files that are not replaced: they would be read along with the new ones."""
    own = {path.absolute() for path in paths}
    if directory.exists():
        for path in files_of(str(directory)):
            if Path(path).absolute() not in own:
                raise ConfigError(f"{directory}: expected an empty directory, got {path} in it; remove it first")


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`: what was written there becomes `path` at the end, and goes after an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    temporary = Path(name)
    try:
        yield temporary
        # whoever has nothing to write takes the file away
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
    """A text file to write to, compressed as the name `named` says."""
    with contextlib.ExitStack() as stack:
        if named.suffix == ".zst":
            import pyarrow as pa

            stream: Any = pa.output_stream(str(path), compression="zstd")
        elif named.suffix == ".gz":
            # without a name and a time in it the same samples are the same bytes
            stream = gzip.GzipFile("", "wb", 6, stack.enter_context(path.open("wb")), mtime=0)
        else:
            stream = path.open("wb")
        yield stack.enter_context(stream)


def suffix_of(path: Path) -> str:
    """The ending of a name that says what is in it, such as `.csv.gz`."""
    suffixes = path.suffixes
    return "".join(suffixes[-2:]) if path.suffix in (".gz", ".zst") else path.suffix


def relative_names(files: list[Path]) -> list[Path]:
    """The files as they stand below the directory that has all of them."""
    parents = [str(path.absolute().parent) for path in files]
    top = Path(os.path.commonpath(parents))
    return [path.absolute().relative_to(top) for path in files]
