"""Versions of a run with servers: what all have in common is exported before the first batch, or the job fails then."""

import hashlib
import json
from pathlib import Path

from elasticrec.config import Job, fingerprint
from elasticrec.errors import ElasticRecError
from elasticrec.publish.content import Network, VersionTemplate
from elasticrec.publish.servers.publishing import PublishSettings
from elasticrec.publish.servers.versions import RunInfo, RunVersions
from elasticrec.repository.repository import Repository
from elasticrec.repository.version import READER_FILE
from elasticrec.run import Run


def prepare_versions(job: Job, run: Run) -> None:
    """Export the untrained model, unless that was done for a job of this structure."""
    if job.publish.every is None:
        return
    directory, key = _directory(run), _key(job)
    try:
        if VersionTemplate.read(directory).key == key:
            return
    except (ElasticRecError, OSError):
        # not there, or of no use
        pass
    from elasticrec.publish.export import input_names
    from elasticrec.publish.graph import graph_of
    from elasticrec.publish.local import graphs_of
    from elasticrec.training.dense import FlatParameters
    from elasticrec.training.network import Scorer, build_model

    model = build_model(job)
    scorer, dense = Scorer(model, job.data.negative_rate), FlatParameters(model, job)
    graph = graph_of(job, scorer, dense, graphs_of(run))
    network = Network(
        columns=[{"name": column.name, "width": column.width} for column in model.columns],
        inputs=input_names(model.shape),
        tensors=[tensor.to_dict() for tensor in dense.tensors],
    )
    VersionTemplate.of(job, network, key).write(directory, graph, job.reader_source())


def _directory(run: Run) -> Path:
    return run.path / "start"


def _key(job: Job) -> str:
    """Of all that decides what versions have in common: also of what a training may resume with another value of."""
    facts = [fingerprint(job), job.publish.outputs, job.data.negative_rate]
    if job.data.reader is not None:
        # what the release before wrote down has no reader with it
        facts.append(READER_FILE)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def publish_settings(job: Job) -> PublishSettings | None:
    """When a job publishes; the end of a pass is that of an epoch or of an hour."""
    publish = job.publish
    if publish.every is None:
        return None
    every_s = publish.every if isinstance(publish.every, float) else None
    return PublishSettings(every_s=every_s, base_every=publish.base_every, row_type=publish.row_type)


def versions_of(job: Job, run: Run, run_id: str) -> RunVersions | None:
    """Where its versions go."""
    publish = job.publish
    if publish.every is None:
        return None
    info = RunInfo(
        name=job.name,
        run_id=run_id,
        start=_directory(run),
        publish=publish,
        has_store=bool(job.cube.addresses),
    )
    return RunVersions(Repository.open(publish.repository, publish.model, insecure=job.train.ps.insecure), info)
