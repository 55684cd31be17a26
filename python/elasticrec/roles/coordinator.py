"""The process of the coordinator: it prepares the run, serves requests, and ends when the run is finished."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.config import Job, fingerprint, match_files, meaning_keys
from elasticrec.coordinator.api import CoordinatorServer, ServerOptions
from elasticrec.coordinator.checkpoint import Checkpoint
from elasticrec.coordinator.checkpoints import CheckpointSettings
from elasticrec.coordinator.coordinator import Coordinator
from elasticrec.coordinator.members import Timing
from elasticrec.coordinator.passes import PassPlan, Upkeep
from elasticrec.coordinator.settings import Settings
from elasticrec.data.header import check_headers
from elasticrec.data.hours import HourPlan, PlanCallbacks
from elasticrec.data.units import UnitSplit
from elasticrec.errors import ElasticRecError
from elasticrec.net.address import Address, remove_address, write_address
from elasticrec.publish.rollout.background import background_rollout
from elasticrec.publish.servers.prepare import prepare_versions, publish_settings, versions_of
from elasticrec.repository.storage import is_url
from elasticrec.roles.start import WarmStart, has_start, read_start, write_start
from elasticrec.run import Run
from elasticrec.training.metrics import MetricSums

if TYPE_CHECKING:
    from elasticrec.training.dense import FlatParameters

# Time for the members of a finished run to stop.
_STOP_S = 10.0

logger = logging.getLogger(__name__)


def prepare(job: Job, run: Run) -> None:
    """Write the state that the run starts from, unless it has started before."""
    if not has_start(run):
        _prepare_start(job, run)
    prepare_versions(job, run)


def _prepare_start(job: Job, run: Run) -> None:
    from elasticrec.training.dense import FlatParameters
    from elasticrec.training.embedding import table_spec
    from elasticrec.training.metrics import FLAT_SIZE
    from elasticrec.training.network import build_model

    model = build_model(job)
    dense = FlatParameters(model, job)
    warm, vectors = _warm_start(job, dense)
    optimizer = job.dense.optimizer
    spec = {
        "table": table_spec(job, model.columns),
        "num_dense": len(dense.values),
        "num_buffers": len(dense.values) - dense.num_parameters,
        "dense": {"kind": optimizer.kind, "learning_rate": optimizer.learning_rate},
        # The sums of the labels, then the numbers of records and of bad records.
        "num_sums": FLAT_SIZE * len(job.data.labels) + 2,
    }
    write_start(run, spec, vectors, warm)


def _warm_start(job: Job, dense: "FlatParameters") -> tuple[WarmStart | None, npt.NDArray[np.float32]]:
    """Return the rows of a warm start, if any, and the initial dense vectors."""
    from elasticrec.training.warm_start import start_files

    if job.train.warm_start is None:
        return None, dense.values.numpy()[np.newaxis]
    checkpoint, rows = start_files(job, dense)
    steps, vectors = dense.state()
    return WarmStart(checkpoint.path, rows, steps), np.stack([vectors[name] for name in dense.vectors])


def settings_of(job: Job, run: Run) -> Settings:
    """Return the coordinator's settings for a job."""
    files = [] if job.data.hours else match_files(job, "train")
    check_headers(job, files)
    sparse, checkpoint, ps = job.sparse, job.train.checkpoint, job.train.ps
    return Settings(
        job=fingerprint(job),
        num_partitions=sparse.partitions,
        servers=job.train.servers,
        trainers=job.train.trainers,
        plan=PassPlan(
            files=lambda _: files,
            split=UnitSplit.of(job),
            num_passes=job.train.epochs,
            upkeep=Upkeep(
                decay=sparse.decay.show_click,
                min_score=sparse.evict.min_score,
                max_age=sparse.evict.max_age,
                nonclk_coeff=sparse.evict.nonclk_coeff,
                click_coeff=sparse.evict.click_coeff,
            ),
            hours=_hours_of(job),
            check=lambda found: check_headers(job, found),
            on_missing=job.data.on_missing,
        ),
        timing=Timing(lease_s=ps.lease_s, heartbeat_s=ps.heartbeat_s),
        checkpoint=CheckpointSettings(
            every_s=checkpoint.every_s, keep=checkpoint.keep, may_mix=job.train.group_size is None
        ),
        group_size=job.train.group_size,
        manifest={
            "run": job.name,
            "job": meaning_keys(job),
            "warm_start": read_start(run.path).warm.get("checkpoint"),
        },
        measure=lambda checkpoint: measure_pass(run, checkpoint),
        publish=publish_settings(job),
        target=versions_of(job, run, read_start(run.path).run_id),
    )


def _hours_of(job: Job) -> Callable[[PlanCallbacks], HourPlan] | None:
    hours = job.data.hours
    return None if hours is None else lambda callbacks: HourPlan(hours, Path(job.data.train[0]), callbacks)


def measure_pass(run: Run, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the metrics of a pass. Predictions are made before each update, so that they serve as an evaluation."""
    start = read_start(run.path)
    # Only the shard with partition 0 has the sums.
    part = next(part for part in checkpoint.manifest["parts"] if part["partitions"][0] == 0)
    _, _, (_, sums), _ = _core.read_dense_parts(
        start.shard_spec(range(*part["partitions"])), [str(checkpoint.path / part["dense"])]
    )
    return {
        "records": int(sums[-2]),
        "bad_records": int(sums[-1]),
        "train": [one.result().to_dict() for one in MetricSums.of_flat(sums)],
    }


def serve_coordinator(job: Job, run: Run, listen: ServerOptions, stop: threading.Event) -> bool:
    """Coordinate the run until it is finished or `stop` is set; return whether it is finished."""
    prepare(job, run)
    settings = replace(settings_of(job, run), run_id=read_start(run.path).run_id)
    coordinator = Coordinator(run, settings)
    try:
        with (
            CoordinatorServer(coordinator, listen, _repository_directory(job)) as server,
            background_rollout(job) as rollout,
        ):
            coordinator.store = None if rollout is None else rollout.describe
            # Write the address before the log line that announces it.
            write_address(run.path, Address(server.url, listen.security.token))
            logger.info("coordinator of %s on %s, term %d", run.path, server.url, coordinator.term)
            while not stop.wait(0.1):
                if coordinator.is_finished or coordinator.failure is not None:
                    _wait_for_members(coordinator)
                    if coordinator.failure is not None:
                        # The launcher must not take this for the end of the run.
                        raise ElasticRecError(coordinator.failure)
                    if rollout is not None:
                        rollout.finish()
                    return True
            return False
    finally:
        remove_address(run.path)
        coordinator.close()


def _repository_directory(job: Job) -> Path | None:
    """Return the repository's directory, which the coordinator serves to machines that do not share its disk."""
    return None if is_url(job.publish.repository) else Path(job.publish.repository)


def _wait_for_members(coordinator: Coordinator) -> None:
    """Wait until all members have received the command to stop."""
    end = time.monotonic() + _STOP_S
    while time.monotonic() < end:
        members = [*coordinator.members.of("ps"), *coordinator.members.of("trainer")]
        if not any(coordinator.members.is_alive(member) for member in members):
            return
        time.sleep(0.1)
