"""The `train` section: how often the data is read, when it is evaluated on and when a training saves itself."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from elasticrec.config.fields import (
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

# Metrics that every evaluation has; the user's own must not take their names.
METRICS = ("auc", "log_loss", "copc")


class Checkpoint(Section):
    """When a training saves itself, and what is kept."""

    every_s: Seconds = Field(default=600.0, description="Seconds between checkpoints, or a duration such as `30m`.")
    every_steps: int | None = Field(
        default=None, ge=1, le=2**53, description="Also after so many batches; null for never."
    )
    every_epochs: int = Field(
        default=1, ge=1, le=MAX_COUNT, description="Also at the end of every so many epochs, and of the last one."
    )
    keep: int = Field(default=3, ge=1, le=MAX_COUNT, description="How many of the newest checkpoints are kept.")
    keep_epochs: bool | Annotated[tuple[int, ...], Field(strict=False)] = Field(
        default=False,
        description="Snapshots to keep for good, beside the newest: those at the ends of these epochs, counted from 0, "
        "or `true` for all.",
    )
    keep_best: str | None = Field(
        default=None,
        min_length=1,
        description="Metric of the evaluation (`auc`, `log_loss`, or one of the user's own) by which the best "
        "checkpoint is kept, beside the newest; null for none.",
    )
    best_label: str | None = Field(
        default=None, description="Label that `keep_best` looks at; the first one if not given."
    )
    best_is: Literal["highest", "lowest"] | None = Field(
        default=None, description="Which value is best; lowest for `log_loss` and highest for others if not given."
    )

    @field_validator("keep_epochs", mode="before")
    @classmethod
    def _check_epochs(cls, value: Any) -> Any:
        """All of it here: of a union pydantic would tell what is wrong with each side."""
        epochs = value if isinstance(value, list | tuple) else []
        if isinstance(value, bool) or (epochs and all(type(epoch) is int and 0 <= epoch for epoch in epochs)):
            return value
        raise expected("`true`, `false` or a list of epochs counted from 0")

    @field_validator("keep_best")
    @classmethod
    def _check_metric(cls, value: str | None) -> str | None:
        if value == "copc":
            raise expected("a metric of which more or less is better, such as `auc`")
        return value

    def keeps_epoch(self, epoch: int) -> bool:
        """Whether the snapshot at the end of an epoch, counted from 0, is kept for good."""
        return self.keep_epochs if isinstance(self.keep_epochs, bool) else epoch in self.keep_epochs


class Evaluate(Section):
    """When `data.eval` is evaluated on, beside the end of each epoch."""

    every_steps: int | None = Field(default=None, ge=1, le=2**53, description="After so many batches; null for never.")
    every_s: Seconds | None = Field(
        default=None, description="Seconds between evaluations, or a duration such as `30m`; null for never."
    )


class Tls(Section):
    """PEM files of TLS between roles; flags and environment variables of a role go before them."""

    cert: PathText | None = Field(
        default=None, description="Certificate that a role shows where it listens, and those between it and `ca`."
    )
    key: PathText | None = Field(default=None, description="Key of that certificate.")
    ca: PathText | None = Field(
        default=None, description="Certificates of the authorities that a role trusts where it connects."
    )

    @model_validator(mode="after")
    def _check_pair(self) -> "Tls":
        if (self.cert is None) != (self.key is None):
            raise problem(
                f"`{'key' if self.key is None else 'cert'}`: expected a certificate and its key, got one of them"
            )
        return self


class ParameterServers(Section):
    """How trainers, servers and the coordinator talk to each other."""

    lanes: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Batches that a trainer of strategy `async` steps at once; they share its threads. Null for as "
        "many as it has threads, at most 4 and half of `max_in_flight`.",
    )
    max_in_flight: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="Batches of a trainer between their pull and the acknowledgement of their push; 1: never stale. "
        "Null for 3 of each lane.",
    )
    sends_before_receive: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="A lane asks for the dense values again after so many pushes; null for 1 where it has one batch in "
        "flight, else 2. Rows come with every batch.",
    )
    lease_s: Seconds = Field(default=5.0, description="A role that was silent for so long is replaced.")
    heartbeat_s: Seconds = Field(default=1.0, description="Seconds between two signs of life.")
    deadline_s: Seconds = Field(default=30.0, description="A request that is not answered in this time has failed.")
    retries: int | None = Field(
        default=None,
        ge=0,
        le=MAX_COUNT,
        description="How often in a row a trainer tries servers again that do not answer, a lease apart; a server that "
        "died is replaced in about two leases. Null for ever.",
    )
    threads: int = Field(
        default=1, ge=1, le=4096, description="Threads of a server for a load, whole-table steps and large batches."
    )
    memory_bytes: Bytes | None = Field(
        default=None,
        description="Memory of rows and dense values that a server may have, such as `4GiB`. From 90 % on new signs "
        "are dropped and counted, at the end of a pass the rows with the lowest score go; null for no limit.",
    )
    tls: Tls = Field(default=Tls(), description="TLS between roles; without files they talk in clear.")
    insecure: bool = Field(
        default=False, description="Lets roles talk to other machines without TLS, and even without a token."
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


_METRIC = re.compile(r"(.+\.py):([A-Za-z_][A-Za-z0-9_]*)")


def _own_metric(value: str, info: ValidationInfo) -> str:
    match = _METRIC.fullmatch(value)
    if match is None or not value.isprintable():
        raise expected("a file and a class such as `metrics.py:MyMetric`")
    return f"{base_of(info) / match[1]}:{match[2]}"


OwnMetrics = Annotated[
    tuple[Annotated[str, AfterValidator(_own_metric)], ...],
    Field(strict=False),
    BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
]


class Train(Section):
    """How the model is trained."""

    mode: Literal["local", "ps"] = Field(
        default="local",
        description="`local`: one process, tables in its memory; `ps`: `trainers` and `servers`, each a process.",
    )
    strategy: Literal["async", "sync", "half_async", "geo"] = Field(
        default="async",
        description="How trainers of mode `ps` work together. `async`: each pushes on its own. `sync`: batches of "
        "several trainers make one step, as one large batch would. `half_async`: a trainer pushes `merge_batches` "
        "batches as one step and waits for the others. `geo`: a trainer steps rows of its own for `merge_batches` "
        "batches and exchanges what changed.",
    )
    merge_batches: int = Field(
        default=4, ge=1, le=65536, description="Batches that `half_async` and `geo` push as one; all of one unit."
    )
    step_batches: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description="Batches of a step of `sync`, whatever the number of trainers at work; `trainers` if not given.",
    )
    servers: int = Field(default=1, ge=1, le=65536, description="Parameter servers of mode `ps`.")
    trainers: int = Field(default=1, ge=1, le=65536, description="Trainers of mode `ps`.")
    ps: ParameterServers = Field(default=ParameterServers(), description="How roles of mode `ps` talk to each other.")
    epochs: int = Field(default=1, ge=1, le=MAX_COUNT, description="How often the training data is read.")
    batch_size: int = Field(default=512, ge=1, le=1048576, description="Samples in a batch.")
    seed: int = Field(default=1, ge=0, le=2**64 - 1, description="Decides initial weights and shuffling.")
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Threads of the network; null for all cores, which trainers on one machine share; 1 for the same "
        "bits each run.",
    )
    warm_start: str | None = Field(
        default=None,
        min_length=1,
        description="Parameters that a new run begins with: those of another run (its job file, name or directory) or "
        "of one checkpoint (its directory); paths start from the current directory. Not read when a run goes on.",
    )
    checkpoint: Checkpoint = Field(default=Checkpoint(), description="When a checkpoint is written, and which stay.")
    evaluate: Evaluate = Field(default=Evaluate(), description="When it is evaluated inside an epoch.")
    metrics: OwnMetrics = Field(
        default=(),
        description="Metrics of the user's own over the evaluation: files and classes such as `metrics.py:MyMetric`, "
        "from the directory of the job file.",
    )
    print_every_s: Seconds = Field(default=1.0, description="Seconds between two progress lines.")

    @model_validator(mode="after")
    def _check_mode(self) -> "Train":
        if self.mode == "local" and (self.servers > 1 or self.trainers > 1):
            key = "servers" if self.servers > 1 else "trainers"
            raise problem(f"`{key}`: belongs to mode `ps`, not `local`")
        if self.mode == "local" and self.strategy != "async":
            raise problem("`strategy`: belongs to mode `ps`, not `local`")
        if self.mode == "ps" and (of_local := self._local_key()):
            raise problem(f"`{of_local}`: belongs to mode `local`, not `ps`")
        if self.step_batches is not None and self.strategy != "sync":
            raise problem(f"`step_batches`: belongs to strategy `sync`, not `{self.strategy}`")
        return self

    def _local_key(self) -> str | None:
        """A key that trainings with servers would not look at."""
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
    def group_size(self) -> int | None:
        """Of `sync` the batches of a step."""
        return (self.step_batches or self.trainers) if self.strategy == "sync" else None

    @property
    def merge_size(self) -> int:
        """Batches that are pushed as one."""
        return self.merge_batches if self.strategy in ("half_async", "geo") else 1

    @model_validator(mode="after")
    def _check_best(self) -> "Train":
        best = self.checkpoint.keep_best
        if best and not self.metrics and best not in ("auc", "log_loss"):
            raise problem(
                f"`checkpoint.keep_best`: expected `auc` or `log_loss`, or one of the user's own with `metrics`, "
                f"got {show(best)}"
            )
        return self

    def needs_evaluation(self) -> str | None:
        """The first key that is of no use without data to evaluate on."""
        keys: dict[str, Any] = {
            "train.evaluate.every_steps": self.evaluate.every_steps,
            "train.evaluate.every_s": self.evaluate.every_s,
            "train.checkpoint.keep_best": self.checkpoint.keep_best,
        }
        return next((key for key, value in keys.items() if value is not None), None)
