"""The `sparse` section: the embedding table and its optimizer."""

from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from elasticrec.config.fields import Section, problem

# Rows store the epoch or day in which they were last seen in 14 bits; this is the largest value.
MAX_SEEN = 2**14 - 1

# Settings of each optimizer, with their defaults.
SETTINGS: dict[str, dict[str, float]] = {
    "sgd": {"learning_rate": 0.05},
    "adagrad": {"learning_rate": 0.05, "initial_accumulator": 1.0, "epsilon": 1e-8},
    "row_adagrad": {"learning_rate": 0.05, "initial_accumulator": 1.0, "epsilon": 1e-8},
    "adam": {"learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "ftrl": {"learning_rate": 0.05, "beta": 1.0, "l1": 0.0, "l2": 0.0},
}


class SparseOptimizer(Section):
    """The optimizer of the rows. Settings that are left out have the default of their kind."""

    kind: Literal["sgd", "adagrad", "row_adagrad", "adam", "ftrl"] = Field(
        default="adagrad",
        description="The optimizer. `row_adagrad` keeps one accumulator per row; `adam` updates only the rows of a "
        "batch.",
    )
    learning_rate: float | None = Field(default=None, gt=0, description="Step size; 0.05, or 0.001 for `adam`.")
    initial_accumulator: float | None = Field(
        default=None, ge=0, description="Adagrad: initial sum of squared gradients; 1.0."
    )
    epsilon: float | None = Field(default=None, ge=0, description="Adagrad, Adam: added to the denominator; 1e-8.")
    beta1: float | None = Field(default=None, ge=0, lt=1, description="Adam: decay of the mean gradient; 0.9.")
    beta2: float | None = Field(
        default=None, ge=0, lt=1, description="Adam: decay of the mean squared gradient; 0.999."
    )
    beta: float | None = Field(default=None, gt=0, description="FTRL: smooths the first steps; 1.0.")
    l1: float | None = Field(default=None, ge=0, description="FTRL: L1 regularisation; 0.0.")
    l2: float | None = Field(default=None, ge=0, description="FTRL: L2 regularisation; 0.0.")

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any) -> Any:
        kind = value.get("kind", "adagrad") if isinstance(value, dict) else None
        return {**SETTINGS[kind], **value} if isinstance(kind, str) and kind in SETTINGS else value

    @model_validator(mode="after")
    def _check_settings(self) -> "SparseOptimizer":
        for name in type(self).model_fields:
            if name != "kind" and name not in SETTINGS[self.kind] and getattr(self, name) is not None:
                names = ", ".join(f"`{setting}`" for setting in SETTINGS[self.kind])
                raise problem(f"`{name}` is not a setting of `{self.kind}`, expected {names}")
        return self

    @model_serializer(mode="wrap")
    def _only_own(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if value is not None}


class Admission(Section):
    """Columns that a sign gets only after enough shows; until then they read as 0 and are not trained."""

    count: int = Field(
        default=0, ge=0, le=2**32 - 1, description="Shows of a sign before it gets these columns; 0 for immediately."
    )
    columns: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = Field(
        default=None, description="Columns of the model that are admitted late; null for all but the first."
    )


class Decay(Section):
    """Decay of statistics at the end of every epoch, or of every day with `data.hours`."""

    show_click: float = Field(default=1.0, gt=0, le=1, description="Factor for the show and click counts of every row.")


class Evict(Section):
    """Eviction of rows at the end of every epoch or day, after the decay. Evicted rows read as 0 and may return."""

    min_score: float | None = Field(
        default=None,
        ge=0,
        description="Evict rows whose score `nonclk_coeff · (show - click) + click_coeff · click` is below this; "
        "null for none.",
    )
    max_age: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEEN,
        description="Evict rows that were not seen for more than this many epochs, or days with `data.hours`; null "
        "for none.",
    )
    nonclk_coeff: float = Field(
        default=0.1, ge=0, description="Weight of a show without a click in the score of a row."
    )
    click_coeff: float = Field(default=1.0, ge=0, description="Weight of a click in the score of a row.")


class Sparse(Section):
    """The embedding table."""

    partitions: int = Field(
        default=256,
        ge=1,
        le=65536,
        description="Number of partitions of the table, fixed for its lifetime. A server owns whole partitions.",
    )
    init_scale: float = Field(
        default=0.01, ge=0, description="New weights are uniform in -init_scale..init_scale; 0 starts at zero."
    )
    optimizer: SparseOptimizer = Field(default=SparseOptimizer(), description="Optimizer of the rows.")
    admission: Admission = Field(default=Admission(), description="Columns that are admitted late.")
    decay: Decay = Field(default=Decay(), description="Decay of statistics at the end of an epoch or day.")
    evict: Evict = Field(default=Evict(), description="Eviction of rows at the end of an epoch or day.")
