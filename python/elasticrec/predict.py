"""`elasticrec predict`: scores of the lines of a file from a checkpoint, a published model or a server."""

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
from elasticrec.data.raw_lines import any_parser, record_batches
from elasticrec.errors import ConfigError, ElasticRecError, ModelError, SampleError, UnavailableError
from elasticrec.repository.find import find_version
from elasticrec.score_metrics import LabelReader, ScoreMetrics
from elasticrec.serving.client import Client
from elasticrec.serving.onnxruntime import library_path
from elasticrec.serving.reader import encode_batch
from elasticrec.serving.reader_source import reader_source

if TYPE_CHECKING:
    # Imported for types only: it needs torch.
    from elasticrec.training.predict import CheckpointModel

Scores = npt.NDArray[np.float32]

_CHUNK_LINES = 1024
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class ScoreSource:
    """A checkpoint, a published model or a server that scores lines."""

    predict: Callable[[bytes], Scores]
    """Returns one score row per sample; headers and lines that a reader skips have none."""
    predict_file: Callable[[str], Iterator[Scores]] | None = None
    """Scores a whole file of a format without lines."""
    is_remote: bool = False
    can_skip: bool = False
    """Whether the reader of the lines may skip some of them."""
    labels: LabelReader | None = None
    """Reads the labels of the same lines, if possible."""


def source_of(model: "CheckpointModel", *, labels: bool = False) -> ScoreSource:
    """Return a source that scores with a checkpoint; `labels` makes it read labels too."""
    if model.job.data.format == "parquet":
        return ScoreSource(model.predict, model.predict_file)
    if not labels:
        return ScoreSource(model.predict)
    names = model.job.data.labels
    parse = line_parser(model.job, model.parser, labels=True)
    return ScoreSource(model.predict, labels=LabelReader(parse, range(len(names)), names))


def with_metrics(source: ScoreSource) -> tuple[ScoreSource, ScoreMetrics | None]:
    """Return the source and the metrics of its scores, which need lines with labels."""
    if source.labels is None:
        return source, None
    metrics = ScoreMetrics(source.labels)

    def predict(text: bytes) -> Scores:
        scores = source.predict(text)
        metrics.add(text, scores)
        return scores

    return replace(source, predict=predict), metrics


def scores_of(source: ScoreSource, file: str) -> Iterator[Scores]:
    """Yield the scores of a file, or of standard input (`-`), in chunks."""
    if source.predict_file is not None:
        if file == "-":
            raise ConfigError("predict: expected a Parquet file, got standard input")
        yield from source.predict_file(file)
    elif file == "-":
        yield from score_lines(sys.stdin.buffer, file, source)
    elif Path(file).is_file():
        yield from _score(_chunks_of_file(Path(file)), file, source)
    else:
        # A named pipe, or a path for which `open` raises an error.
        with open(file, "rb") as lines:
            yield from score_lines(lines, file, source)


def score_lines(file: BinaryIO, name: str, source: ScoreSource) -> Iterator[Scores]:
    """Yield the scores of lines in chunks; errors name the number of a bad line."""
    yield from _score(_chunks_of_stream(file, name), name, source)


@dataclass(frozen=True)
class _Chunk:
    """Lines that fit into one request to a server, or a single longer line."""

    lines: list[bytes]
    location: Callable[[int], str]


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
        yield _Chunk(lines, partial(_line_location, name, first))
        first += len(lines)


def _line_location(name: str, first: int, index: int) -> str:
    return f"{name}:{first + index}"


def _chunks_of_file(path: Path) -> Iterator[_Chunk]:
    """Yield the lines of a file as training reads them: plain or compressed, without a byte order mark."""
    for batch in record_batches(path, any_parser(), batch_size=_CHUNK_LINES):
        lines: list[bytes] = []
        size = start = 0
        for index in range(len(batch)):
            lines.append(batch[index] + b"\n")
            size += len(lines[-1])
            if size >= _CHUNK_BYTES or index + 1 == len(batch):
                yield _Chunk(lines, partial(_record_location, batch, start))
                lines, size, start = [], 0, index + 1


def _record_location(batch: _core.RecordBatch, start: int, index: int) -> str:
    return batch.location_of(start + index)


def _score(chunks: Iterator[_Chunk], name: str, source: ScoreSource) -> Iterator[Scores]:
    header: bytes | None = None
    for chunk in chunks:
        lines = chunk.lines
        header = lines[0] if header is None else header
        samples = sum(not line.isspace() for line in lines)
        try:
            scores = source.predict(b"".join(lines))
        except SampleError:
            raise _locate_error(chunk, source.predict) from None
        except UnavailableError as error:
            # The chunks before this one have their scores already.
            raise UnavailableError(f"{chunk.location(0)}: {error}") from None
        # A server may leave out a header line, but no sample.
        expected = range(samples + 1) if source.can_skip else (samples, samples - lines.count(header))
        if source.is_remote and len(scores) not in expected:
            raise UnavailableError(f"{name}: expected {samples} scores, got {len(scores)}")
        if len(scores):
            yield scores


def _locate_error(chunk: _Chunk, predict: Callable[[bytes], Scores]) -> SampleError:
    """Return the error of the first bad line of a chunk, found by scoring the lines one by one."""
    for index, line in enumerate(chunk.lines):
        try:
            predict(line)
        except SampleError as error:
            return SampleError(f"{chunk.location(index)}: {str(error).replace('line 1: ', '')}")
    first, last = chunk.location(0), chunk.location(len(chunk.lines) - 1)
    return SampleError(f"{first} to {last}: refused as a batch, but each line is accepted alone")


@dataclass(frozen=True)
class RemoteServer:
    """A running server and the options of requests to it."""

    url: str | None = None
    name: str | None = None
    token: str | None = None
    """As `${ENV}` or `file:PATH`."""
    timeout_s: float | None = None
    ca: Path | None = None

    def check_absent(self) -> None:
        """Refuse options of a server when no server is given."""
        if self != RemoteServer():
            raise ConfigError("predict: --name, --token, --timeout and --ca need --server")

    def client(self) -> Client:
        """Return a client of the server."""
        assert self.url is not None
        options: dict[str, Any] = {} if self.timeout_s is None else {"timeout_s": self.timeout_s}
        secret = Secret(self.token, Path.cwd()).reveal_token() if self.token else None
        return Client(self.url, self.name, token=secret, ca=self.ca, **options)


@contextmanager
def open_scorer(
    checkpoint: str | None, model: str | None, server: RemoteServer, *, best: bool = False, run_reader: bool = False
) -> Iterator[ScoreSource]:
    """Open the source of scores: exactly one of a checkpoint, a published model and a server."""
    if sum(source is not None for source in (checkpoint, model, server.url)) != 1:
        raise ConfigError("predict: expected one of --checkpoint, --model and --server")
    if server.url is None:
        server.check_absent()
    if checkpoint is None and best:
        raise ConfigError("predict: --best needs --checkpoint")
    if model is None and run_reader:
        raise ConfigError("predict: --run-reader needs --model")
    if checkpoint is not None:
        # Import here: only a checkpoint needs torch.
        from elasticrec.run import resolve_run
        from elasticrec.training.predict import load_checkpoint

        yield source_of(load_checkpoint(resolve_run(checkpoint), best=best), labels=True)
    elif model is not None:
        yield _version_source(*find_version(model), run_reader=run_reader)
    else:
        with server.client() as client:
            metadata = client.metadata()
            can_skip = metadata.get("format") == "reader"
            yield ScoreSource(
                client.predict_lines, is_remote=True, can_skip=can_skip, labels=_label_reader_of(metadata)
            )


def _version_source(path: Path, manifest: dict[str, Any], *, run_reader: bool) -> ScoreSource:
    """Return a source that scores with a published version; a custom format needs the reader published with it."""
    features = manifest["features"]
    scored = manifest["graph"].get("labels") or features["labels"]
    predictor = _core.Predictor(str(path), str(library_path()))
    if features["format"] != "reader":
        return ScoreSource(predictor.predict, labels=LabelReader.of_features(features, scored))
    source = reader_source(path)
    if source is None:
        raise ModelError(f"{path}: was published without the reader that these lines need; publish it again")
    if not run_reader:
        raise ConfigError(
            f"{path}: lines of this model need the reader `{source.spec}` in its directory; allow it with --run-reader"
        )
    reader, label_reader = source.line_reader(), source.line_reader(labels=True)
    columns = [features["labels"].index(name) for name in scored]
    return ScoreSource(
        lambda text: predictor.predict_parsed(encode_batch(reader.parse(text))),
        labels=LabelReader(label_reader.parse, columns, scored),
    )


def _label_reader_of(metadata: dict[str, Any]) -> LabelReader | None:
    """Return the label reader of a server's format; None if the server's metadata does not describe it."""
    try:
        return LabelReader.of_features(metadata["features"], metadata["labels"])
    except (ElasticRecError, LookupError, TypeError, ValueError):
        return None
