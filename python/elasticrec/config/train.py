"""The `train` section: mode, strategy, epochs, evaluation and checkpoints."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from elasticrec.config.fields import (
    CUSTOM_CLASS,
    MAX_COUNT,
    Bytes,
    PathText,
    Seconds,
    Section,
    base_of,
    expected,
    one_or_list,
    problem,
    show,
)
from elasticrec.config.strategies import STRATEGIES, StrategyName, StrategyRules, strategies_where

# Metrics of every evaluation; custom metrics may not have these names.
METRICS = ("auc", "log_loss", "copc")


class Checkpoint(Section):
    """When checkpoints are written, and which are kept."""

    every_s: Seconds = Field(default=600.0, description="Seconds between checkpoints, or a duration such as `30m`.")
    every_steps: int | None = Field(
        default=None, ge=1, le=2**53, description="Also write a checkpoint every N batches; null for never."
    )
    every_epochs: int = Field(
        default=1,
        ge=1,
        le=MAX_COUNT,
        description="Also write a checkpoint at the end of every N epochs, and of the last epoch.",
    )
    keep: int = Field(default=3, ge=1, le=MAX_COUNT, description="Number of newest checkpoints to keep.")
    keep_epochs: bool | Annotated[tuple[int, ...], Field(strict=False)] = Field(
        default=False,
        description="Epochs, counted from 0, whose final checkpoint is kept permanently in addition to the newest; "
        "`true` for all.",
    )
    keep_best: str | None = Field(
        default=None,
        min_length=1,
        description="Metric of the evaluation (`auc`, `log_loss`, or one of `train.metrics`) whose best checkpoint "
        "is kept in addition to the newest; null for none.",
    )
    best_label: str | None = Field(
        default=None, description="Label that `keep_best` evaluates. Default: the first label."
    )
    best_is: Literal["highest", "lowest"] | None = Field(
        default=None,
        description="Which value of `keep_best` is best. Default: lowest for `log_loss`, highest for other metrics.",
    )

    @field_validator("keep_epochs", mode="before")
    @classmethod
    def _check_epochs(cls, value: Any) -> Any:
        """Check all alternatives here: for a union, pydantic would report an error for each of them."""
        epochs = value if isinstance(value, list | tuple) else []
        if isinstance(value, bool) or (epochs and all(type(epoch) is int and 0 <= epoch for epoch in epochs)):
            return value
        raise expected("`true`, `false` or a list of epochs counted from 0")

    @field_validator("keep_best")
    @classmethod
    def _check_metric(cls, value: str | None) -> str | None:
        if value == "copc":
            raise expected("a metric to maximize or minimize, such as `auc`")
        return value

    def keeps_epoch(self, epoch: int) -> bool:
        """Whether the checkpoint at the end of an epoch, counted from 0, is kept permanently."""
        return self.keep_epochs if isinstance(self.keep_epochs, bool) else epoch in self.keep_epochs


class Evaluate(Section):
    """Evaluations on `data.eval` in addition to the end of each epoch."""

    every_steps: int | None = Field(
        default=None, ge=1, le=2**53, description="Evaluate every N batches; null for never."
    )
    every_s: Seconds | None = Field(
        default=None, description="Seconds between evaluations, or a duration such as `30m`; null for never."
    )


class Tls(Section):
    """PEM files for TLS between roles. Flags and environment variables of a role take precedence."""

    cert: PathText | None = Field(
        default=None,
        description="Certificate that a role presents where it listens, followed by the intermediate certificates up "
        "to `ca`.",
    )
    key: PathText | None = Field(default=None, description="Private key of the certificate.")
    ca: PathText | None = Field(default=None, description="CA certificates that a role trusts where it connects.")

    @model_validator(mode="after")
    def _check_pair(self) -> "Tls":
        if (self.cert is None) != (self.key is None):
            raise problem(
                f"`{'key' if self.key is None else 'cert'}`: expected a certificate and its key, got one of them"
            )
        return self


class ParameterServers(Section):
    """How trainers, servers and the coordinator communicate."""

    lanes: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Batches that a trainer of strategy `async` processes in parallel; they share its threads. Null "
        "for the number of threads, at most 4 and at most half of `max_in_flight`.",
    )
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Batches of a trainer between their pull and the acknowledgement of their push; 1 avoids all "
        "staleness. Null for 3 per lane.",
    )
    sends_before_receive: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Pushes of a lane before it pulls the dense values again; null for 1 if a lane has one batch in "
        "flight, else 2. Rows are pulled for every batch.",
    )
    lease_s: Seconds = Field(default=5.0, description="Seconds of silence after which a role is replaced.")
    heartbeat_s: Seconds = Field(default=1.0, description="Seconds between two heartbeats.")
    deadline_s: Seconds = Field(default=30.0, description="Timeout of a request in seconds.")
    retries: int | None = Field(
        default=None,
        ge=0,
        le=MAX_COUNT,
        description="Consecutive retries of a trainer, one lease apart, for servers that do not answer; a server "
        "that died is replaced in about two leases. Null for no limit.",
    )
    threads: int = Field(
        default=1,
        ge=1,
        le=4096,
        description="Threads of a server for loading, for operations on the whole table, and for large batches.",
    )
    memory_bytes: Bytes | None = Field(
        default=None,
        description="Memory limit of a server for rows and dense values, such as `4GiB`. From 90 % on, new signs are "
        "dropped and counted, and the rows with the lowest score are evicted at the end of a pass. Null for no limit.",
    )
    tls: Tls = Field(default=Tls(), description="TLS between roles; unencrypted if no files are given.")
    insecure: bool = Field(
        default=False, description="Allow connections to other machines without TLS and without a token."
    )

    @model_validator(mode="after")
    def _check_times(self) -> "ParameterServers":
        if self.heartbeat_s > self.lease_s / 2:
            raise problem(
                f"`heartbeat_s`: expected at most half of `lease_s`, {self.lease_s / 2:g}, got {self.heartbeat_s:g}"
            )
        return self

    @model_validator(mode="after")
    def _check_lanes(self) -> "ParameterServers":
        if self.lanes is not None and self.max_in_flight is not None and self.lanes > self.max_in_flight:
            raise problem(f"`lanes`: expected at most `max_in_flight`, {self.max_in_flight}, got {self.lanes}")
        return self


def _resolve_metric(value: str, info: ValidationInfo) -> str:
    match = CUSTOM_CLASS.fullmatch(value)
    if match is None or not value.isprintable():
        raise expected("a file and a class such as `metrics.py:MyMetric`")
    return f"{base_of(info) / match[1]}:{match[2]}"


CustomMetrics = Annotated[
    tuple[Annotated[str, AfterValidator(_resolve_metric)], ...],
    Field(strict=False),
    BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
]


class Train(Section):
    """How the model is trained."""

    mode: Literal["local", "ps"] = Field(
        default="local",
        description="`local`: one process with the tables in its memory; `ps`: `trainers` and `servers`, each its "
        "own process.",
    )
    strategy: StrategyName = Field(
        default="async",
        description="How the trainers of mode `ps` cooperate. "
        + " ".join(f"`{name}`: {rules.description}" for name, rules in STRATEGIES.items()),
    )
    merge_batches: int = Field(
        default=4,
        ge=1,
        le=65536,
        description=f"Batches, all from one unit, that {strategies_where(lambda rules: rules.merges_batches)} push as "
        "one.",
    )
    step_batches: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description=f"Batches in a step of {strategies_where(lambda rules: rules.joins_units)}, independent of the "
        "number of running trainers. Default: `trainers`.",
    )
    servers: int = Field(default=1, ge=1, le=65536, description="Number of parameter servers in mode `ps`.")
    trainers: int = Field(default=1, ge=1, le=65536, description="Number of trainers in mode `ps`.")
    ps: ParameterServers = Field(default=ParameterServers(), description="How the roles of mode `ps` communicate.")
    epochs: int = Field(default=1, ge=1, le=MAX_COUNT, description="Number of passes over the training data.")
    batch_size: int = Field(default=512, ge=1, le=1048576, description="Samples in a batch.")
    seed: int = Field(default=1, ge=0, le=2**64 - 1, description="Seed of initial weights and shuffling.")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Threads of the network; null for all cores, shared by the trainers of one machine. With 1 every "
        "run gives the same bits.",
    )
    warm_start: str | None = Field(
        default=None,
        min_length=1,
        description="Initial parameters of a new run: another run (its job file, name or directory) or one "
        "checkpoint (its directory). Paths are relative to the current directory. Ignored when a run resumes.",
    )
    checkpoint: Checkpoint = Field(
        default=Checkpoint(), description="Checkpoints: when to write them, and which to keep."
    )
    evaluate: Evaluate = Field(default=Evaluate(), description="Evaluations inside an epoch.")
    metrics: CustomMetrics = Field(
        default=(),
        description="Your own evaluation metrics: files and classes such as `metrics.py:MyMetric`, relative to the "
        "job file.",
    )
    print_every_s: Seconds = Field(default=1.0, description="Seconds between two progress lines.")

    @model_validator(mode="after")
    def _check_mode(self) -> "Train":
        if self.mode == "local" and (self.servers > 1 or self.trainers > 1):
            key = "servers" if self.servers > 1 else "trainers"
            raise problem(f"`{key}`: belongs to mode `ps`, not `local`")
        if self.mode == "local" and self.strategy != "async":
            raise problem("`strategy`: belongs to mode `ps`, not `local`")
        if self.mode == "ps" and (local_key := self._local_key()):
            raise problem(f"`{local_key}`: belongs to mode `local`, not `ps`")
        if self.step_batches is not None and not self.rules.joins_units:
            owners = strategies_where(lambda rules: rules.joins_units)
            raise problem(f"`step_batches`: belongs to strategy {owners}, not `{self.strategy}`")
        return self

    def _local_key(self) -> str | None:
        """Return the first key that is set but not supported with parameter servers, or None."""
        keys = {
            "evaluate.every_s": self.evaluate.every_s is not None,
            "evaluate.every_steps": self.evaluate.every_steps is not None,
            "checkpoint.every_steps": self.checkpoint.every_steps is not None,
            "checkpoint.every_epochs": self.checkpoint.every_epochs != 1,
            "checkpoint.keep_epochs": self.checkpoint.keep_epochs is not False,
            "checkpoint.keep_best": self.checkpoint.keep_best is not None,
        }
        return next((key for key, is_set in keys.items() if is_set), None)

    @property
    def rules(self) -> StrategyRules:
        """What the strategy means for other keys."""
        return STRATEGIES[self.strategy]

    @property
    def group_size(self) -> int | None:
        """Batches in a step that joins units, or None for strategies without such steps."""
        return (self.step_batches or self.trainers) if self.rules.joins_units else None

    @property
    def merge_size(self) -> int:
        """Number of batches that are pushed as one."""
        return self.merge_batches if self.rules.merges_batches else 1

    @model_validator(mode="after")
    def _check_best(self) -> "Train":
        best = self.checkpoint.keep_best
        if best and not self.metrics and best not in ("auc", "log_loss"):
            raise problem(
                f"`checkpoint.keep_best`: expected `auc`, `log_loss` or a metric of `train.metrics`, got {show(best)}"
            )
        return self

    def evaluation_key(self) -> str | None:
        """Return the first key that is set but useless without evaluation data, or None."""
        keys: dict[str, Any] = {
            "train.evaluate.every_steps": self.evaluate.every_steps,
            "train.evaluate.every_s": self.evaluate.every_s,
            "train.checkpoint.keep_best": self.checkpoint.keep_best,
        }
        return next((key for key, value in keys.items() if value is not None), None)
