"""The gate before an offer: what a version has to be, and why it is not, in words."""

import contextlib
import hashlib
import math
from dataclasses import dataclass
from typing import Any, TypeGuard

from elasticrec.config.publish import Gate
from elasticrec.errors import ModelError
from elasticrec.repository.repository import Repository
from elasticrec.repository.storage import join
from elasticrec.repository.verify import tensors_not_finite
from elasticrec.repository.version import DENSE_FILE, Version


@dataclass(frozen=True)
class Candidate:
    """What the gate looks at."""

    rows: int
    metrics: dict[str, Any]
    """As in the manifest: `train` and `eval`, a list by label each."""
    not_finite: tuple[str, ...] = ()
    """Tensors with values that are not numbers."""


@dataclass(frozen=True)
class Judge:
    """The gate of a job, and the version that new ones are compared with."""

    gate: Gate
    repository: Repository
    current_rows: int | None
    """Rows of the current version; None if there is none that can be read."""

    def refusals(self, version: Version, dense: bytes | None = None) -> list[str]:
        """Return why a version must not be offered, a line each; empty if it may be.

        `dense` is the content of its dense file, if the caller has it; otherwise the file is read and checked.
        """
        content = _read_dense(self.repository, version) if dense is None else dense
        not_finite = tensors_not_finite(content, version.manifest["dense"]["tensors"])
        candidate = Candidate(version.rows, version.manifest["metrics"], tuple(not_finite))
        return refusals(self.gate, candidate, self.current_rows)


def rows_of(repository: Repository, number: int | None) -> int | None:
    """Return the number of rows of a version, or None if it is gone or damaged."""
    with contextlib.suppress(ModelError, FileNotFoundError):
        return None if number is None else repository.version(number).rows
    return None


def _read_dense(repository: Repository, version: Version) -> bytes:
    name = f"{version.name}/{DENSE_FILE}"
    content = repository.storage.read(name)
    if hashlib.sha256(content).hexdigest() != version.files[DENSE_FILE].sha256:
        raise ModelError(f"{join(repository.place, name)}: sha-256 differs from the manifest, the file is damaged")
    return content


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
