"""Export the graph and the version template of a run with servers before training, so that a bad model fails early."""

import hashlib
import json

from elasticrec.config import Job, fingerprint
from elasticrec.errors import ElasticRecError
from elasticrec.publish.content import VersionTemplate, job_repository
from elasticrec.publish.servers.publishing import PublishSettings
from elasticrec.publish.servers.versions import RunInfo, RunVersions
from elasticrec.repository.version import READER_FILE
from elasticrec.run import Run


def prepare_versions(job: Job, run: Run) -> None:
    """Export the untrained model, unless that was done for a job with the same structure."""
    if job.publish.every is None:
        return
    directory, key = run.start, _key(job)
    try:
        if VersionTemplate.read(directory).key == key:
            return
    except (ElasticRecError, OSError):
        # Missing or unreadable: export again.
        pass
    from elasticrec.publish.export import describe_network
    from elasticrec.publish.graph import cached_graph
    from elasticrec.training.dense import FlatParameters
    from elasticrec.training.network import Scorer, build_model

    model = build_model(job)
    scorer, dense = Scorer(model, job.data.negative_rate), FlatParameters(model, job)
    graph = cached_graph(job, scorer, dense, run.graphs)
    VersionTemplate.of(job, describe_network(model, dense.tensors), key).write(directory, graph, job.reader_source())


def _key(job: Job) -> str:
    """Return a digest of all settings that the template depends on, including those that may change on resume."""
    facts = [fingerprint(job), job.publish.outputs, job.data.negative_rate]
    if job.data.reader is not None:
        # Templates of the previous release lack the reader: a different key replaces them.
        facts.append(READER_FILE)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def publish_settings(job: Job) -> PublishSettings | None:
    """Return a job's publish settings, or None if it does not publish."""
    publish = job.publish
    if publish.every is None:
        return None
    every_s = publish.every if isinstance(publish.every, float) else None
    return PublishSettings(every_s=every_s, base_every=publish.base_every, row_type=publish.row_type)


def versions_of(job: Job, run: Run, run_id: str) -> RunVersions | None:
    """Return the target of a job's versions, or None if it does not publish."""
    publish = job.publish
    if publish.every is None:
        return None
    info = RunInfo(
        name=job.name,
        run_id=run_id,
        start=run.start,
        publish=publish,
        has_store=bool(job.cube.addresses),
    )
    return RunVersions(job_repository(job), info)
