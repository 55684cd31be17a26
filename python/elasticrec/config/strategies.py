"""The rules of each strategy of `train.mode: ps` for the job file; `training/strategies/` has the code."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

StrategyName = Literal["async", "sync", "half_async", "geo"]


@dataclass(frozen=True)
class StrategyRules:
    """What a strategy means for other keys of the job and for the coordinator."""

    description: str
    """For the reference of the job file."""
    merges_batches: bool = False
    """Whether a push contains `train.merge_batches` batches."""
    joins_units: bool = False
    """Whether a step contains batches of several units, so that no unit may be missing."""
    adds_increments: bool = False
    """Whether servers add up increments of rows, which rules out optimizers whose steps cannot be summed."""


STRATEGIES: dict[StrategyName, StrategyRules] = {
    "async": StrategyRules("each pushes independently."),
    "sync": StrategyRules("batches of several trainers form one step, like one large batch.", joins_units=True),
    "half_async": StrategyRules(
        "a trainer pushes `merge_batches` batches as one step and waits for the others.", merges_batches=True
    ),
    "geo": StrategyRules(
        "a trainer updates its own copy of the rows for `merge_batches` batches, then exchanges changes with the "
        "servers.",
        merges_batches=True,
        adds_increments=True,
    ),
}


def strategies_where(condition: Callable[[StrategyRules], bool]) -> str:
    """Return the names of the strategies whose rules meet a condition, for messages: `half_async` and `geo`."""
    return " and ".join(f"`{name}`" for name, rules in STRATEGIES.items() if condition(rules))
