"""`data demo`: click logs with known click probabilities, and a job that trains on them."""

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from elasticrec import _core
from elasticrec.durable import write_atomically
from elasticrec.errors import ConfigError
from elasticrec.machine import num_cores

SLOTS = 20
CRITEO_SLOTS = 26
# Longest history of an item sequence, for kind `sequence`.
MAX_HISTORY = 12

# For each kind, a model that can learn its pattern, with settings for few samples.
_FITTING: dict[str, dict[str, Any]] = {
    "pairwise": {
        "model": {"kind": "wide_deep", "dim": 9, "hidden": [128, 64]},
        "train": {"epochs": 1, "batch_size": 512},
    },
    "multitask": {
        "model": {"kind": "mmoe", "dim": 4, "experts": 4, "expert_hidden": [32], "hidden": [16]},
        "sparse": {"init_scale": 0.05},
        "dense": {"optimizer": {"learning_rate": 0.003}},
        "train": {"epochs": 1, "batch_size": 128},
    },
    "sequence": {
        "model": {"kind": "din", "dim": 8, "hidden": [32, 16]},
        "sparse": {"init_scale": 0.05, "optimizer": {"learning_rate": 0.1}},
        "dense": {"optimizer": {"learning_rate": 0.003}},
        "train": {"epochs": 1, "batch_size": 128},
    },
}


@dataclass(frozen=True)
class Label:
    """The second label of one hour, or of all hours."""

    positives: int
    best_auc: float | None
    linear_auc: float | None


@dataclass(frozen=True)
class Hour:
    """One hour of generated data."""

    hour: int
    path: str
    samples: int
    clicks: int
    best_auc: float | None
    linear_auc: float | None
    buy: Label | None


@dataclass(frozen=True)
class DemoSummary:
    """All generated data."""

    out: Path
    samples: int
    clicks: int
    best_auc: float | None
    """AUC of the true probabilities; no model can reach more."""
    linear_auc: float | None
    """AUC of the linear part of the true log odds; no linear model can reach more."""
    buy: Label | None
    """The second label of kind `multitask`."""
    hours: list[Hour]
    num_bytes: int
    seconds: float


def write_demo(
    out: Path,
    *,
    samples: int,
    slots: int | None = None,
    hours: int = 4,
    seed: int = 1,
    format: str = "slots",
    kind: str = "pairwise",
    structure: bool = True,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> DemoSummary:
    """Write the samples, `truth.json` and `job.yaml`; the same arguments give the same bytes."""
    if format == "criteo" and slots not in (None, CRITEO_SLOTS):
        raise ConfigError(f"slots: expected {CRITEO_SLOTS} for criteo, got {slots}")
    for name in ("truth.json", "job.yaml"):
        if (out / name).exists() and not overwrite:
            raise ConfigError(f"{out / name}: exists already (--overwrite replaces it)")
    if slots is None:
        slots = CRITEO_SLOTS if format == "criteo" else SLOTS
    raw: dict[str, Any] = json.loads(
        _core.write_demo(
            str(out),
            samples=samples,
            slots=slots,
            hours=hours,
            seed=seed,
            format=format,
            overwrite=overwrite,
            threads=num_cores(),
            progress=progress,
            kind=kind,
            structure=structure,
        )
    )
    seconds, num_bytes = raw.pop("seconds"), raw.pop("bytes")
    write_atomically(out / "truth.json", json.dumps(raw, indent=1, sort_keys=True).encode() + b"\n")
    written = [Hour(**(hour | {"buy": _label(hour["buy"])})) for hour in raw.pop("hours")]
    write_atomically(out / "job.yaml", _job(written, slots, format, kind).encode())
    buy = _label(raw.pop("buy"))
    return DemoSummary(out=out, buy=buy, hours=written, num_bytes=num_bytes, seconds=seconds, **raw)


def _label(raw: dict[str, Any] | None) -> Label | None:
    return None if raw is None else Label(**raw)


def _job(hours: list[Hour], slots: int, format: str, kind: str) -> str:
    """Return a job that trains on all hours but the last and evaluates on the last."""
    data: dict[str, Any] = {"format": format, "train": [hour.path for hour in hours[:-1] or hours]}
    if len(hours) > 1:
        data["eval"] = [hours[-1].path]
    if format == "slots":
        numbered = slots - 2 if kind == "sequence" else slots
        data["slots"] = [f"0-{numbered - 1}" if numbered > 1 else "0"]
    if kind == "sequence":
        data["slots"] += ["item", {"name": "history", "share": "item", "sequence": MAX_HISTORY}]
    if kind == "multitask":
        data["labels"] = ["click", "buy"]
    body = yaml.safe_dump({"data": data}, sort_keys=False)
    rest = yaml.safe_dump(_FITTING[kind], sort_keys=False, default_flow_style=None)
    return (
        "# Demo data: `elasticrec train` this job, `elasticrec publish demo`, `elasticrec serve models/demo`.\n"
        "# `elasticrec check` prints the job with all defaults.\n"
        "name: demo\n"
        "# paths are relative to this file\n"
        f"{body}{rest}"
    )


def summary_lines(summary: DemoSummary) -> list[str]:
    """Return a summary of the generated data as lines of text."""
    rate = summary.samples / max(summary.seconds, 1e-9)
    lines = [
        f"wrote {summary.out}: {summary.samples:,} samples in {len(summary.hours)} hours, "
        f"{summary.num_bytes / 1e6:,.1f} MB, {rate:,.0f} samples/s",
        f"  clicks: {summary.clicks / summary.samples:.1%} of the samples",
        f"  best possible AUC {_auc(summary.best_auc)}, with a linear model {_auc(summary.linear_auc)}",
    ]
    if summary.buy:
        lines.append(
            f"  buys: {summary.buy.positives / summary.samples:.1%} of the samples; best possible AUC "
            f"{_auc(summary.buy.best_auc)}, with a linear model {_auc(summary.buy.linear_auc)}"
        )
    if len(summary.hours) > 1:
        last = summary.hours[-1]
        buy = f", of buys {_auc(last.buy.best_auc)}" if last.buy else ""
        lines.append(f"  best possible AUC on the last hour, {last.path}: {_auc(last.best_auc)}{buy}")
    return [*lines, f"  train on it: elasticrec train {shlex.quote(str(summary.out / 'job.yaml'))}"]


def _auc(value: float | None) -> str:
    return "unknown (one outcome only)" if value is None else f"{value:.4f}"
