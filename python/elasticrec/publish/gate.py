"""The gate: checks that a version must pass before it may be offered."""

import contextlib
import hashlib
import math
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

from elasticrec.config.publish import Gate
from elasticrec.errors import ModelError
from elasticrec.repository.repository import Repository
from elasticrec.repository.storage import join
from elasticrec.repository.verify import non_finite_tensors
from elasticrec.repository.version import DENSE_FILE, Version


@dataclass(frozen=True)
class Candidate:
    """The figures that the gate checks."""

    rows: int
    metrics: dict[str, Any]
    """As in the manifest: `train` and `eval`, each a list with one entry per label."""
    non_finite: tuple[str, ...] = ()
    """Names of tensors with values that are not finite."""


@dataclass(frozen=True)
class GateCheck:
    """Checks versions against a job's gate and the current version."""

    gate: Gate
    repository: Repository
    current_rows: int | None
    """Rows of the current version, or None if there is none, or it was removed or is damaged."""

    @classmethod
    def against(cls, gate: Gate, repository: Repository, current: int | None) -> Self:
        """Return the check of versions that would replace version `current`.

        If the repository cannot be reached, the error is raised: a version that cannot be checked is not offered.
        """
        return cls(gate, repository, _rows_of(repository, current))

    def refusals(self, version: Version, dense: bytes | None = None) -> list[str]:
        """Return the reasons why a version must not be offered, one line each; empty if it passes.

        `dense` is the content of its dense file; without it the file is read and its checksum verified.
        """
        content = _read_dense(self.repository, version) if dense is None else dense
        non_finite = non_finite_tensors(content, version.manifest["dense"]["tensors"])
        candidate = Candidate(version.rows, version.manifest["metrics"], tuple(non_finite))
        return refusals(self.gate, candidate, self.current_rows)


def _rows_of(repository: Repository, number: int | None) -> int | None:
    """Return the number of rows of a version, or None if it was removed or is damaged."""
    with contextlib.suppress(ModelError, FileNotFoundError):
        return None if number is None else repository.version(number).rows
    return None


def _read_dense(repository: Repository, version: Version) -> bytes:
    name = f"{version.name}/{DENSE_FILE}"
    content = repository.storage.read(name)
    if hashlib.sha256(content).hexdigest() != version.files[DENSE_FILE].sha256:
        raise ModelError(f"{join(repository.location, name)}: sha-256 differs from the manifest, the file is damaged")
    return content


def refusals(gate: Gate, candidate: Candidate, current_rows: int | None) -> list[str]:
    """Return the reasons why a candidate fails the gate, one line each; empty if it passes."""
    reasons = [f"dense weights: `{name}` has values that are not finite" for name in candidate.non_finite[:3]]
    measured, where = _first_metrics(candidate.metrics)
    if gate.min_auc is not None:
        auc = measured.get("auc")
        if not _is_number(auc) or auc < gate.min_auc:
            reasons.append(f"AUC of the {where}: expected at least {gate.min_auc:g}, got {_format(auc)}")
    if gate.max_log_loss is not None:
        loss = measured.get("log_loss")
        if not _is_number(loss) or loss > gate.max_log_loss:
            reasons.append(f"log loss of the {where}: expected at most {gate.max_log_loss:g}, got {_format(loss)}")
    if current_rows:
        lost = 1 - candidate.rows / current_rows
        if lost > gate.max_row_loss:
            reasons.append(
                f"rows: expected to lose at most {gate.max_row_loss:.0%} of the current version's {current_rows:,}, "
                f"got {candidate.rows:,}, a loss of {lost:.0%}"
            )
    return reasons


def _first_metrics(metrics: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the metrics of the first label, of the evaluation or else of the training, and their origin."""
    for key, origin in (("eval", "evaluation"), ("train", "last pass")):
        found = metrics.get(key)
        if found:
            first = found[0]
            return (first if isinstance(first, dict) else {}), origin
    return {}, "last pass"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _format(value: Any) -> str:
    return f"{value:.4f}" if _is_number(value) else "none"
