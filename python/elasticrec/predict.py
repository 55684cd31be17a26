"""Lines of a file to scores: the same lines, wherever the scores come from."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Secret
from elasticrec.data.batches import line_parser
from elasticrec.data.lines import any_parser, record_batches
from elasticrec.errors import ConfigError, ElasticRecError, ModelError, SampleError, UnavailableError
from elasticrec.judge import Judge, LabelReader
from elasticrec.repository.find import find_version
from elasticrec.serving.client import Client
from elasticrec.serving.onnxruntime import library_path
from elasticrec.serving.reader import encode_batch
from elasticrec.serving.reader_source import source_of as source_of_reader

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
    passes: bool = False
    """Whether who reads the lines may pass some over."""
    labels: LabelReader | None = None
    """What reads the labels of the same lines, where that can be done."""


def source_of(model: "CheckpointModel", *, labels: bool = False) -> Source:
    """Scores from a checkpoint, and the labels of lines if they are wanted."""
    if model.job.data.format == "parquet":
        return Source(model.predict, model.predict_file)
    if not labels:
        return Source(model.predict)
    names = model.job.data.labels
    parse = line_parser(model.job, model.parser, labels=True)
    return Source(model.predict, labels=LabelReader(parse, range(len(names)), names))


def judged(source: Source) -> tuple[Source, Judge | None]:
    """The same source, and what compares its scores with the labels of the lines it is given."""
    if source.labels is None:
        return source, None
    judge = Judge(source.labels)

    def predict(text: bytes) -> Scores:
        scores = source.predict(text)
        judge.add(text, scores)
        return scores

    return replace(source, predict=predict), judge


def scores_of(source: Source, file: str) -> Iterator[Scores]:
    """Scores of a file by its path, or of standard input, some at a time."""
    if source.predict_file is not None:
        if file == "-":
            raise ConfigError("predict: standard input has lines, expected a Parquet file")
        yield from source.predict_file(file)
    elif file == "-":
        yield from score_lines(sys.stdin.buffer, file, source)
    elif Path(file).is_file():
        yield from _score(_chunks_of_file(Path(file)), file, source)
    else:
        # a pipe, or an error
        with open(file, "rb") as lines:
            yield from score_lines(lines, file, source)


def score_lines(file: BinaryIO, name: str, source: Source) -> Iterator[Scores]:
    """Scores of lines, some at a time; a bad line is named by its number."""
    yield from _score(_chunks_of_stream(file, name), name, source)


@dataclass(frozen=True)
class _Chunk:
    """Some lines: no more than a server takes at once, unless one line alone is."""

    lines: list[bytes]
    place: Callable[[int], str]


def _chunks_of_stream(file: BinaryIO, name: str) -> Iterator[_Chunk]:
    first = 1
    while True:
        lines: list[bytes] = []
        size = 0
        while len(lines) < _CHUNK_LINES and size < _CHUNK_BYTES and (line := file.readline()):
            lines.append(line)
            size += len(line)
        if not lines:
            return
        yield _Chunk(lines, partial(_numbered, name, first))
        first += len(lines)


def _numbered(name: str, first: int, index: int) -> str:
    return f"{name}:{first + index}"


def _chunks_of_file(path: Path) -> Iterator[_Chunk]:
    """Lines of a file as training reads them: plain or compressed, without a byte order mark."""
    for batch in record_batches(path, any_parser(), batch_size=_CHUNK_LINES):
        lines: list[bytes] = []
        size = start = 0
        for index in range(len(batch)):
            lines.append(batch[index] + b"\n")
            size += len(lines[-1])
            if size >= _CHUNK_BYTES or index + 1 == len(batch):
                yield _Chunk(lines, partial(_place, batch, start))
                lines, size, start = [], 0, index + 1


def _place(batch: _core.RecordBatch, start: int, index: int) -> str:
    return batch.place(start + index)


def _score(chunks: Iterator[_Chunk], name: str, source: Source) -> Iterator[Scores]:
    header: bytes | None = None
    for chunk in chunks:
        lines = chunk.lines
        header = lines[0] if header is None else header
        samples = sum(not line.isspace() for line in lines)
        try:
            scores = source.predict(b"".join(lines))
        except SampleError:
            raise _locate(chunk, source.predict) from None
        except UnavailableError as error:
            # what comes before it has its scores
            raise UnavailableError(f"{chunk.place(0)}: {error}") from None
        # a server that leaves out more than a header does not answer what it was asked
        expected = range(samples + 1) if source.passes else (samples, samples - lines.count(header))
        if source.is_remote and len(scores) not in expected:
            raise UnavailableError(f"{name}: expected {samples} scores, got {len(scores)}")
        if len(scores):
            yield scores


def _locate(chunk: _Chunk, predict: Callable[[bytes], Scores]) -> SampleError:
    """The error of the first bad line of a chunk, asked for one by one."""
    for index, line in enumerate(chunk.lines):
        try:
            predict(line)
        except SampleError as error:
            return SampleError(f"{chunk.place(index)}: {str(error).replace('line 1: ', '')}")
    first, last = chunk.place(0), chunk.place(len(chunk.lines) - 1)
    return SampleError(f"{first} to {last}: refused together, accepted one by one")


@dataclass(frozen=True)
class ServerPlace:
    """A server, and how it is asked."""

    url: str | None = None
    name: str | None = None
    token: str | None = None
    """As `${ENV}` or `file:PATH`."""
    timeout_s: float | None = None
    ca: Path | None = None

    def check_absent(self) -> None:
        """Refuse options of a server where there is none."""
        if self != ServerPlace():
            raise ConfigError("predict: --name, --token, --timeout and --ca go with --server")

    def client(self) -> Client:
        """A client of it."""
        assert self.url is not None
        options: dict[str, Any] = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        secret = Secret(self.token, Path.cwd()).reveal_token() if self.token else None
        return Client(self.url, self.name, token=secret, ca=self.ca, **options)


@contextmanager
def open_scorer(
    checkpoint: str | None, model: str | None, server: ServerPlace, *, best: bool = False, run_reader: bool = False
) -> Iterator[Source]:
    """What turns lines into scores: exactly one of a checkpoint, a published model and a server."""
    if sum(source is not None for source in (checkpoint, model, server.url)) != 1:
        raise ConfigError("predict: expected one of --checkpoint, --model and --server")
    if server.url is None:
        server.check_absent()
    if checkpoint is None and best:
        raise ConfigError("predict: --best goes with --checkpoint")
    if model is None and run_reader:
        raise ConfigError("predict: --run-reader goes with --model")
    if checkpoint is not None:
        # the only source that needs torch
        from elasticrec.run import resolve_run
        from elasticrec.training.predict import load_checkpoint

        yield source_of(load_checkpoint(resolve_run(checkpoint), best=best), labels=True)
    elif model is not None:
        yield _source_of_version(*find_version(model), run_reader=run_reader)
    else:
        with server.client() as client:
            metadata = client.metadata()
            passes = metadata.get("format") == "reader"
            yield Source(client.predict_lines, is_remote=True, passes=passes, labels=_labels_at(metadata))


def _source_of_version(path: Path, manifest: dict[str, Any], *, run_reader: bool) -> Source:
    """Scores of a published version; lines in a user's own format take code that came with it."""
    features = manifest["features"]
    scored = manifest["graph"].get("labels") or features["labels"]
    predictor = _core.Predictor(str(path), str(library_path()))
    if features["format"] != "reader":
        return Source(predictor.predict, labels=LabelReader.of_features(features, scored))
    source = source_of_reader(path)
    if source is None:
        raise ModelError(f"{path}: was published without its reader, which reads these lines; publish it anew")
    if not run_reader:
        raise ConfigError(f"{path}: its lines are read by code of its own, `{source.spec}`: --run-reader runs it")
    reader, judge = source.line_reader(), source.line_reader(labels=True)
    columns = [features["labels"].index(name) for name in scored]
    return Source(
        lambda text: predictor.predict_parsed(encode_batch(reader.parse(text))),
        labels=LabelReader(judge.parse, columns, scored),
    )


def _labels_at(metadata: dict[str, Any]) -> LabelReader | None:
    """What reads the labels for a server; none for one that is too old, or too new, to say how."""
    try:
        return LabelReader.of_features(metadata["features"], metadata["labels"])
    except (ElasticRecError, LookupError, TypeError, ValueError):
        return None
