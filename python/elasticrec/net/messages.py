"""What roles tell the coordinator: the bodies of its requests, checked."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from elasticrec.errors import ConfigError, UnavailableError

PROTOCOL = 1
"""Of these bodies and their answers; both sides must have the same."""

U64 = Annotated[int, Field(ge=0, lt=2**64)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class FencedError(UnavailableError):
    """Another one has the place of this member: it must stop, or register as somebody new."""


class MovedError(FencedError):
    """The partitions moved to another number of shards: this one may ask for a place among them."""


class SurplusError(ConfigError):
    """The run has no shard of this number, as after the partitions moved to fewer."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OpenUnit(_Message):
    """A unit of which some batches are applied."""

    batches: dict[Annotated[int, Field(ge=0, lt=2**32)], U64] = {}
    """Checksums of the batches that are applied."""
    num_batches: int | None = None


class Record(_Message):
    """Which batches a partition has applied; a shard's own words (`crates/ps/src/record.rs`)."""

    watermark: U64 = 0
    complete: frozenset[U64] = frozenset()
    open: dict[U64, OpenUnit] = {}
    boundaries: U64 = 0

    def has(self, unit: int) -> bool:
        """Whether all of a unit is applied."""
        return unit < self.watermark or unit in self.complete

    @property
    def end(self) -> int:
        """One behind the last unit of which something is applied."""
        return max(self.watermark, *(1 + unit for unit in self.complete), *(1 + unit for unit in self.open), 0)


@dataclass(frozen=True)
class ShardOwner:
    """The incarnation that owned a shard when a checkpoint or a publish began, and its partitions."""

    incarnation: int
    partitions: range


Records = tuple[tuple[tuple[U64, ...], Record], ...]
"""Each record once, with the partitions that have it."""


class Status(BaseModel):
    """What a shard says of itself; figures that this release does not know are shown, not read."""

    model_config = ConfigDict(extra="allow", frozen=True)

    records: Records

    def figures(self) -> dict[str, Any]:
        """All but the records."""
        return plain(self.model_extra or {})


class WrittenFile(_Message):
    """A file of a snapshot, synced to the disk."""

    bytes: U64
    sha256: Digest


class Snapshot(_Message):
    """How far a shard is with its part of a checkpoint."""

    checkpoint: str
    incarnation: U64
    state: Literal["writing", "written", "failed"]
    rows: WrittenFile | None = None
    dense: WrittenFile | None = None
    error: str | None = None


class PublishPart(_Message):
    """How far a shard is with its part of a version."""

    publish: str
    incarnation: U64
    state: Literal["writing", "written", "failed"]
    cube: WrittenFile | None = None
    dense: WrittenFile | None = None
    rows: U64 = 0
    """Of all its partitions."""
    changed: U64 = 0
    """Rows in the part."""
    removed: U64 = 0
    """Signs in it that have no row any more."""
    whole: U64 = 0
    """Partitions that are whole in it."""
    samples: U64 = 0
    """Applied to its first partition."""
    error: str | None = None


class Request(_Message):
    """What all requests have."""

    term: U64 = 0
    """The highest term that the role has seen."""


class Register(Request):
    """A process that wants to be a shard or a trainer."""

    protocol: int
    role: Literal["ps", "trainer"]
    nonce: Annotated[str, Field(min_length=1, max_length=100)]
    """Drawn once a process: a request that is sent again is known by it."""
    run: str = ""
    """Id of the run whose directory it has, if it knows."""
    index: Annotated[int, Field(ge=0)] | None = None
    damaged: dict[str, str] = {}
    """Checkpoints that could not be loaded, and why."""


class Heartbeat(Request):
    """Sent again and again; a shard's lease runs from the time at which it was sent."""

    incarnation: U64
    sequence: U64
    """Counts up: what was sent before is not news when it comes later."""
    leaving: bool = False
    """It has stopped: from now on it applies nothing."""
    figures: dict[str, Any] = {}
    """For people, shown in the status."""
    address: str | None = None
    state: Literal["loading", "serving"] = "loading"
    boundaries: U64 = 0
    """How many boundaries a shard knows of."""
    skipped: U64 = 0
    """How many lost units it knows of."""
    status: Status | None = None
    snapshot: Snapshot | None = None
    publish: PublishPart | None = None
    units: tuple[U64, ...] = ()
    """Units that a trainer works on."""
    meeting: U64 = 0
    """The last one that it came to."""


class Lease(Request):
    """A trainer that wants a unit."""

    incarnation: U64
    holds: tuple[U64, ...] = ()
    """Those that it has: of others that are leased to it the answer was lost."""
    waiting: bool = False
    """A step cannot go on: whoever had the rest of the group may be gone."""


class MeetRequest(Request):
    """A trainer that has pushed a merge group and waits for the others."""

    incarnation: U64
    meeting: U64


class UnitRequest(Request):
    """A trainer that is done with a unit, or gives it back."""

    incarnation: U64
    unit: U64


class Missing(UnitRequest):
    """A trainer whose unit cannot be read: its data is gone."""

    why: Annotated[str, Field(max_length=10_000)]


class CheckpointRequest(Request):
    """Somebody who wants a checkpoint now."""


class Scale(Request):
    """Somebody who wants another number of shards or trainers."""

    servers: int | None = None
    trainers: int | None = None


def plain(figures: dict[str, Any]) -> dict[str, int | float | str]:
    """Of what a role says of itself the numbers and names, which can be shown as they are."""
    return {
        key: value
        for key, value in figures.items()
        if isinstance(value, int | str) or (isinstance(value, float) and math.isfinite(value))
    }


AnyRequest = TypeVar("AnyRequest", bound=BaseModel)


def other_release(protocol: int) -> str:
    """What a role of another release is told."""
    return f"register: protocol: expected {PROTOCOL}, got {protocol}: the role is of another release"


class _Protocol(BaseModel):
    protocol: int


def parse(kind: type[AnyRequest], body: bytes) -> AnyRequest:
    """A request from its JSON."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if kind is Register:
            _check_release(body)
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise ConfigError(f"{kind.__name__.lower()}: {where}: {first['msg'].lower()}") from None


def _check_release(body: bytes) -> None:
    """A role of another release may say what this one does not know: its release is the better reason."""
    try:
        protocol = _Protocol.model_validate_json(body).protocol
    except ValidationError:
        return
    if protocol != PROTOCOL:
        raise ConfigError(other_release(protocol))
