"""The keys of a job that determine its parameters: a training may resume only if they are unchanged."""

import hashlib
import json
from typing import Any

from elasticrec.config.data import Holdout
from elasticrec.config.document import flatten
from elasticrec.config.job import Job


def decisive_keys(job: Job) -> dict[str, Any]:
    """Return the dotted keys that determine the parameters, with their values.

    Keys that may change before a resume are left out: epochs, threads, checkpoints, evaluation and metrics, serving.
    """
    features = job.features()
    parts: dict[str, Any] = {
        "hash": features["hash"],
        "data.format": features["format"],
        "data.slots": features["slots"],
        "data.dense": features["dense"],
        "data.labels": features["labels"],
        "data.columns": features.get("columns"),
        "data.modulo": features.get("modulo"),
        "data.padding": features.get("padding"),
        "data.separate_slots": features.get("separate_slots", False),
        "data.reader": _class_digest(job.data.reader, job.reader_source()),
        "data.eval": job.data.eval.model_dump(exclude_none=True) if isinstance(job.data.eval, Holdout) else None,
        "data.train": list(job.data.train),
        # `end` and the handling of late hours may change while a run continues.
        "data.hours": job.data.hours and job.data.hours.model_dump(include={"start", "timezone", "day_end_hour"}),
        "data.unit_bytes": job.data.unit_bytes,
        "data.shuffle": job.data.shuffle,
        "train.mode": job.train.mode,
        "train.strategy": job.train.strategy,
        "train.merge_batches": job.train.merge_size,
        "train.step_batches": job.train.group_size,
        "train.batch_size": job.train.batch_size,
        "train.seed": job.train.seed,
        "train.warm_start": job.train.warm_start,
    }
    for name, section in (("model", job.model), ("sparse", job.sparse), ("dense", job.dense)):
        parts.update(flatten(section.model_dump(mode="json", exclude={"options"}), name))
    parts["model.options"] = job.model.options
    if job.model.custom_class is not None:
        parts["model.kind"] = _class_digest(job.model.kind, job.model_source())
    return parts


def meaning_keys(job: Job) -> dict[str, Any]:
    """Return the keys that give parameters their meaning: `decisive_keys` without training data and method.

    Checkpoints store them.
    """
    learned_from = (
        "data.train",
        "data.eval",
        "data.reader",
        "data.hours",
        "data.unit_bytes",
        "data.shuffle",
        "train.mode",
        "train.strategy",
        "train.merge_batches",
        "train.step_batches",
        "train.batch_size",
        "train.warm_start",
    )
    return {key: value for key, value in decisive_keys(job).items() if key not in learned_from}


def structure_keys(job: Job) -> dict[str, Any]:
    """Return the keys that a warm start needs unchanged.

    These are `meaning_keys` without the settings of optimizers, initialization, decay and eviction.
    """

    def is_setting(key: str) -> bool:
        if key.startswith(("sparse.decay.", "sparse.evict.")):
            return True
        return key == "sparse.init_scale" or (".optimizer." in key and not key.endswith(".kind"))

    return {key: value for key, value in meaning_keys(job).items() if not is_setting(key)}


def fingerprint(job: Job) -> str:
    """Return the SHA-256 of `decisive_keys` in hexadecimal."""
    text = json.dumps(decisive_keys(job), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def differences(a: Job, b: Job) -> list[str]:
    """Return the sorted keys of `decisive_keys` in which two jobs differ; empty if one may resume the other."""
    left, right = decisive_keys(a), decisive_keys(b)
    return sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))


def _class_digest(reference: str | None, source: bytes | None) -> dict[str, str] | None:
    """Identify a user's class by its name and the content of its file, wherever the file is."""
    if reference is None or source is None:
        return None
    return {"class": reference.rpartition(":")[2], "sha256": hashlib.sha256(source).hexdigest()}
