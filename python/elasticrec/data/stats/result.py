"""The statistics of a job's data."""

from dataclasses import dataclass

from elasticrec.data.stats.unused import UnusedColumn


@dataclass(frozen=True)
class SlotStats:
    """Statistics of a slot."""

    name: str
    coverage: float
    """Share of the samples that have a sign."""
    num_signs: int
    """Distinct signs."""
    mean_signs: float
    """Signs per sample."""
    click_rate: float | None
    """Click rate of the samples that have a sign."""
    auc: float | None
    """AUC of the smoothed click rates of the signs, on other samples than the rates were learned from."""
    drift: float | None
    """Jensen–Shannon distance between training and evaluation data."""
    unseen: float | None
    """Share of the signs in the evaluation data that do not occur in the training data."""


@dataclass(frozen=True)
class DenseStats:
    """Statistics of a dense column, before normalisation."""

    name: str
    coverage: float
    min: float | None
    mean: float | None
    max: float | None
    quantiles: dict[str, float]
    auc: float | None
    drift: float | None


@dataclass(frozen=True)
class Stats:
    """Statistics of a job's data."""

    source: str
    num_train: int
    num_eval: int
    has_eval: bool
    """False if a part of the training data is held out to measure on."""
    is_sample: bool
    """Whether only a part of the data was read."""
    labels: dict[str, tuple[float | None, float | None]]
    """Rate of each label in the training and the evaluation data."""
    slots: list[SlotStats]
    dense: list[DenseStats]
    num_records: int
    num_bad: int
    bad: list[str]
    unused: list[UnusedColumn]
    warnings: list[str]
