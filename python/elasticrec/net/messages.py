"""Requests to the coordinator, validated, and its responses (docs/formats/coordinator.md)."""

import functools
import math
from typing import Annotated, Any, Literal, NotRequired, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

# With Python 3.11, pydantic refuses the `TypedDict` of `typing`.
from typing_extensions import TypedDict

from elasticrec.errors import ConfigError, UnavailableError

PROTOCOL = 1
"""Version of these messages; both sides must have the same."""

U64 = Annotated[int, Field(ge=0, lt=2**64)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FencedError(UnavailableError):
    """Another process replaced this member: it must stop, or register as a new member."""


class MovedError(FencedError):
    """The partitions moved to another number of shards: this shard may register again."""


class SurplusError(ConfigError):
    """The run has no shard with this index, for example after it was scaled down."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenUnit(_Message):
    """A unit with some of its batches applied."""

    batches: dict[Annotated[int, Field(ge=0, lt=2**32)], U64] = {}
    """Checksums of the applied batches, by index."""
    num_batches: int | None = None


class Record(_Message):
    """The batches that a partition has applied, as its shard reports them (`crates/ps/src/record.rs`)."""

    watermark: U64 = 0
    complete: frozenset[U64] = frozenset()
    open: dict[U64, OpenUnit] = {}
    boundaries: U64 = 0

    def has(self, unit: int) -> bool:
        """Whether all of a unit is applied."""
        return unit < self.watermark or unit in self.complete

    @property
    def end(self) -> int:
        """One past the last unit with an applied batch."""
        return max(self.watermark, *(1 + unit for unit in self.complete), *(1 + unit for unit in self.open), 0)


Records = tuple[tuple[tuple[U64, ...], Record], ...]
"""Each distinct record once, with its partitions."""


class Status(BaseModel):
    """The status of a shard; figures that this release does not know are shown unchanged."""

    model_config = ConfigDict(extra="allow", frozen=True)

    records: Records

    def figures(self) -> dict[str, Any]:
        """Return the figures without the records."""
        return plain_figures(self.model_extra or {})


class WrittenFile(_Message):
    """A file of a snapshot, synced to the disk."""

    bytes: U64
    sha256: Digest


class Snapshot(_Message):
    """Progress of a shard's part of a checkpoint."""

    checkpoint: str
    incarnation: U64
    state: Literal["writing", "written", "failed"]
    rows: WrittenFile | None = None
    dense: WrittenFile | None = None
    error: str | None = None


class PublishPart(_Message):
    """Progress of a shard's part of a version."""

    publish: str
    incarnation: U64
    state: Literal["writing", "written", "failed"]
    cube: WrittenFile | None = None
    dense: WrittenFile | None = None
    rows: U64 = 0
    """Rows of all partitions of the shard."""
    changed: U64 = 0
    """Rows in the part."""
    removed: U64 = 0
    """Signs in the part whose rows were removed."""
    whole: U64 = 0
    """Partitions that the part holds completely."""
    samples: U64 = 0
    """Samples applied to the shard's first partition."""
    error: str | None = None


class Request(_Message):
    """The fields that all requests share."""

    term: U64 = 0
    """The highest term that the role has seen."""


class RegisterRequest(Request):
    """A process asks to become a shard or a trainer."""

    protocol: int
    role: Literal["ps", "trainer"]
    nonce: Annotated[str, Field(min_length=1, max_length=100)]
    """Random for each process, to recognise a repeated request."""
    run: str = ""
    """Id of the run in the process's run directory, if known."""
    index: Annotated[int, Field(ge=0)] | None = None
    damaged: dict[str, str] = {}
    """Checkpoints that could not be loaded, with the reasons."""


class Heartbeat(Request):
    """Sent periodically; a shard's lease runs from the time of sending."""

    incarnation: U64
    sequence: U64
    """Counts up, so that a delayed heartbeat does not overwrite a newer one."""
    leaving: bool = False
    """The member has stopped; a shard applies nothing from now on."""
    figures: dict[str, Any] = {}
    """Figures for the status."""
    address: str | None = None
    state: Literal["loading", "serving"] = "loading"
    boundaries: U64 = 0
    """Number of boundaries that the shard knows."""
    skipped: U64 = 0
    """Number of lost units that the shard knows."""
    status: Status | None = None
    snapshot: Snapshot | None = None
    publish: PublishPart | None = None
    units: tuple[U64, ...] = ()
    """Units that the trainer works on."""
    meeting: U64 = 0
    """The last meeting that the trainer reached."""


class LeaseRequest(Request):
    """A trainer asks for a unit."""

    incarnation: U64
    holds: tuple[U64, ...] = ()
    """Units that the trainer holds; responses with other units were lost."""
    waiting: bool = False
    """The trainer waits for the other units of its group, whose trainers may be gone."""


class MeetRequest(Request):
    """A trainer has pushed a merge group and waits for the others."""

    incarnation: U64
    meeting: U64


class UnitRequest(Request):
    """A trainer has finished a unit, or gives it back."""

    incarnation: U64
    unit: U64


class MissingRequest(UnitRequest):
    """A trainer cannot read a unit: its data is gone."""

    why: Annotated[str, Field(max_length=10_000)]


class CheckpointRequest(Request):
    """A user or the launcher asks for a checkpoint now."""


class ScaleRequest(Request):
    """A user asks for another number of shards or trainers."""

    servers: int | None = None
    trainers: int | None = None


Figures = dict[str, Any]
"""Numbers and names that a member reports about itself; they depend on its role and its release."""


class ShardReport(TypedDict, total=False):
    """The state of a shard in a heartbeat; see `Heartbeat` for the fields."""

    figures: Figures
    address: str
    state: Literal["loading", "serving"]
    boundaries: int
    skipped: int
    status: dict[str, Any]
    """The body of `Status`."""
    snapshot: dict[str, Any] | None
    """The body of `Snapshot`."""
    publish: dict[str, Any] | None
    """The body of `PublishPart`."""


class Boundary(TypedDict):
    """The end of a pass, as shards parse it (`crates/ps/src/shard.rs`)."""

    before_unit: int
    """First unit after the boundary."""
    decay: float | None
    """Factor of show and click; None for 1."""
    decay_step: int
    """Number of the pass."""
    coefficients: list[float]
    """Coefficients of an impression without a click and of a click in the score of a row."""
    min_score: float | None
    """Evict rows with a lower score."""
    now: int
    """Data time."""
    max_age: int | None
    """Evict rows that were not seen for longer, in data time."""


class StopCommand(TypedDict):
    """End the process."""

    command: Literal["stop"]
    why: str


class BoundariesCommand(TypedDict):
    """All boundaries so far."""

    command: Literal["boundaries"]
    boundaries: list[Boundary]


class SkipCommand(TypedDict):
    """All lost units so far."""

    command: Literal["skip"]
    units: list[int]


class ReloadCommand(TypedDict):
    """Return to the last checkpoint."""

    command: Literal["reload"]


class SnapshotCommand(TypedDict):
    """Write this shard's part of a checkpoint."""

    command: Literal["snapshot"]
    checkpoint: str
    rows: str
    dense: str


class PublishCommand(TypedDict):
    """Write this shard's part of a version."""

    command: Literal["publish"]
    publish: str
    committed: str | None
    """The last publish that became a version; a delta holds the changes since."""
    base: bool
    row_type: str
    cube: str
    dense: str
    store: str | None
    """URL of the repository, None if the coordinator serves its files."""
    name: str


Command = StopCommand | BoundariesCommand | SkipCommand | ReloadCommand | SnapshotCommand | PublishCommand


class Response(TypedDict):
    """The fields that all responses share."""

    term: int
    epoch: int
    """Epoch of the partition map."""
    commands: list[Command]


class PartPaths(TypedDict):
    """The files of one part of a checkpoint."""

    rows: str
    dense: str


class CheckpointPaths(TypedDict):
    """A checkpoint that a shard starts from, with the parts that hold its partitions."""

    name: str
    parts: list[PartPaths]


class ShardAddress(TypedDict):
    """A shard as trainers connect to it."""

    index: int
    partitions: list[int]
    incarnation: int | None
    address: str | None
    state: str


class RegistrationDelay(Response):
    """All indexes of the role are taken; register again later."""

    incarnation: None
    wait_s: float
    why: str


class Registration(Response):
    """The member's index and lease."""

    incarnation: int
    index: int
    lease_s: float
    next_s: float
    num_partitions: int
    servers: int


class ShardRegistration(Registration):
    """The state that a shard starts from."""

    partitions: list[int]
    boundaries: list[Boundary]
    skipped: list[int]
    checkpoint: CheckpointPaths | None


class TrainerRegistration(Registration):
    """The servers that a trainer connects to."""

    shards: list[ShardAddress]


class ShardHeartbeatResponse(Response):
    """The lease of a shard, and when to send the next heartbeat."""

    lease_s: float
    next_s: float


class TrainerHeartbeatResponse(ShardHeartbeatResponse):
    """The lease of a trainer, its servers, and the units to drop."""

    shards: list[ShardAddress]
    drop: list[int]
    """Units that the trainer reported but no longer holds."""


class UnitEntry(TypedDict):
    """A unit, as in a line of `units/epoch-NNNNN.jsonl`; `elasticrec.data.units.Unit` documents the fields."""

    id: int
    path: str
    size: int
    modified_ns: int
    start: int
    end: int
    epoch: int
    cut: str
    """`split_digest` of the unit."""
    day: NotRequired[int | None]


class UnitLease(Response):
    """A leased unit."""

    unit: UnitEntry
    skip: list[int]
    """Batches that all partitions have."""
    replay: bool
    shards: list[ShardAddress]
    group: list[int] | None
    """With `sync`: the first unit of the group and its number of units."""
    meeting: int
    trainers: int
    """Number of live trainers."""


class NoUnit(Response):
    """No unit is available now, or all are complete."""

    unit: None
    finished: bool
    wait_s: float
    why: str
    shards: list[ShardAddress]


class MeetResponse(Response):
    """Whether all trainers with a unit have reached the meeting."""

    go: bool


class HeldResponse(Response):
    """Whether the trainer held the unit."""

    held: bool


class CheckpointResponse(Response):
    """The checkpoint is written when `checkpoint.ticket` of the status has reached `ticket`."""

    ticket: int


class ProcessCounts(TypedDict):
    """The number of processes of each role."""

    servers: int
    trainers: int


class ScaleResponse(Response):
    """The requested numbers, and the number of servers in the current map."""

    wanted: ProcessCounts
    servers: int


class PassesStatus(TypedDict):
    """The passes of a run."""

    begun: int
    planned: int | None
    ended: int
    hour: str | None
    waiting: str | None
    notes: list[tuple[int, str]]
    """Numbered lines for the user who started the training."""


class UnitFigures(TypedDict):
    """Units by state."""

    planned: int
    leased_ever: int
    complete: int | None
    leased: int
    settling: int
    behind: int | None


class ShardStatus(ShardAddress):
    """A shard in the status."""

    figures: Figures
    lease_left_s: float


class TrainerStatus(TypedDict):
    """A trainer in the status."""

    index: int
    incarnation: int
    state: str
    units: list[int]
    lease_left_s: float
    samples_per_s: float
    figures: Figures


class CheckpointStatus(TypedDict):
    """Checkpoints in the status."""

    newest: str | None
    age_s: float | None
    writing: str | None
    ticket: int
    committed: int
    failed: int
    seconds: float
    last_s: float | None


class OpenPublishStatus(TypedDict):
    """The publish in progress."""

    publish: str
    kind: str
    parts: int
    """Number of written parts."""


class PublishStatus(TypedDict):
    """Versions in the status: the last one of the run, and counts of this coordinator's publishes."""

    version: int | None
    deltas: int | None
    offer: str | None
    age_s: float | None
    next_s: float | None
    writing: OpenPublishStatus | None
    committed: int
    failed: int
    seconds: float
    last_s: float | None
    kind: str | None
    rows: int | None
    changed: int | None
    removed: int | None
    whole: int | None
    num_bytes: int | None
    error: str | None


class RefusedVersion(TypedDict):
    """A version that the gate refused."""

    version: int
    why: list[str]


class StoreStatus(TypedDict):
    """The rollout to the online store in the status."""

    doing: str
    late: list[str]
    refused: RefusedVersion | None


class StatusResponse(Response):
    """The state of a run."""

    state: str
    failure: str | None
    passes: PassesStatus
    units: UnitFigures
    leases: dict[str, int]
    """Incarnations of trainers by unit."""
    counters: dict[str, int]
    meetings: dict[str, int]
    wanted: ProcessCounts
    moving_to: int | None
    """Number of servers that the partitions are moving to."""
    started: dict[str, int]
    samples_per_s: float
    shards: list[ShardStatus]
    trainers: list[TrainerStatus]
    checkpoint: CheckpointStatus
    publish: PublishStatus | None
    store: StoreStatus | None


class ErrorResponse(TypedDict):
    """An error response."""

    term: int
    error: str
    moved: NotRequired[bool]
    surplus: NotRequired[bool]


def plain_figures(figures: Figures) -> Figures:
    """Return the numbers and names among a member's figures, which can be shown without conversion."""
    return {
        key: value
        for key, value in figures.items()
        if isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    }


AnyRequest = TypeVar("AnyRequest", bound=BaseModel)
AnyResponse = TypeVar("AnyResponse")


def release_mismatch(protocol: int) -> str:
    """Return the error for a role of another release."""
    return f"register: protocol: expected {PROTOCOL}, got {protocol}: the role runs another release"


class _Protocol(BaseModel):
    protocol: int


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """Parse a request from JSON."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if kind is RegisterRequest:
            _check_release(body)
        raise ConfigError(f"{kind.__name__.removesuffix('Request').lower()}: {_first_problem(error)}") from None


def check_response(kind: type[AnyResponse], response: dict[str, Any]) -> AnyResponse:
    """Check the fields of a response, and return it unchanged: it may have fields that this release does not know."""
    try:
        _adapter(cast(Any, kind)).validate_python(response)
    except ValidationError as error:
        raise ConfigError(f"{_first_problem(error)}: the coordinator runs another release") from None
    return cast(AnyResponse, response)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "body"
    return f"{where}: {first['msg'].lower()}"


def _check_release(body: bytes) -> None:
    """Refuse another release by its protocol number, which is clearer than an error about an unknown field."""
    try:
        protocol = _Protocol.model_validate_json(body).protocol
    except ValidationError:
        return
    if protocol != PROTOCOL:
        raise ConfigError(release_mismatch(protocol))
