"""The gate before an offer: what a version has to be, and why it is not, in words."""

import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from elasticrec.config.publish import Gate


@dataclass(frozen=True)
class Candidate:
    """What the gate looks at."""

    rows: int
    metrics: dict[str, Any]
    """As in the manifest: `train` and `eval`, a list by label each."""
    not_finite: tuple[str, ...] = ()
    """Tensors with values that are not numbers."""


def refusals(gate: Gate, candidate: Candidate, current_rows: int | None) -> list[str]:
    """Why a version is not to be offered, a line each; empty if it may be."""
    reasons = [f"dense weights: `{name}` has values that are not finite" for name in candidate.not_finite[:3]]
    measured, where = _measured(candidate.metrics)
    if gate.min_auc is not None:
        auc = measured.get("auc")
        if not _is_number(auc) or auc < gate.min_auc:
            reasons.append(f"AUC of the {where}: expected at least {gate.min_auc:g}, got {_shown(auc)}")
    if gate.max_log_loss is not None:
        loss = measured.get("log_loss")
        if not _is_number(loss) or loss > gate.max_log_loss:
            reasons.append(f"log loss of the {where}: expected at most {gate.max_log_loss:g}, got {_shown(loss)}")
    if current_rows:
        lost = 1 - candidate.rows / current_rows
        if lost > gate.max_row_loss:
            reasons.append(
                f"rows: expected to lose at most {gate.max_row_loss:.0%} of the current version's {current_rows:,}, "
                f"got {candidate.rows:,}, which is {lost:.0%} less"
            )
    return reasons


def _measured(metrics: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The metrics of the first label: of the evaluation, or of the training without one."""
    for key, words in (("eval", "evaluation"), ("train", "last pass")):
        found = metrics.get(key)
        if found:
            first = found[0]
            return (first if isinstance(first, dict) else {}), words
    return {}, "last pass"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: Any) -> str:
    return f"{value:.4f}" if _is_number(value) else "none"
