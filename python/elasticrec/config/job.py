"""The job, and its sections `model` and `dense`."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, field_validator, model_validator

from elasticrec.config.columns import Columns
from elasticrec.config.data import Data
from elasticrec.config.document import dump
from elasticrec.config.fields import CUSTOM_CLASS, Name, Section, absolute_path, expected, problem
from elasticrec.config.publish import Cube, Publish, check_publish
from elasticrec.config.secret import REFERENCES
from elasticrec.config.serve import Serve
from elasticrec.config.sparse import Sparse
from elasticrec.config.train import Train
from elasticrec.errors import ConfigError

# Number of the function hash(slot name, value). Manifests record it, so that serving hashes as training did.
HASH_VERSION = 1


MODELS = ("lr", "fm", "dnn", "wide_deep", "deepfm", "dcn_v2", "mmoe", "din")


def _check_kind(value: str, info: ValidationInfo) -> str:
    """Return the name of a built-in model, or the file (as an absolute path) and class of a user's model."""
    if value in MODELS:
        return value
    match = CUSTOM_CLASS.fullmatch(value)
    if match is None or not value.isprintable():
        names = ", ".join(f"`{name}`" for name in MODELS)
        raise expected(f"{names} or a class such as `my_model.py:MyModel`")
    return f"{absolute_path(match[1], info)}:{match[2]}"


_Widths = Annotated[tuple[Annotated[int, Field(ge=1, le=65536)], ...], Field(min_length=1, max_length=64, strict=False)]


class Model(Section):
    """The network above the embeddings."""

    kind: Annotated[str, AfterValidator(_check_kind)] = Field(
        default="wide_deep",
        description=f"The model: {', '.join(f'`{name}`' for name in MODELS)}, "
        "or your own class as FILE.py:CLASS, relative to the job file.",
    )
    dim: int = Field(default=9, ge=1, le=1024, description="Length of the embedding vector of a sign.")
    hidden: _Widths = Field(
        default=(400, 400, 400),
        description="Widths of the hidden layers, first to last; for `mmoe`, of each label's tower.",
    )
    cross_layers: int = Field(default=3, ge=1, le=64, description="`dcn_v2`: number of cross layers.")
    experts: int = Field(default=4, ge=1, le=256, description="`mmoe`: number of experts that the labels share.")
    expert_hidden: _Widths = Field(default=(128,), description="`mmoe`: widths of the hidden layers of an expert.")
    attention_hidden: _Widths = Field(
        default=(36,), description="`din`: widths of the hidden layers of the attention over a sequence."
    )
    options: dict[str, Any] = Field(
        default={}, description="Further options for a model of your own, available as `options.extra`."
    )

    @field_validator("options", mode="before")
    @classmethod
    def _empty_means_none(cls, value: Any) -> Any:
        return {} if value is None else value

    @field_validator("options")
    @classmethod
    def _check_options(cls, value: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if value and info.data.get("kind") in MODELS:
            raise problem(f"`{info.data['kind']}` takes no `options`; they are for a model of your own")
        return value

    @property
    def custom_class(self) -> tuple[Path, str] | None:
        """File and class of a custom model, or None for a built-in model."""
        match = CUSTOM_CLASS.fullmatch(self.kind)
        return (Path(match[1]), match[2]) if match else None


class DenseOptimizer(Section):
    """The optimizer of the network."""

    kind: Literal["adam", "adagrad", "sgd"] = Field(default="adam", description="The optimizer.")
    learning_rate: float = Field(default=0.001, gt=0, description="Step size.")


class Dense(Section):
    """The parameters of the network."""

    optimizer: DenseOptimizer = Field(default=DenseOptimizer(), description="Optimizer of the network.")


def _check_din(data: Data) -> None:
    sequences = {slot.name: slot.share for slot in data.slots if slot.sequence}
    if not sequences:
        raise problem(
            "`din` needs a sequence, such as `data.slots: [item, {name: history, share: item, sequence: 20}]`"
        )
    for name, share in sequences.items():
        if share is None or share in sequences:
            raise problem(
                f"`din` compares the sequence `{name}` with an ordinary slot; name that slot in `data.slots[].share`"
            )


class Job(Section):
    """One job: what to train on which data, and how to publish and serve the result."""

    name: Name = Field(description="Name of the job and of its run.")
    data: Data = Field(description="The data.")
    model: Model = Field(default=Model(), description="The network.")
    sparse: Sparse = Field(default=Sparse(), description="The embeddings and their optimizer.")
    dense: Dense = Field(default=Dense(), description="The optimizer of the network.")
    train: Train = Field(default=Train(), description="The training.")
    publish: Publish = Field(default=Publish(), validate_default=True, description="Publishing of versions.")
    cube: Cube = Field(default=Cube(), description="The online store.")
    serve: Serve = Field(default=Serve(), description="The prediction server.")

    _source: str = PrivateAttr(default="job")
    _model_source: bytes | None = PrivateAttr(default=None)
    _reader_source: bytes | None = PrivateAttr(default=None)

    @field_validator("model")
    @classmethod
    def _check_sequences(cls, value: Model, info: ValidationInfo) -> Model:
        if value.kind == "din" and "data" in info.data:
            _check_din(info.data["data"])
        return value

    @field_validator("publish")
    @classmethod
    def _name_the_model(cls, value: Publish, info: ValidationInfo) -> Publish:
        check_publish(value, info)
        if value.model or "name" not in info.data:
            return value
        return value.model_copy(update={"model": info.data["name"]})

    @model_validator(mode="after")
    def _check_servers(self) -> "Job":
        if self.train.servers > self.sparse.partitions:
            raise problem(
                f"train.servers: expected at most {self.sparse.partitions} (`sparse.partitions`), "
                f"got {self.train.servers}"
            )
        return self

    @model_validator(mode="after")
    def _check_rows(self) -> "Job":
        serve = self.serve
        if serve.rows == "store" and not self.cube.addresses:
            # Without `models`, the server serves the models of the command line, or the model of the job.
            if not serve.models or not all(model.addresses for model in serve.models):
                raise problem("`serve.rows`: `store` needs `cube.addresses`, the servers that hold the rows")
        return self

    @model_validator(mode="after")
    def _check_epochs(self) -> "Job":
        if self.data.hours is not None and self.train.epochs > 1:
            raise problem(
                f"`train.epochs`: with `data.hours` expected 1, as each hour is read once, got {self.train.epochs}"
            )
        return self

    @model_validator(mode="after")
    def _check_missing(self) -> "Job":
        if self.train.mode == "ps" and self.train.rules.joins_units and self.data.on_missing == "skip":
            raise problem(
                f"`data.on_missing`: with `train.strategy: {self.train.strategy}` expected `fail`, because its steps "
                "need all units"
            )
        return self

    @model_validator(mode="after")
    def _check_strategy(self) -> "Job":
        if not self.train.rules.adds_increments:
            return self
        for key, kind in (("sparse", self.sparse.optimizer.kind), ("dense", self.dense.optimizer.kind)):
            if kind == "adam":
                raise problem(
                    f"{key}.optimizer.kind: with `train.strategy: {self.train.strategy}` expected another optimizer, "
                    "got `adam`, because its steps from several trainers cannot be summed"
                )
        return self

    @model_validator(mode="after")
    def _check_evaluation(self) -> "Job":
        if not self.data.eval and (key := self.train.evaluation_key()):
            raise problem(f"`{key}` needs `data.eval`, expected files to evaluate on, got none")
        if self.train.checkpoint.best_label not in (None, *self.data.labels):
            names = ", ".join(f"`{label}`" for label in self.data.labels)
            raise problem(
                f"`train.checkpoint.best_label`: expected one of {names}, got `{self.train.checkpoint.best_label}`"
            )
        return self

    @property
    def source(self) -> str:
        """Where the job was read from, for messages."""
        return self._source

    def model_source(self) -> bytes | None:
        """Return the file of a user's model, or None. It is read once, so edits do not reach a running training."""
        if self._model_source is None and self.model.custom_class is not None:
            self._model_source = self._read_custom(self.model.custom_class[0], "model.kind")
        return self._model_source

    def reader_source(self) -> bytes | None:
        """Return the file of a user's reader, or None. It is read once."""
        if self._reader_source is None and self.data.reader is not None:
            self._reader_source = self._read_custom(Path(self.data.reader.rpartition(":")[0]), "data.reader")
        return self._reader_source

    def _read_custom(self, path: Path, key: str) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            reason = (error.strerror or "cannot be read").lower()
            raise ConfigError(f"{self._source}: {key}: {path}: {reason}") from None

    def with_columns(self, columns: Columns) -> "Job":
        """Return the same job with completed columns."""
        return self._with_data(columns=columns)

    def without_holdout(self) -> "Job":
        """Return the same job over all samples of its files."""
        return self._with_data(eval=())

    def _with_data(self, **changes: Any) -> "Job":
        return self.model_copy(update={"data": self.data.model_copy(update=changes)})

    def to_dict(self, *, references: bool = False) -> dict[str, Any]:
        """Return all keys, with defaults, as plain values. Secrets are `***`, or their references on request."""
        return self.model_dump(mode="json", context={REFERENCES: references})

    def to_yaml(self, *, references: bool = False) -> str:
        """Return the resolved job as YAML. A job with secrets can be loaded again only with `references`."""
        return dump(self.to_dict(references=references))

    def features(self) -> dict[str, Any]:
        """Return the feature handling as the Rust parser reads it and as manifests store it."""
        data = self.data
        features: dict[str, Any] = {
            "format": data.format,
            "hash": HASH_VERSION,
            "slots": [slot.model_dump(exclude_none=True) for slot in data.inputs],
            "dense": [column.feature() for column in data.dense],
            "labels": list(data.labels),
        }
        if data.columns is not None:
            features["columns"] = data.columns.model_dump(
                mode="json", include={"names", "header", "delimiter", "weight", "time", "null"}, exclude_none=True
            )
        optional = {"modulo": data.modulo, "padding": data.padding, "separate_slots": data.separate_slots or None}
        return features | {key: value for key, value in optional.items() if value is not None}


def job_schema() -> dict[str, Any]:
    """Return the JSON Schema of a job file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}
