"""Find the bottleneck of a training from its stage shares, and advise which setting to change."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Shares of the loop's time by stage, and utilization of the reader's threads."""

    stages: dict[str, float]
    """Share of each stage; at most 1 in total."""
    read: float | None = None
    """Utilization of the reading thread; None if not measured."""
    parse: float | None = None
    """Utilization of the parsing threads; None if not measured."""

    def to_dict(self) -> dict[str, float]:
        """Return the shares for JSON: all stages, and `read` and `parse` if known."""
        threads = {"read": self.read, "parse": self.parse}
        known = {name: share for name, share in threads.items() if share is not None}
        return {name: round(share, 4) for name, share in (self.stages | known).items()}


@dataclass(frozen=True)
class Setup:
    """The settings that advice depends on."""

    workers: int
    threads: int
    cores: int
    has_workers: bool = True
    """Whether `data.workers` applies; Parquet is read by one thread."""
    saves_by_steps: bool = False
    """Whether checkpoints are saved by steps too."""
    evaluates_inside: bool = False
    """Whether evaluations run within an epoch."""
    keeps_best: bool = False
    """Whether every new best evaluation is saved."""


_GROUPS = {
    "data": ("wait",),
    "table": ("pull", "push"),
    "network": ("forward", "backward", "step"),
    "checkpoint": ("checkpoint",),
    "evaluate": ("evaluate",),
    "publish": ("publish",),
}

# Smallest share of a stage that is worth advice.
_MIN_SHARE = 0.2
# Threads with a lower utilization are not the bottleneck.
_MIN_BUSY = 0.4


def bottleneck(shares: Shares, setup: Setup) -> str | None:
    """Return advice such as ``waiting for data 61 %: raise `data.workers` (1 for 2 cores)``, or None."""
    sums = {group: sum(shares.stages.get(stage, 0.0) for stage in stages) for group, stages in _GROUPS.items()}
    group = max(sums, key=lambda name: sums[name])
    share = f"{100 * sums[group]:.0f} %"
    if sums[group] < _MIN_SHARE:
        return None
    if group == "data":
        return f"waiting for data {share}: {_data_advice(shares, setup)}"
    if group == "table":
        return f"pulling and pushing rows {share}: use a smaller `model.dim` or fewer `data.slots`"
    if group == "network":
        return f"the network {share}: {_network_advice(setup)}"
    if group == "checkpoint" and setup.keeps_best and setup.evaluates_inside:
        return f"saving checkpoints {share}: `train.checkpoint.keep_best` saves every new best; evaluate less often"
    if group == "checkpoint":
        key = "every_steps" if setup.saves_by_steps else "every_s"
        return f"saving checkpoints {share}: raise `train.checkpoint.{key}`, or `every_epochs` if epochs are short"
    if group == "publish":
        return f"publishing {share}: raise `publish.every`"
    key = "raise `train.evaluate.every_steps` or `every_s`, or " if setup.evaluates_inside else ""
    return f"evaluating {share}: {key}use fewer files in `data.eval`"


def _data_advice(shares: Shares, setup: Setup) -> str:
    if shares.read is not None and shares.parse is not None and max(shares.read, shares.parse) < _MIN_BUSY:
        return (
            f"but the reader's threads are idle (read {100 * shares.read:.0f} %, parse {100 * shares.parse:.0f} %); "
            "other processes may use the cores, or `data.unit_bytes` is too large for this amount of data"
        )
    if shares.read is not None and shares.parse is not None and shares.read > shares.parse:
        return f"the disk is slow, reading takes {100 * shares.read:.0f} % of its thread; copy the data to a faster one"
    if not setup.has_workers:
        return "Parquet is read by one thread; fewer columns or text files are faster"
    if setup.workers < setup.cores:
        return f"raise `data.workers` ({setup.workers} for {setup.cores} cores)"
    if shares.parse is None:
        return "use a faster disk or more cores; `data.workers` already equals the number of cores"
    return "parsing uses all cores; use fewer `data.slots`"


def _network_advice(setup: Setup) -> str:
    if setup.threads < setup.cores:
        return f"raise `train.threads` ({setup.threads} for {setup.cores} cores) or use a smaller `model.hidden`"
    return "use a smaller `model.hidden` or a larger `train.batch_size`"
