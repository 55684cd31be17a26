"""Lines of a file to scores: the same lines, wherever the scores come from."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Secret
from elasticrec.errors import ConfigError, SampleError, UnavailableError
from elasticrec.publish.repository import find_version
from elasticrec.serving.client import Client
from elasticrec.serving.onnxruntime import library_path

if TYPE_CHECKING:
    # it needs torch
    from elasticrec.training.predict import CheckpointModel

Scores = npt.NDArray[np.float32]

_CHUNK_LINES = 1024
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Source:
    """Where scores come from."""

    predict: Callable[[bytes], Scores]
    """Scores of lines, one a sample: a header, or a line that a reader passes over, has none."""
    predict_file: Callable[[str], Iterator[Scores]] | None = None
    """Scores of a whole file, where its format has no lines."""
    is_remote: bool = False


def source_of(model: "CheckpointModel") -> Source:
    """Scores from a checkpoint."""
    has_lines = model.job.data.format != "parquet"
    return Source(model.predict, None if has_lines else model.predict_file)


def scores_of(source: Source, file: str) -> Iterator[Scores]:
    """Scores of a file by its path, or of standard input, some at a time."""
    if source.predict_file is not None:
        if file == "-":
            raise ConfigError("predict: standard input has lines, expected a Parquet file")
        yield from source.predict_file(file)
        return
    with open_lines(file) as lines:
        yield from score_lines(lines, file, source)


def score_lines(file: BinaryIO, name: str, source: Source) -> Iterator[Scores]:
    """Scores of lines, some at a time; a bad line is named by its number in the file."""
    first = 0
    header: bytes | None = None
    while lines := _take(file):
        header = lines[0] if header is None else header
        samples = sum(not line.isspace() for line in lines)
        try:
            scores = source.predict(b"".join(lines))
        except SampleError:
            raise _locate(lines, first, name, source.predict) from None
        # a server that leaves out more than a header does not answer what it was asked
        if source.is_remote and len(scores) not in (samples, samples - lines.count(header)):
            raise UnavailableError(f"{name}: expected {samples} scores, got {len(scores)}")
        if len(scores):
            yield scores
        first += len(lines)


def _take(file: BinaryIO) -> list[bytes]:
    """The next lines: no more than a server takes at once, unless one line alone is."""
    lines: list[bytes] = []
    size = 0
    while len(lines) < _CHUNK_LINES and size < _CHUNK_BYTES and (line := file.readline()):
        lines.append(line)
        size += len(line)
    return lines


def _locate(lines: list[bytes], first: int, name: str, predict: Callable[[bytes], Scores]) -> SampleError:
    """The error of the first bad line among `lines`, asked for one by one."""
    for number, line in enumerate(lines, first + 1):
        try:
            predict(line)
        except SampleError as error:
            return SampleError(f"{name}:{number}: {str(error).replace('line 1: ', '')}")
    return SampleError(f"{name}: lines {first + 1} to {first + len(lines)}: refused together, accepted one by one")


@contextmanager
def open_lines(file: str) -> Iterator[BinaryIO]:
    """A file by its path, or standard input."""
    if file == "-":
        yield sys.stdin.buffer
        return
    with open(file, "rb") as lines:
        yield lines


@contextmanager
def open_scorer(
    checkpoint: str | None,
    model: Path | None,
    server: str | None,
    name: str | None,
    token: str | None,
    *,
    best: bool = False,
) -> Iterator[Source]:
    """What turns lines into scores: exactly one of a checkpoint, a published model and a server."""
    if sum(source is not None for source in (checkpoint, model, server)) != 1:
        raise ConfigError("predict: expected one of --checkpoint, --model and --server")
    if server is None and (name or token):
        raise ConfigError("predict: --name and --token go with --server")
    if checkpoint is None and best:
        raise ConfigError("predict: --best goes with --checkpoint")
    if checkpoint is not None:
        # the only source that needs torch
        from elasticrec.run import resolve_run
        from elasticrec.training.predict import load_checkpoint

        yield source_of(load_checkpoint(resolve_run(checkpoint), best=best))
    elif model is not None:
        yield Source(_core.Predictor(str(find_version(model)[0]), str(library_path())).predict)
    elif server is not None:
        secret = Secret(token, Path.cwd()).reveal_token() if token else None
        with Client(server, name, token=secret) as client:
            yield Source(client.predict_lines, is_remote=True)
