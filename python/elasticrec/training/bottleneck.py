"""What holds a training up, in words: from the shares of its time to the key that would change it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shares:
    """Where the time goes, as shares of the loop's, and how busy the threads of the reader are."""

    stages: dict[str, float]
    """By stage of the loop; together at most 1."""
    read: float | None = None
    """Of the time of the one thread that reads; none where the reader does not tell."""
    parse: float | None = None
    """Of the time of all threads that parse."""

    def to_dict(self) -> dict[str, float]:
        """For JSON: the stages, and `read` and `parse` where they are known."""
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
    """Whether `data.workers` says how many threads or processes read; Parquet has one."""
    every_steps: bool = False
    """Whether checkpoints come by steps, not only by time."""
    evaluates_inside: bool = False
    """Whether evaluations come inside an epoch."""
    keeps_best: bool = False
    """Whether an evaluation that is the best so far is saved."""


_GROUPS = {
    "data": ("wait",),
    "table": ("pull", "push"),
    "network": ("forward", "backward", "step"),
    "checkpoint": ("checkpoint",),
    "evaluate": ("evaluate",),
    "publish": ("publish",),
}

# Below it a stage is not worth advice, even if no other takes more.
_MIN_SHARE = 0.2
# Threads that are less busy than that are not what the loop waits for.
_MIN_BUSY = 0.4


def bottleneck(shares: Shares, setup: Setup) -> str | None:
    """Such as ``waiting for data 61 %: raise `data.workers` (1 of 2 cores)``; none before anything took time."""
    sums = {group: sum(shares.stages.get(stage, 0.0) for stage in stages) for group, stages in _GROUPS.items()}
    group = max(sums, key=lambda name: sums[name])
    share = f"{100 * sums[group]:.0f} %"
    if sums[group] < _MIN_SHARE:
        return None
    if group == "data":
        return f"waiting for data {share}: {_data_advice(shares, setup)}"
    if group == "table":
        return f"pulling and pushing rows {share}: a smaller `model.dim` or fewer `data.slots` make rows cheaper"
    if group == "network":
        return f"the network {share}: {_network_advice(setup)}"
    if group == "checkpoint" and setup.keeps_best and setup.evaluates_inside:
        return f"saving checkpoints {share}: `train.checkpoint.keep_best` saves every better one, evaluate less often"
    if group == "checkpoint":
        key = "every_steps" if setup.every_steps else "every_s"
        return f"saving checkpoints {share}: raise `train.checkpoint.{key}`, or `every_epochs` where epochs are short"
    if group == "publish":
        return f"publishing {share}: raise `publish.every`"
    key = "raise `train.evaluate.every_steps` or `every_s`, or " if setup.evaluates_inside else ""
    return f"evaluating {share}: {key}give `data.eval` fewer files"


def _data_advice(shares: Shares, setup: Setup) -> str:
    if shares.read is not None and shares.parse is not None and max(shares.read, shares.parse) < _MIN_BUSY:
        return (
            f"yet its threads are idle (read {100 * shares.read:.0f} %, parse {100 * shares.parse:.0f} %); "
            "other work on this machine may take their cores, or `data.unit_bytes` is too large for so little data"
        )
    if shares.read is not None and shares.parse is not None and shares.read > shares.parse:
        return f"the disk is slow, reading takes {100 * shares.read:.0f} % of its thread; copy the data to a faster one"
    if not setup.has_workers:
        return "Parquet is read by one thread; with fewer columns or as text it is faster"
    if setup.workers < setup.cores:
        return f"raise `data.workers` ({setup.workers} for {setup.cores} cores)"
    if shares.parse is None:
        return "a faster disk or more cores; `data.workers` are as many as there are cores"
    return "parsing takes all cores; fewer `data.slots` are less to parse"


def _network_advice(setup: Setup) -> str:
    if setup.threads < setup.cores:
        return f"raise `train.threads` ({setup.threads} for {setup.cores} cores), or a smaller `model.hidden`"
    return "all else keeps up; a smaller `model.hidden` or a larger `train.batch_size` is faster"
