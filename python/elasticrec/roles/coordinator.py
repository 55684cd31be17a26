"""The process of the coordinator: it plans, leases, commits, and ends when the run is finished."""

import threading
import time
from collections.abc import Callable

from elasticrec.config import Job, fingerprint, match_files, meaning
from elasticrec.coordinator.api import CoordinatorServer, Listen
from elasticrec.coordinator.checkpoints import CheckpointSettings
from elasticrec.coordinator.coordinator import Coordinator, Settings
from elasticrec.coordinator.members import Timing
from elasticrec.coordinator.passes import PassPlan, Upkeep
from elasticrec.data.header import check_headers
from elasticrec.errors import ConfigError
from elasticrec.roles.start import has_start, write_start
from elasticrec.run import Run
from elasticrec.training.read import cut_of

# After the end members have so long to hear of it.
_FAREWELL_S = 10.0


def prepare(job: Job, run: Run) -> None:
    """Write down what the run starts from, unless it has started before."""
    if has_start(run):
        return
    from elasticrec.training.dense import FlatParameters
    from elasticrec.training.embedding import table_spec
    from elasticrec.training.metrics import FLAT_SIZE
    from elasticrec.training.network import build_model

    model = build_model(job)
    dense = FlatParameters(model, job)
    if len(dense.values) != dense.num_parameters:
        raise ConfigError(
            f"{job.source}: train.mode: a model with float buffers, such as those of BatchNorm, cannot be trained with "
            "`ps` yet; expected `local`"
        )
    optimizer = job.dense.optimizer
    spec = {
        "table": table_spec(job, model.columns),
        "num_dense": len(dense.values),
        "dense": {"kind": optimizer.kind, "learning_rate": optimizer.learning_rate},
        # and records and bad records, behind those of the labels
        "num_sums": FLAT_SIZE * len(job.data.labels) + 2,
    }
    write_start(run, spec, dense.values.numpy())


def settings_of(job: Job) -> Settings:
    """What the coordinator has to know of a job."""
    files = match_files(job, "train")
    check_headers(job, files)
    sparse, checkpoint, ps = job.sparse, job.train.checkpoint, job.train.ps
    return Settings(
        job=fingerprint(job),
        num_partitions=sparse.partitions,
        servers=job.train.servers,
        plan=PassPlan(
            files=lambda _: files,
            cut=cut_of(job),
            num_passes=job.train.epochs,
            upkeep=Upkeep(
                decay=sparse.decay.show_click,
                min_score=sparse.evict.min_score,
                max_age=sparse.evict.max_age,
                nonclk_coeff=sparse.evict.nonclk_coeff,
                click_coeff=sparse.evict.click_coeff,
            ),
        ),
        timing=Timing(lease_s=ps.lease_s, heartbeat_s=ps.heartbeat_s),
        checkpoint=CheckpointSettings(every_s=checkpoint.every_s, keep=checkpoint.keep),
        manifest={"run": job.name, "job": meaning(job)},
    )


def serve_coordinator(job: Job, run: Run, listen: Listen, say: Callable[[str], None], stop: threading.Event) -> None:
    """Coordinate the run until it is finished or `stop` is set."""
    prepare(job, run)
    coordinator = Coordinator(run, settings_of(job), say=say)
    try:
        with CoordinatorServer(coordinator, listen) as server:
            say(f"coordinator of {run.path} on {server.url}, term {coordinator.term}")
            while not stop.wait(0.1):
                if coordinator.is_finished or coordinator.failure is not None:
                    _say_goodbye(coordinator)
                    return
    finally:
        coordinator.close()


def _say_goodbye(coordinator: Coordinator) -> None:
    """Wait until all members heard that it is over."""
    end = time.monotonic() + _FAREWELL_S
    while time.monotonic() < end:
        members = [*coordinator.members.of("ps"), *coordinator.members.of("trainer")]
        if not any(coordinator.members.is_alive(member) for member in members):
            return
        time.sleep(0.1)
