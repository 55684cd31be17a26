"""Build the content of a version's manifest, for all publishers. Does not import torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.config import Job
from elasticrec.durable import write_synced
from elasticrec.errors import ModelError
from elasticrec.repository.repository import Repository
from elasticrec.repository.version import GRAPH_FILE, READER_FILE, Content

_TEMPLATE_FILE = "version.json"


@dataclass(frozen=True)
class Network:
    """The parts of a network that a manifest describes."""

    columns: list[dict[str, Any]]
    """Name and width of each column of a row."""
    inputs: list[str]
    """Inputs of the graph, in its order."""
    tensors: list[dict[str, Any]]
    """Name, shape and offset of each tensor in the dense file."""


@dataclass(frozen=True)
class Provenance:
    """The training state that a version was written from."""

    run: str
    checkpoint: str
    """Name of a checkpoint, or the step or publish of a training in progress."""
    rows: int
    """Rows of the whole version."""
    metrics: dict[str, Any]
    samples: int
    epoch: int
    until: str | None
    """Last hour that was trained completely."""
    publish: dict[str, Any] | None = None
    """Run, name and number of deltas of a publish by a training in progress."""


@dataclass(frozen=True)
class PublishedVersion:
    """A version that a training in progress has committed."""

    number: int
    publish: str
    """Name of the publish, by which tables and shards identify the version."""
    num_deltas: int
    """Deltas from its base up to and including this version; 0 for a base."""
    offer: str = ""
    """Result of the offer, human-readable."""
    is_refused: bool = False
    """Whether the result needs attention: the gate refused the version, or the offer failed."""


@dataclass(frozen=True)
class Changes:
    """The size of a delta; zeros for a base."""

    changed: int = 0
    removed: int = 0


NO_CHANGES = Changes()


@dataclass(frozen=True)
class VersionTemplate:
    """The fields that all versions of a run share. A run with servers saves it before training starts."""

    key: str
    """Digest of the job settings that the template depends on."""
    features: dict[str, Any]
    partitions: int
    columns: list[dict[str, Any]]
    inputs: list[str]
    tensors: list[dict[str, Any]]
    labels: list[str] | None
    reader: str | None = None
    """File and class of a custom reader."""

    @classmethod
    def of(cls, job: Job, network: Network, key: str = "") -> "VersionTemplate":
        """Return the template of a job's versions."""
        outputs = job.publish.outputs
        return cls(
            key=key,
            features=job.features(),
            partitions=job.sparse.partitions,
            columns=network.columns,
            inputs=network.inputs,
            tensors=network.tensors,
            labels=None if outputs is None or outputs == job.data.labels else list(outputs),
            reader=published_reader(job),
        )

    def content(
        self,
        provenance: Provenance,
        row_type: str,
        changes: Changes = NO_CHANGES,
        parts: dict[str, range] | None = None,
    ) -> Content:
        """Return the manifest's content, except for the version number and the files."""
        data: dict[str, Any] = {"samples": provenance.samples, "epoch": provenance.epoch, "until": provenance.until}
        if provenance.publish is not None:
            data["publish"] = provenance.publish
        if self.reader is not None:
            data["reader"] = self.reader
        return Content(
            run=provenance.run,
            checkpoint=provenance.checkpoint,
            features=self.features,
            partitions=self.partitions,
            columns=self.columns,
            rows=provenance.rows,
            inputs=self.inputs,
            tensors=self.tensors,
            metrics=provenance.metrics,
            data=data,
            row_type=row_type,
            labels=None if self.labels is None else tuple(self.labels),
            changed=changes.changed,
            removed=changes.removed,
            parts=parts,
        )

    def write(self, directory: Path, graph: bytes, reader: bytes | None = None) -> None:
        """Write the template, the graph and the source of a custom reader, replacing earlier ones."""
        template = json.dumps(vars(self)).encode()
        for name, content in ((GRAPH_FILE, graph), (READER_FILE, reader), (_TEMPLATE_FILE, template)):
            (directory / name).unlink(missing_ok=True)
            if content is not None:
                write_synced(directory / name, content)

    @classmethod
    def read(cls, directory: Path) -> "VersionTemplate":
        """Read the template that `write` wrote."""
        try:
            return cls(**json.loads((directory / _TEMPLATE_FILE).read_bytes()))
        except (ValueError, TypeError) as error:
            raise ModelError(f"{directory / _TEMPLATE_FILE}: damaged: {error}") from None


def published_reader(job: Job) -> str | None:
    """Return `file:class` of a custom reader, as a manifest names it."""
    reader = job.data.reader
    return None if reader is None else f"{READER_FILE}:{reader.rpartition(':')[2]}"


def job_repository(job: Job, *, insecure: bool = False) -> Repository:
    """Open the repository of a job's model."""
    insecure = insecure or job.train.ps.insecure
    return Repository.open(job.publish.repository, job.publish.model, insecure=insecure)
