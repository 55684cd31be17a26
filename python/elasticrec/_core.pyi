"""The boundary between Python and Rust, for code that must run at memory speed. Stubtest checks it."""

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Batch",
    "BatchMaker",
    "BatchOptions",
    "BatchReader",
    "CubeBench",
    "CubeClient",
    "CubeItems",
    "CubeServer",
    "CubeView",
    "CubeWriter",
    "DeltaWriter",
    "GeoExchange",
    "MergedGradients",
    "Moment",
    "Parser",
    "Predictor",
    "PsClient",
    "PsCloser",
    "PsServer",
    "PsTls",
    "PullTicket",
    "PushTicket",
    "Readers",
    "RecordBatch",
    "RecordReader",
    "RedisTraffic",
    "Server",
    "Staleness",
    "StoreTraffic",
    "Table",
    "TableBench",
    "TrafficReport",
    "batch_from_parts",
    "batch_of_columns",
    "batch_to_parts",
    "engine_rate",
    "first_line",
    "held_out",
    "is_compressed",
    "probe_cube_server",
    "read_cube",
    "read_dense_parts",
    "run_traffic",
    "shuffle_records",
    "shuffle_units",
    "split_units",
    "write_bench_cube",
    "write_demo",
]

_F32 = npt.NDArray[np.float32]
_Sums = tuple[npt.NDArray[np.uint32], npt.NDArray[np.float64]]
_I64 = npt.NDArray[np.int64]
_U64 = npt.NDArray[np.uint64]
_Bool = npt.NDArray[np.bool_]
# (id, path, start, end, epoch, size, modification time in ns)
_Unit = tuple[int, str, int, int, int, int, int]

@final
class Parser:
    """A parser for the features that a job or manifest declares."""
    def __new__(cls, features_json: str, *, missing: float = 0.0) -> Parser:
        """Use `missing` for missing dense values; models read them as 0."""
    @property
    def missing(self) -> float: ...
    def parse(self, text: bytes, *, labels: bool) -> Batch:
        """Parse lines in memory; the first bad line raises `SampleError`."""
    def empty(self, unit: int) -> Batch:
        """Return a batch without samples: the first batch of a unit without records."""
    def sign(self, slot: str, value: bytes) -> int:
        """Return the sign of a categorical value in the slot called `slot`."""

@final
class Batch:
    """A batch of samples."""
    @property
    def unit(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def num_records(self) -> int: ...
    @property
    def num_bad(self) -> int: ...
    @property
    def bad(self) -> list[str]: ...
    @property
    def location(self) -> str:
        """Location of the records, as `file: lines 3, 8 and 510 more up to 1530`."""
    @property
    def file_bytes(self) -> int:
        """Approximate offset in the file after this batch; 0 if unknown."""
    @property
    def dense(self) -> _F32: ...
    @property
    def labels(self) -> _F32: ...
    @property
    def weights(self) -> _F32: ...
    @property
    def signs(self) -> npt.NDArray[np.uint64]: ...
    @property
    def offsets(self) -> npt.NDArray[np.uint32]: ...

@final
class BatchOptions:
    """The division of units into batches."""
    def __new__(
        cls,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        skip_batches: int,
        piece_bytes: int,
        select: tuple[str, float, bool] | None,
    ) -> BatchOptions:
        """`select`: (`ratio` or `time`, share or seconds since 1970, whether to read the held-out records)."""

@final
class BatchReader:
    """An iterator over the batches of units; its threads read and parse ahead."""
    def __new__(
        cls, parser: Parser, units: list[_Unit], batches: BatchOptions, *, labels: bool, workers: int
    ) -> BatchReader: ...
    def times(self) -> tuple[float, float]:
        """Return the seconds that the threads have spent (reading, parsing)."""
    def __iter__(self) -> BatchReader: ...
    def __next__(self) -> Batch: ...
    def close(self) -> None:
        """Stop the threads."""

@final
class RecordReader:
    """An iterator over batches of records before parsing."""
    def __new__(cls, parser: Parser, units: list[_Unit], batches: BatchOptions) -> RecordReader: ...
    def __iter__(self) -> RecordReader: ...
    def __next__(self) -> RecordBatch: ...

@final
class RecordBatch:
    """The records of a batch before parsing."""
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> bytes: ...
    def offset(self, index: int) -> int:
        """Return the offset of a record in the decompressed file."""
    def location_of(self, index: int) -> str:
        """Return the location of a record, as `file:line`."""
    def text(self) -> bytes:
        """Return all records, each with a line end."""
    def good(self, parser: Parser) -> tuple[bytes, list[str]]:
        """Return the records that `parser` accepts, each with a line end, and the others as `file:line: reason`."""
    @property
    def unit(self) -> int: ...
    @property
    def index(self) -> int: ...
    @property
    def location(self) -> str: ...

@final
class BatchMaker:
    """Builds a batch from named values."""
    def __new__(cls, parser: Parser, *, labels: bool) -> BatchMaker: ...
    def add(self, sample: dict[str, Any]) -> None:
        """Add a sample: values of slots, dense columns, labels and `weight` by name. A bad sample adds nothing."""
    def finish(self, *, unit: int, index: int, num_records: int, bad: list[str], num_bad: int, location: str) -> Batch:
        """Return the batch of the samples so far, and start a new one."""

@final
class Table:
    """A sparse table in this process; large batches and work on the whole table use up to `threads` threads."""
    def __new__(cls, spec_json: str, *, threads: int = 1) -> Table: ...
    def __len__(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def width(self) -> int: ...
    def pull(self, batch: Batch, out: _F32) -> None:
        """Write the pooled rows of a batch into `out`, `[num_samples, num_cells, width]`; creates no rows."""
    def push(self, batch: Batch, gradient: _F32, scale: float, seen: int) -> tuple[int, bool]:
        """Apply `scale` times the gradient of the pooled rows; return (rows created, gradient was not finite)."""
    def decay(self, rate: float, step: int) -> None:
        """Multiply show and click of every row by `rate`; `step` is the seed of the rounding."""
    def restart_time(self) -> None:
        """Reset the data time: every row was last seen at 0."""
    def evict(
        self, *, nonclk_coeff: float, click_coeff: float, min_score: float | None, now: int, max_age: int | None
    ) -> int:
        """Evict rows with a score below `min_score` or last seen over `max_age` before `now`; return their number."""
    def get(self, sign: int) -> tuple[int, int, int, list[float], list[float]] | None:
        """Return (show, click, seen, weights, optimizer state) of a sign, or None."""
    def snapshot(self, path: str) -> tuple[int, str]:
        """Write a part file; return its size and sha-256."""
    def load(self, paths: list[str]) -> None:
        """Load the part files of a snapshot into this empty table."""
    def write_cube(self, path: str, *, row_type: str = "f32") -> tuple[int, str]:
        """Write the weights as a cube part file; return its size and sha-256."""
    def publish(self, name: str, *, committed: str | None, is_base: bool, row_type: str, path: str) -> dict[str, Any]:
        """Write the rows of a version: all rows of a base, or the rows that changed since the publish `committed`.

        The table records its changes from the first call on. Return figures: `bytes`, `sha256`, `rows`, `changed`,
        `removed`, `whole`.
        """

@final
class TableBench:
    """A table full of rows, for measurements."""
    def __new__(cls, spec_json: str, num_rows: int) -> TableBench: ...
    @property
    def row_bytes(self) -> int: ...
    def measure(self, num_batches: int) -> tuple[float, float, float, float]:
        """Return the median seconds per key of (pull, its probe, push, its probe)."""
    def take_changes(self) -> tuple[int, float]:
        """Take the changed rows; return (their number, seconds). The table records changes from the first call on."""

@final
class CubeView:
    """The rows of one version: a base and its deltas, or only their `partitions` (first, end)."""
    def __new__(
        cls, base: list[str], deltas: list[list[str]] = ..., *, partitions: tuple[int, int] | None = None
    ) -> CubeView: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def columns(self) -> list[tuple[str, int]]:
        """(name, width) of each column."""
    @property
    def width(self) -> int: ...
    @property
    def row_type(self) -> str: ...
    @property
    def num_partitions(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    def lookup(self, signs: _U64) -> tuple[_F32, _Bool]:
        """Look signs up: return rows `[signs, width]`, zeros for signs without a row, and which signs have one."""
    def items(self) -> CubeItems:
        """Iterate over all signs with their rows: one batch per partition, sorted by sign."""

@final
class CubeItems:
    """The rows of a version, a partition at a time."""
    def __iter__(self) -> CubeItems: ...
    def __next__(self) -> tuple[_U64, _F32]: ...

@final
class CubeWriter:
    """Writes one part file of a base; `columns` are (name, width)."""
    def __new__(
        cls, path: str, columns: list[tuple[str, int]], *, row_type: str, num_partitions: int
    ) -> CubeWriter: ...
    def add(self, partition: int, signs: _U64, rows: _F32) -> None:
        """Write a partition: its signs and their rows `[signs, width]`. Partitions are in ascending order."""
    def finish(self) -> tuple[int, str]:
        """Complete the file; return its size and SHA-256."""

@final
class DeltaWriter:
    """Writes one part file of a delta; `columns` are (name, width)."""
    def __new__(
        cls, path: str, columns: list[tuple[str, int]], *, row_type: str, num_partitions: int
    ) -> DeltaWriter: ...
    def add(self, partition: int, signs: _U64, rows: _F32, removed: _U64, *, is_whole: bool = False) -> None:
        """Add a partition: changed signs with their rows, and removed signs. Partitions are in ascending order.

        `is_whole`: these are all rows of the partition, not only changes.
        """
    def finish(self) -> tuple[int, str]:
        """Complete the file; return its size and SHA-256."""

@final
class CubeBench:
    """A cube of many rows of 1 + 9 columns, for measurements; written into `directory` and loaded."""
    def __new__(cls, directory: str, num_rows: int, *, row_type: str = "f32") -> CubeBench: ...
    @property
    def build_s(self) -> float:
        """Seconds to write the file, checksums and sync included."""
    @property
    def open_s(self) -> float:
        """Seconds to load and check it."""
    @property
    def file_bytes(self) -> int: ...
    @property
    def row_bytes(self) -> int: ...
    def change(self, num_changed: int) -> tuple[float, float, float, int]:
        """Publish a delta; return the seconds to write, open and apply it, and its bytes."""
    def measure(self, num_batches: int) -> tuple[float, float]:
        """Return the median seconds per key of (lookup, its probe) over batches of 1000 keys."""

@final
class Server:
    """A prediction server. It answers 503 until every variant of every model has a version.

    `models` has the name of each model, and the name and the weight of each of its variants.
    """
    def __new__(
        cls,
        ort_library: str,
        address: str,
        models: list[tuple[str, list[tuple[str, float]]]],
        *,
        workers: int,
        queue: int,
        max_connections: int,
        max_body_bytes: int,
        max_pending_bytes: int,
        max_instances: int,
        batch_size: int,
        batch_wait_us: int,
        timeout_ms: int | None,
        token: str | None,
        tls: tuple[str, str] | None = None,
    ) -> Server: ...
    @property
    def address(self) -> str:
        """`host:port` that the server listens on."""
    def load(
        self,
        model: str,
        variant: str,
        path: str,
        *,
        store: CubeClient | None = None,
        lost_as_zero: bool = False,
        readers: Readers | None = None,
    ) -> tuple[int, int]:
        """Load and warm a version, make it the current one of a variant, and return (version, rows).

        Rows are loaded from the version's files, or looked up in a store; with `lost_as_zero`, rows of a shard that is
        down read as zero. `readers` parse lines in a custom format and belong to this version.
        """
    def note(self, model: str, variant: str, offered: int, failures: int) -> None:
        """Set the metrics of the version that a variant should have, and of failed loads so far."""
    def wait(self, seconds: float) -> bool:
        """Wait until the server has stopped, at most for `seconds`; return whether it has."""
    def stop(self, within_s: float) -> bool:
        """Stop accepting and finish in-flight requests; return whether all were answered in time."""

@final
class Readers:
    """Reader processes of a version, which parse lines in a custom format.

    The owner of the processes adds them, and ends those that are lost. Their sockets are closed with the version.
    """
    def __new__(cls, *, timeout_ms: int) -> Readers: ...
    def add(self, socket: socket.socket) -> int:
        """Add a process by its socket and return its number; the socket object is closed."""
    def lost(self) -> list[int]:
        """Return the numbers of processes that died, hung or returned invalid data since the last call."""

@final
class Predictor:
    """A version in this process: the server's path of a request without the socket."""
    def __new__(cls, path: str, ort_library: str) -> Predictor: ...
    def predict(self, text: bytes) -> _F32:
        """Return the scores `[lines, labels]` of lines in the training format; their labels are ignored."""
    def predict_parsed(self, parsed: bytes) -> _F32:
        """Return the scores `[samples, labels]` of a batch as a reader process sends it."""

def batch_of_columns(
    parser: Parser,
    *,
    unit: int,
    index: int,
    path: str,
    rows: _I64,
    slots: list[tuple[_I64 | None, _I64, npt.NDArray[np.uint8]]],
    dense: list[tuple[_F32, _Bool | None]],
    labels: list[tuple[_F32, _Bool | None]] | None,
    weights: tuple[_F32, _Bool | None] | None,
    refused: dict[int, str],
    shown: int,
) -> Batch:
    """Return a batch of columns; `rows` are the row numbers in the file, for messages.

    `refused` has the bad rows that the caller found, with the reason, by their position in the batch.
    """

def batch_to_parts(batch: Batch) -> Any:
    """Return the content of a batch as plain arrays, to be sent to another process."""

def batch_from_parts(parser: Parser, parts: Any) -> Batch:
    """Return the batch from the result of `batch_to_parts` in another process."""

def first_line(path: str) -> bytes | None:
    """Return the first line of a file, plain or compressed; None if it is empty."""

def shuffle_records(count: int, seed: int, epoch: int, unit: int) -> _I64:
    """Return the order in which the `count` records of a unit are read."""

def held_out(rows: _I64, file: str, ratio: float) -> _Bool:
    """Return which rows of a file are in the held-out share, by their row numbers."""

def is_compressed(start: bytes) -> bool:
    """Return whether a file with these first bytes is compressed; such a file is one unit."""

def engine_rate(path: str, ort_library: str, *, batch: int, seconds: float, threads: int) -> float:
    """Return the instances per second through the bare network on prepared tensors."""

@final
class TrafficReport:
    """The outcome of traffic to a server. Latencies are of answered requests; in an open loop, from their due time."""

    @property
    def answered(self) -> int:
        """Requests answered with success."""
    @property
    def failed(self) -> int:
        """Requests that were sent and not answered with success."""
    @property
    def failures(self) -> dict[str, int]:
        """Failed requests by kind: `status 429`, `grpc-status 8`, `broken connection`, `timeout`."""
    @property
    def seconds(self) -> float:
        """Time from the first request to the last answer."""
    @property
    def requests_per_s(self) -> float:
        """Answers per second."""
    @property
    def offered(self) -> int:
        """Requests that were due; in a closed loop, requests that were sent."""
    @property
    def late(self) -> int:
        """Open loop: requests that waited for a connection because all were busy when they were due."""
    @property
    def unsent(self) -> int:
        """Open loop: requests that were due and found no free connection until the end."""
    @property
    def lag_p99_us(self) -> float:
        """Open loop: delay between due time and sending, of requests with a free connection (99th percentile)."""
    @property
    def p50_us(self) -> float: ...
    @property
    def p90_us(self) -> float: ...
    @property
    def p99_us(self) -> float: ...
    @property
    def p999_us(self) -> float: ...
    @property
    def max_us(self) -> float: ...

def run_traffic(
    address: str,
    path: str,
    bodies: list[bytes],
    *,
    connections: int,
    seconds: float,
    content_type: str = "text/plain",
    token: str | None = None,
    headers: dict[str, str] | None = None,
    grpc: bool = False,
    rate: float | None = None,
    poisson_seed: int | None = None,
    timeout_s: float = 30.0,
    progress: Callable[[float, int, int], object] | None = None,
) -> TrafficReport:
    """Send requests over keep-alive connections and report on the answers.

    Without a `rate` this is a closed loop: each connection sends the next request when it has an answer. With a `rate`
    per second it is an open loop, with even gaps, or random ones with a `poisson_seed`. Bodies are sent in turn; with
    `grpc` they are messages of unary calls. `progress` is called every second with (seconds, answered, failed).
    """

def split_units(size: int, unit_bytes: int) -> list[tuple[int, int]]:
    """Split a file of `size` bytes into byte ranges of at most `unit_bytes`."""

def shuffle_units(count: int, seed: int, epoch: int) -> list[int]:
    """Return the order in which `count` units of an epoch are read."""

def read_cube(paths: list[str], signs: list[int]) -> tuple[_F32, int]:
    """Look signs up in the part files of a cube: return rows `[signs, width]` and the number of signs found."""

def write_demo(
    out: str,
    *,
    samples: int,
    slots: int,
    hours: int,
    seed: int,
    format: str,
    overwrite: bool,
    threads: int,
    progress: Callable[[int], None] | None,
    kind: str = "pairwise",
    structure: bool = True,
) -> str:
    """Write demo data and return its summary as JSON; `progress` is called with the samples written so far."""

@final
class Moment:
    """A moment on the monotonic clock of leases."""

    def __new__(cls) -> Self: ...

@final
class PsTls:
    """The TLS files of a role, read once: certificate and key of a server, authorities that a client trusts."""

    def __new__(cls, *, cert: Path | None, key: Path | None, ca: Path | None) -> Self:
        """Read PEM files; `cert` and `key` belong together."""

@final
class PsServer:
    """A shard that answers requests on a socket, on its own threads."""

    def __new__(
        cls,
        spec_json: str,
        *,
        address: str,
        run: str,
        token: str,
        incarnation: int,
        epoch: int,
        threads: int,
        files: Sequence[tuple[str, str]],
        dense: _F32 | None,
        steps: int = 0,
        rows: Sequence[str] | None = None,
        tls: PsTls | None = None,
    ) -> Self:
        """Load the part files of a checkpoint, pairs of rows and dense values, and listen.

        Without a checkpoint, the shard starts with `dense`, `[vectors, values]`: the values and optionally the
        optimizer's state vectors after `steps`; and with `rows`, part files of another table.
        """
    @property
    def address(self) -> str: ...
    @property
    def failure(self) -> str | None:
        """The reason the server cannot continue, or None."""
    def extend_lease(self, requested: Moment, seconds: float) -> None:
        """Extend the lease to `seconds` after the moment at which it was requested."""
    def end_lease(self) -> None: ...
    def limit_memory(self, num_bytes: int) -> None:
        """Limit the bytes of rows and dense values; a nearly full shard drops new signs."""

    def slow_down(self, seconds: float) -> None:
        """Delay every push from now on; 0 for no delay."""

    def skip_units(self, units: list[int]) -> None:
        """Mark units as complete although their data is lost."""

    def set_boundaries(self, boundaries_json: str) -> None: ...
    def status(self) -> str:
        """Return rows, bytes, pushes and records as JSON."""
    def wait_for_units(self, watermark: int, seconds: float) -> int:
        """Wait until the watermark differs from `watermark`, at most `seconds`; return the watermark."""

    def sums(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Return the metric sums of this pass and the previous one; empty unless the shard owns partition 0."""
    def samples(self) -> list[int]:
        """Return the number of samples applied to each partition of the shard."""
    def counters(self) -> dict[str, int]: ...
    def snapshot(self, rows: str, dense: str) -> tuple[tuple[int, str], tuple[int, str]]:
        """Write the shard's part of a checkpoint; return size and SHA-256 of the rows file and of the dense file."""
    def publish(
        self, name: str, *, committed: str | None, is_base: bool, row_type: str, path: str
    ) -> tuple[dict[str, Any], _F32]:
        """Write the shard's part of a version: all rows of a base, or the changes since the publish `committed`.

        Return figures (`bytes`, `sha256`, `rows`, `changed`, `removed`, `whole`, `samples`) and the dense values.
        """
    def stop(self) -> None: ...

def read_dense_parts(
    spec_json: str, paths: Sequence[str]
) -> tuple[list[_F32], int, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]], list[int]]:
    """Read dense part files: dense vector and optimizer vectors, steps, metric sums, samples of each partition."""

@final
class PullTicket:
    """A pull in flight; also needed to push the batch."""

@final
class PushTicket:
    """A push in flight."""

@final
class Staleness:
    """Staleness of the pushes of a `PsClient`; may be read while another thread uses the client."""

    @property
    def pushes(self) -> int:
        """Number of acknowledged pushes whose pull is known."""
    @property
    def sum(self) -> int:
        """Number of pushes applied between a batch's pull and its push, summed over the batches."""
    @property
    def most(self) -> int:
        """The same number for the worst batch."""

@final
class PsCloser:
    """Ends the connections of a `PsClient` while another thread waits on them."""

    def close(self) -> None:
        """End all connections; threads that wait on them raise `UnavailableError`."""

@final
class PsClient:
    """A trainer's connections to all shards of a table."""

    def __new__(
        cls,
        addresses: Sequence[str],
        *,
        run: str,
        token: str,
        partitions: int,
        timeout_s: float,
        tls: PsTls | None = None,
    ) -> Self: ...
    @property
    def width(self) -> int: ...
    @property
    def num_dense(self) -> int: ...
    def closer(self) -> PsCloser:
        """Return a handle with which another thread can end the connections."""
    @property
    def num_dense_full(self) -> int:
        """Number of dense values and optimizer state values of all shards."""
    @property
    def incarnations(self) -> list[int]: ...
    def applied(self) -> list[int]:
        """Return the number of pushes that each shard has applied."""
    @property
    def staleness(self) -> Staleness:
        """Staleness of the pushes."""
    def pull(self, batch: Batch, *, dense: bool, after: tuple[int, int] | None = None) -> PullTicket: ...
    def receive(self, pulling: PullTicket, batch: Batch, out: _F32, dense: _F32 | None) -> list[int]:
        """Wait for pooled rows and pulled dense values; return the number of pushes that each shard had applied."""
    def push(
        self,
        pulling: PullTicket,
        batch: Batch,
        gradient: _F32,
        dense: _F32,
        *,
        scale: float,
        last: bool,
        seen: int,
        sums: _Sums,
        weight: float = 1.0,
        group: tuple[int, int] | None = None,
    ) -> PushTicket: ...
    def wait_for_ack(self, pushing: PushTicket) -> tuple[bool, bool]:
        """Wait until all shards have applied a push; return (all had applied it before, a value was not finite)."""

    def step_status(self, group: tuple[int, int], step: int, wait_s: float) -> list[tuple[int, bool]]:
        """Return each shard's number of applied steps of the group, and whether it has all pushes of this step."""

    def commit(self, first_unit: int, num_steps: int) -> None:
        """Make every shard apply the first steps of a group; all shards have all pushes of these steps."""

@final
class MergedGradients:
    """The merged gradients of several batches of a unit, pushed as one step."""

    def __new__(cls) -> Self: ...
    def __len__(self) -> int: ...
    def add(self, batch: Batch, gradient: _F32, dense: _F32, *, scale: float, weight: float, sums: _Sums) -> None: ...
    def push(self, servers: PsClient, *, unit: int, index: int, last: bool, seen: int) -> PushTicket: ...

@final
class GeoExchange:
    """Strategy `geo`: copies whole rows of several batches into a trainer's table and pushes their increments."""

    def __new__(cls, servers: PsClient, batches: Sequence[Batch]) -> Self: ...
    def receive(self, servers: PsClient, table: Table, dense: _F32) -> None:
        """Wait for the rows and insert them into an empty table; write dense values and their state into `dense`."""

    def push(
        self,
        servers: PsClient,
        table: Table,
        dense: _F32,
        *,
        unit: int,
        index: int,
        last: bool,
        seen: int,
        sums: _Sums,
    ) -> PushTicket: ...

@final
class CubeServer:
    """A server of some partitions of a model's versions; answers lookups on its own threads."""

    def __new__(
        cls,
        model: str,
        *,
        address: str,
        token: str,
        partitions: tuple[int, int],
        num_partitions: int,
        tls: PsTls | None = None,
    ) -> Self:
        """Listen without holding a version yet; `partitions` are (first, end)."""
    @property
    def address(self) -> str: ...
    def install_base(self, version: int, paths: Sequence[str | Path], *, mapped: bool = False) -> None:
        """Load the server's partitions from the part files of a base, check them and install the version.

        The partitions are copied into memory, on huge pages if possible, or mapped.
        """
    def install_delta(self, version: int, parent: int, paths: Sequence[str | Path]) -> None:
        """Apply the part files of a delta to its parent, which the server holds, and install the version."""
    def retire(self, version: int) -> None:
        """Remove a version after the requests that use it."""
    def versions(self) -> list[int]:
        """Return the versions that the server holds, ascending."""
    def held(self) -> list[tuple[int, dict[str, int]]]:
        """Return (version, figures): `rows`, `bytes` of index and rows, `segments` over its base, `changes` in them."""
    def set_about(self, about: str) -> None:
        """Set the server's description, a JSON object that clients receive with its inventory."""
    def counters(self) -> dict[str, int]:
        """Return `requests`, `keys`, `misses`, `bytes`, `refused`, `malformed` since the start; `connections` now."""
    def latency(self) -> tuple[list[tuple[float, int]], float]:
        """Return (upper bound in seconds, requests) of each bucket, the last one infinite; and the sum in seconds."""
    def seek(self, version: int, signs: npt.NDArray[np.uint64]) -> tuple[bytes, _Bool]:
        """Look signs up: return their stored rows, concatenated, and which signs have one."""
    def stop(self) -> None:
        """Stop the server: send clients to other replicas and answer the requests that have arrived."""

def probe_cube_server(
    address: str, model: str, *, token: str, timeout_s: float, tls: PsTls | None = None
) -> tuple[list[int], list[int], str]:
    """Return a cube server's versions, [first partition, end, number of partitions], and description."""

@final
class CubeClient:
    """Looks up rows of a model at all shards of a store. Any number of threads may use it at once."""

    def __new__(
        cls,
        model: str,
        shards: Sequence[Sequence[str]],
        *,
        token: str,
        deadline_s: float,
        tls: PsTls | None = None,
    ) -> Self:
        """Connect to the shards, given as lists of replica addresses; one replica of each must answer."""
    def get(self, version: int, signs: npt.NDArray[np.uint64]) -> tuple[_F32, _Bool]:
        """Look signs up: return rows `[signs, width]`, zeros for signs without a row, and which signs have one."""
    def layout(self, version: int) -> tuple[list[tuple[str, int]], str]:
        """Return (name, width) of the columns of a version, and the type of its stored rows."""
    def versions(self) -> list[int]:
        """Return the versions that any replica holds according to its last inventory, ascending."""
    def info(self) -> list[dict[str, Any]]:
        """Return each replica's `shard`, `address`, `down` (the reason, or None), `versions`, requests `waiting`."""

@final
class StoreTraffic:
    """Traffic of random keys on a store, for `elasticrec bench cube`.

    Opens `connections` connections to each replica, each with up to `in_flight` requests of `batch` keys in flight.
    """

    def __new__(
        cls,
        model: str,
        shards: Sequence[Sequence[str]],
        *,
        token: str,
        version: int,
        rows: int,
        batch: int,
        miss_share: float,
        connections: int,
        in_flight: int,
    ) -> Self: ...
    def switch(self, version: int) -> None:
        """Request this version from now on; may be called during `run`."""
    def run(self, seconds: float, *, rate: float | None = None) -> dict[str, Any]:
        """Send requests for `seconds`: as fast as answers arrive, or `rate` per second on schedule."""

@final
class RedisTraffic:
    """The same traffic on Redis, with `MGET`."""

    def __new__(
        cls, address: str, *, rows: int, batch: int, miss_share: float, connections: int, in_flight: int
    ) -> Self: ...
    def fill(self, version: int) -> None:
        """Set the rows that `write_bench_cube` writes."""
    def run(self, seconds: float, *, rate: float | None = None) -> dict[str, Any]:
        """Send requests like `StoreTraffic.run`."""

def write_bench_cube(path: str | Path, num_rows: int, version: int) -> None:
    """Write a cube of rows of 1 + 9 columns; the first value of a row is the version."""
