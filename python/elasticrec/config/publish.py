"""The sections `publish` and `cube`: where and when versions are published, and the online store of their rows."""

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
# A shorter interval would keep the job busy publishing.
_MIN_EVERY_S = 0.5


RowType = Literal["f32", "f16", "int8"]
ROW_TYPES: tuple[str, ...] = get_args(RowType)


class Gate(Section):
    """Requirements for offering a version. A version that fails them is reported and stays in the repository."""

    min_auc: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Lowest AUC of the evaluation, or of the last training pass if there is no evaluation.",
    )
    max_log_loss: float | None = Field(
        default=None, gt=0, description="Highest log loss of the evaluation, or of the last training pass."
    )
    max_row_loss: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Largest fraction of the current version's rows that a new version may lack.",
    )


def _parse_every(value: Any) -> Any:
    """Check all alternatives here: for a union, pydantic would report an error for each of them."""
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
    """Where and when versions of the model are published."""

    repository: str = Field(
        default="models",
        min_length=1,
        description="Model repository: a directory, relative to the current one, or a URL such as "
        "`s3://bucket/models`.",
    )
    # Filled from the name of the job when the job is validated.
    model: Name = Field(default="", description="Name of the model in the repository. Default: the name of the job.")
    every: Every | None = Field(
        default=None,
        description="When `train` publishes: at the end of each `epoch`, at the end of each `hour` of `data.hours`, "
        "or at an interval such as `30s`; null for never.",
    )
    base_every: int = Field(
        default=60, ge=0, le=MAX_COUNT, description="Number of deltas between two bases; 0 makes every version a base."
    )
    row_type: RowType = Field(
        default="f32", description="Number type of stored rows; with `int8` the first column stays f32."
    )
    outputs: Annotated[tuple[Word, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="Labels to serve, in this order; null for all of `data.labels`."
    )
    keep: int = Field(
        default=3,
        ge=1,
        le=MAX_COUNT,
        description="Number of newest bases to keep, in addition to versions that are in use or pinned.",
    )
    gate: Gate = Field(default=Gate(), description="Requirements for offering a version.")

    @field_validator("repository")
    @classmethod
    def _check_repository(cls, value: str) -> str:
        if _PASSWORD.search(value):
            raise problem("expected a URL without a password; credentials come from the environment")
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
    """The online store: servers that hold the rows of published versions."""

    insecure: bool = Field(
        default=False, description="Allow connections to other machines without TLS and without a token."
    )
    shards: int = Field(
        default=1, ge=1, le=65536, description="Number of shards that the partitions are divided among."
    )
    replicas: int = Field(default=1, ge=1, le=1024, description="Number of servers that hold the same shard.")
    addresses: Addresses = Field(
        default=(),
        description="Addresses of the servers: for each shard its replicas as host:port. Without addresses, a "
        "version is offered as soon as it is published, and each prediction server holds all rows itself.",
    )
    min_ready: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Replicas of each shard that must hold a version before it is offered; null for all but one, at "
        "least one.",
    )
    keep_loaded: int = Field(
        default=2,
        ge=1,
        le=1024,
        description="Number of versions that a server holds: the current version and the versions before it.",
    )
    poll_s: Seconds = Field(
        default=0.5,
        description="Seconds between two checks of the repository: about the longest time until a new version is "
        "noticed. Use more where each check costs money, as with object stores.",
    )
    token: Secret | None = Field(
        default=None, description="Token that requests must carry, as `${ENV}` or `file:PATH`; null for none."
    )
    tls: Tls = Field(default=Tls(), description="TLS of the store; unencrypted if no files are given.")

    @model_validator(mode="after")
    def _check_shards(self) -> "Cube":
        if self.addresses:
            self._check_addresses()
        if self.min_ready is not None and self.min_ready > self.replicas:
            raise problem(f"`min_ready`: expected at most `replicas`, {self.replicas}, got {self.min_ready}")
        return self

    def _check_addresses(self) -> None:
        """Check that there is an address for each replica of each shard, each once."""
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

    @model_validator(mode="after")
    def _check_reach(self) -> "Cube":
        """Require a token and TLS for addresses of other machines, unless `insecure` is set."""
        far = next((one for replicas in self.addresses for one in replicas if not is_loopback(host_of(one))), None)
        if far is None or self.insecure:
            return self
        if self.token is None or self.tls.ca is None:
            missing = "`token`" if self.token is None else "`tls.ca`"
            raise problem(f"`addresses`: `{far}` is another machine, which needs {missing} (or `cube.insecure: true`)")
        return self


def host_of(address: str) -> str:
    """Return the host of `host:port`, without the brackets of IPv6."""
    return address.rpartition(":")[0].strip("[]")


def check_publish(value: Publish, info: ValidationInfo) -> Publish:
    """Check `publish` against the `data` section of the job."""
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
            raise problem(f"`outputs`: expected labels from {names}, got `{label}`")
    return value
