"""The sections `publish` and `cube`: where versions of a model go, when, and who holds their rows online."""

import re
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from elasticrec.config.fields import (
    MAX_COUNT,
    MAX_SECONDS,
    Name,
    Seconds,
    Section,
    Word,
    expected,
    is_loopback,
    one_or_list,
    parse_seconds,
    problem,
)
from elasticrec.config.secret import Secret
from elasticrec.config.train import Tls

_URL = re.compile(r"[a-z][a-z0-9+.-]*://.+")
_PASSWORD = re.compile(r"://[^/]*:[^/]*@")
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/@\[\]]+):([0-9]{1,5})")
# A publish more often than that would only publish.
_MIN_EVERY_S = 0.5


RowType = Literal["f32", "f16", "int8"]
ROW_TYPES: tuple[str, ...] = get_args(RowType)


class Gate(Section):
    """What a version has to be before it is offered; one that is not stays in the repository and is named."""

    min_auc: float | None = Field(
        default=None, ge=0, le=1, description="Least AUC of the evaluation, or of the last pass without one."
    )
    max_log_loss: float | None = Field(default=None, gt=0, description="Highest log loss of the same.")
    max_row_loss: float = Field(
        default=0.5, ge=0, le=1, description="Share of the current version's rows that the next may be without."
    )


def _parse_every(value: Any) -> Any:
    """All of it here: of a union pydantic would tell what is wrong with each side."""
    if value in ("epoch", "hour"):
        return value
    try:
        seconds = parse_seconds(value)
    except PydanticCustomError:
        seconds = None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise expected("`epoch`, `hour` or a duration such as `30s`")
    if not _MIN_EVERY_S <= seconds <= MAX_SECONDS:
        raise expected(f"from {_MIN_EVERY_S} to {MAX_SECONDS:g} seconds")
    return float(seconds)


Every = Annotated[
    Literal["epoch", "hour"] | float,
    BeforeValidator(_parse_every, json_schema_input_type=Literal["epoch", "hour"] | Seconds),
]


class Publish(Section):
    """Where versions of the model go, and when."""

    repository: str = Field(
        default="models",
        min_length=1,
        description="The model repository: a directory, from the current one, or a URL such as `s3://bucket/models`.",
    )
    # Filled from the name of the job when the job is validated.
    model: Name = Field(default="", description="Name of the model in the repository; that of the job if not given.")
    every: Every | None = Field(
        default=None,
        description="When `train` publishes by itself: at the end of each `epoch`, of each `hour` of `data.hours`, or "
        "after so much time, such as `30s`; null for never.",
    )
    base_every: int = Field(
        default=60, ge=0, le=MAX_COUNT, description="Deltas between two bases; 0: every version is a base."
    )
    row_type: RowType = Field(default="f32", description="How rows are stored; the first column of `int8` stays f32.")
    outputs: Annotated[tuple[Word, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="Labels that are served, in this order; null for all of `data.labels`."
    )
    keep: int = Field(
        default=3, ge=1, le=MAX_COUNT, description="Newest bases that are kept, beside what is in use or pinned."
    )
    gate: Gate = Field(default=Gate(), description="What a version has to be before it is offered.")

    @field_validator("repository")
    @classmethod
    def _check_repository(cls, value: str) -> str:
        if _PASSWORD.search(value):
            raise problem("expected a URL without a password; stores take keys from the environment")
        if not value.isprintable() or ("://" in value and not _URL.fullmatch(value)):
            raise expected("a path or a URL such as `s3://bucket/models`")
        return value

    @field_validator("outputs", mode="before")
    @classmethod
    def _allow_one(cls, value: Any) -> Any:
        return None if value is None else one_or_list(value)

    @field_validator("outputs")
    @classmethod
    def _check_outputs(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for at, label in enumerate(value or ()):
            if label in (value or ())[:at]:
                raise problem(f"label `{label}` is given twice, expected each once")
        return value


def _check_address(value: str) -> str:
    match = _ADDRESS.fullmatch(value)
    if match is None or not value.isprintable() or not 1 <= int(match[2]) <= 65535:
        raise expected("an address such as `10.0.0.7:8600`")
    return value


_Replicas = Annotated[
    tuple[Annotated[str, AfterValidator(_check_address)], ...],
    Field(strict=False, min_length=1),
    BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
]


Addresses = Annotated[tuple[_Replicas, ...], Field(strict=False)]


class Cube(Section):
    """The online store: who holds the rows of published versions. `insecure` comes first: others depend on it."""

    insecure: bool = Field(
        default=False, description="Lets the store talk to other machines without TLS, and even without a token."
    )
    shards: int = Field(default=1, ge=1, le=65536, description="Servers that the partitions are divided among.")
    replicas: int = Field(default=1, ge=1, le=1024, description="Servers that hold the same shard.")
    addresses: Addresses = Field(
        default=(),
        description="Where the servers are: for each shard its replicas as host:port. Without any, a version is "
        "offered as soon as it is published, and each server of predictions holds all rows itself.",
    )
    min_ready: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Replicas of each shard that hold a version before it is offered; null for all but one, "
        "at least one.",
    )
    keep_loaded: int = Field(
        default=2, ge=1, le=1024, description="Versions that a server holds: the current one and those before it."
    )
    poll_s: Seconds = Field(
        default=0.5,
        description="Seconds between two looks at the repository: about the longest that a version waits to be seen. "
        "More where each look costs, as with object stores.",
    )
    token: Secret | None = Field(
        default=None, description="Token that requests must carry, as `${ENV}` or `file:PATH`; null for none."
    )
    tls: Tls = Field(default=Tls(), description="TLS of the store; without files it talks in clear.")

    @model_validator(mode="after")
    def _check_shards(self) -> "Cube":
        if not self.addresses:
            if self.min_ready is not None and self.min_ready > self.replicas:
                raise problem(f"`min_ready`: expected at most `replicas`, {self.replicas}, got {self.min_ready}")
            return self
        if len(self.addresses) != self.shards:
            raise problem(
                f"`addresses`: expected a list for each of the {self.shards} shards, got {len(self.addresses)}"
            )
        seen: set[str] = set()
        for shard, replicas in enumerate(self.addresses):
            if len(replicas) != self.replicas:
                raise problem(f"`addresses.{shard}`: expected {self.replicas} replicas, got {len(replicas)}")
            for address in replicas:
                if address in seen:
                    raise problem(f"`addresses.{shard}`: `{address}` is given twice, expected each once")
                seen.add(address)
        if self.min_ready is not None and self.min_ready > self.replicas:
            raise problem(f"`min_ready`: expected at most `replicas`, {self.replicas}, got {self.min_ready}")
        return self

    @model_validator(mode="after")
    def _check_reach(self) -> "Cube":
        """Nothing talks beyond this machine in clear unless that is said."""
        far = next((one for replicas in self.addresses for one in replicas if not is_loopback(host_of(one))), None)
        if far is None or self.insecure:
            return self
        if self.token is None or self.tls.ca is None:
            missing = "`token`" if self.token is None else "`tls.ca`"
            raise problem(
                f"`addresses`: `{far}` is another machine, which needs {missing} (`cube.insecure: true` does without)"
            )
        return self

    @property
    def num_ready(self) -> int:
        """Replicas of a shard that must hold a version before it is offered."""
        return self.min_ready or max(self.replicas - 1, 1)


def host_of(address: str) -> str:
    """The host of `host:port`, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def check_publish(value: Publish, info: ValidationInfo) -> Publish:
    """What the rest of the job says of its publishes."""
    data = info.data.get("data")
    if data is None:
        return value
    if value.every == "hour" and data.hours is None:
        raise problem("`every`: `hour` needs `data.hours`, expected `epoch` or a duration such as `1h`")
    if value.every == "epoch" and data.hours is not None:
        raise problem("`every`: with `data.hours` expected `hour` or a duration, got `epoch`")
    for label in value.outputs or ():
        if label not in data.labels:
            names = ", ".join(f"`{name}`" for name in data.labels)
            raise problem(f"`outputs`: expected labels out of {names}, got `{label}`")
    return value
