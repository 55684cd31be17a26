"""Plan what to serve: models and variants from a command line or a job, and the location of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticrec.config import Job
from elasticrec.config.serve import ServedModel
from elasticrec.errors import ConfigError
from elasticrec.manifest import MANIFEST
from elasticrec.repository.find import find_chain, models_in, open_model
from elasticrec.repository.pack import is_pack
from elasticrec.repository.repository import Repository
from elasticrec.repository.storage import is_url

Addresses = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Variant:
    """A variant of a model; a model without variants has one with an empty name."""

    model: str
    """Name of the model in requests."""
    name: str
    weight: float
    repository: Repository | None
    """Repository of new versions; None for a version outside of a repository."""
    fixed: Path | int | None
    """Directory or number of a fixed version; None to follow the current version."""
    location: str
    """The model as the user wrote it."""
    addresses: Addresses = ()
    """Shards of the online store that hold its rows; empty if this process holds them."""

    def __str__(self) -> str:
        return f"{self.model}, variant {self.name}" if self.name else self.model


def plan_models(models: Sequence[str], job: Job, *, is_given: bool) -> list[Variant]:
    """Return the variants to serve: of `models`, of `serve.models`, or of the job's own model.

    `is_given` says whether the user gave the job; a default job has no model of its own.
    """
    settings = job.serve
    if models:
        served = [one for text in models for one in _expand(text)]
    elif settings.models:
        served = list(settings.models)
    elif is_given:
        served = [ServedModel(model=f"{job.publish.repository.rstrip('/')}/{job.publish.model}")]
    else:
        raise ConfigError("serve: expected a model such as models/demo, or --job, got neither")
    variants = [
        variant
        for model in served
        for variant in _variants_of(model, (model.addresses or job.cube.addresses) if settings.rows == "store" else ())
    ]
    names = [variant.model for variant in variants]
    keys = [(variant.model, variant.name) for variant in variants]
    duplicate = next((names[at] for at, key in enumerate(keys) if key in keys[:at]), None)
    if duplicate is not None:
        raise ConfigError(
            f"serve: two models are called `{duplicate}`, expected distinct names (`serve.models[].name`)"
        )
    return variants


def _expand(text: str) -> list[ServedModel]:
    """Return a model, or all models of a repository."""
    if not is_pack(text) and (is_url(text) or Path(text).is_dir()) and not (Path(text) / MANIFEST).is_file():
        repository = Repository.open(text)
        if repository.state() is None and not repository.versions() and (names := models_in(repository.storage)):
            return [ServedModel(model=f"{text.rstrip('/')}/{name}") for name in names]
    return [ServedModel(model=text)]


def _variants_of(served: ServedModel, addresses: Addresses) -> list[Variant]:
    if served.model is not None:
        return [_variant(served.name, "", 1.0, served.model, addresses)]
    return [_variant(served.name, one.name, one.weight, one.model, addresses) for one in served.variants]


def _variant(model: str | None, name: str, weight: float, text: str, addresses: Addresses) -> Variant:
    if not is_url(text) and (Path(text) / MANIFEST).is_file():
        fetched = find_chain(text)
        own = str(fetched.version.manifest["model"])
        return Variant(model or own, name, weight, None, fetched.directory, text, addresses)
    reference = open_model(text)
    # A pack has a single version, which is the current one.
    number = reference.version() if is_pack(text) else reference.number
    return Variant(model or reference.repository.name, name, weight, reference.repository, number, text, addresses)
