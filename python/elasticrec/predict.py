"""Lines of a file to scores: the same lines, wherever the scores come from."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Secret
from elasticrec.errors import ConfigError, SampleError, UnavailableError
from elasticrec.publish.repository import find_version
from elasticrec.serving.client import Client
from elasticrec.serving.onnxruntime import library_path

Scores = npt.NDArray[np.float32]

_CHUNK_LINES = 1024
_CHUNK_BYTES = 1 << 20


def score_file(file: BinaryIO, name: str, predict: Callable[[bytes], Scores]) -> Iterator[Scores]:
    """Scores of a file, some lines at a time; a bad line is named by its number in the file."""
    first = 0
    while lines := _take(file):
        samples = sum(not line.isspace() for line in lines)
        try:
            scores = predict(b"".join(lines))
        except SampleError:
            raise _locate(lines, first, name, predict) from None
        if len(scores) != samples:
            raise UnavailableError(f"{name}: expected {samples} scores, got {len(scores)}")
        if samples:
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
) -> Iterator[Callable[[bytes], Scores]]:
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

        yield load_checkpoint(resolve_run(checkpoint), best=best).predict
    elif model is not None:
        yield _core.Predictor(str(find_version(model)[0]), str(library_path())).predict
    elif server is not None:
        secret = Secret(token, Path.cwd()).reveal_token() if token else None
        with Client(server, name, token=secret) as client:
            yield client.predict_lines
