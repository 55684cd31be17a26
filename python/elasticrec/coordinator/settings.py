"""The coordinator's settings for a job."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticrec.coordinator.checkpoint import Checkpoint
from elasticrec.coordinator.checkpoints import CheckpointSettings
from elasticrec.coordinator.members import Timing
from elasticrec.coordinator.passes import PassPlan
from elasticrec.publish.servers.publishing import PublishSettings, run_on_thread
from elasticrec.publish.servers.target import VersionTarget


@dataclass(frozen=True)
class Settings:
    """The settings of a job that the coordinator needs, and the functions that it calls."""

    job: str
    """Digest of the settings that may not change while the run lasts."""
    num_partitions: int
    servers: int
    """Number of shards of a new run; the journal has the number of a resumed run."""
    plan: PassPlan
    trainers: int = 1
    """Number of trainers of a new run; the journal has the number of a run that was scaled."""
    timing: Timing = field(default_factory=Timing)
    settle_s: float = 2.0
    """Time for the shards to confirm a unit that its trainer has pushed."""
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    """Additional fields for the manifests of checkpoints, such as the job."""
    stop_when_finished: bool = True
    measure: Callable[[Checkpoint], dict[str, Any]] = lambda _: {}
    """Returns the metrics of a pass from the checkpoint at its end."""
    group_size: int | None = None
    """Number of units whose batches make steps together (`sync`). All shards then return to a checkpoint together."""
    run_id: str = ""
    """Id of the run: roles with another id are refused."""
    publish: PublishSettings | None = None
    """When versions are published; None for never."""
    target: VersionTarget | None = None
    """The repository to which versions are published."""
    run: Callable[[Callable[[], None]], None] = run_on_thread
    """Runs work that would block the coordinator."""
