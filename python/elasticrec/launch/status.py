"""`elasticrec status`: the state of a run, from its coordinator, or from its directory if it is not running."""

import contextlib
import json
from typing import Any, TypedDict, final

from elasticrec.errors import UnavailableError
from elasticrec.journal import read_entries
from elasticrec.manifest import MANIFEST
from elasticrec.net import environment
from elasticrec.net.address import Address, read_address
from elasticrec.net.coordinator import CoordinatorClient
from elasticrec.net.messages import (
    CheckpointStatus,
    PublishStatus,
    ShardStatus,
    StatusResponse,
    StoreStatus,
    TrainerStatus,
)
from elasticrec.net.security import Security
from elasticrec.run import Run

# Enough time for a coordinator that is being restarted.
_ANSWER_S = 3.0


@final
class RunningStatus(StatusResponse):
    """The coordinator's status, with the run and the coordinator's URL."""

    run: str
    coordinator: str


class LastCheckpoint(TypedDict):
    """The newest complete checkpoint of a run that is not running."""

    newest: str
    created: str


@final
class StoppedStatus(TypedDict):
    """The state of a run that is not running."""

    run: str
    state: str
    checkpoint: LastCheckpoint | None
    metrics: dict[str, Any] | None
    """The last line of the metrics file."""
    silent: str | None
    """URL of a coordinator that was killed and does not answer."""


def read_status(run: Run) -> RunningStatus | StoppedStatus:
    """Return the coordinator's status, or the state in the directory of a run that is not running."""
    address = read_address(run.path)
    if address is not None:
        with contextlib.suppress(UnavailableError), client_of(run, address) as client:
            status = client.status()
            return {"run": str(run.path), "coordinator": address.url, **status}
    return _read_stopped(run, address)


def client_of(run: Run, address: Address) -> CoordinatorClient:
    """Return a client of the run's coordinator for commands."""
    security = Security(address.token)
    if not address.url.startswith("http://127."):
        given = {"ca": environment.tls_files()["ca"]} if address.url.startswith("https:") else {}
        security = Security.of(run.job(), address.token or "", given)
    return CoordinatorClient(address.url, security=security, deadline_s=_ANSWER_S)


def _read_stopped(run: Run, silent: Address | None) -> StoppedStatus:
    checkpoint = _last_checkpoint(run)
    entries = read_entries(run.path / "coordinator")
    is_finished = any(entry["kind"] == "finished" for entry in entries)
    if checkpoint is not None and "progress" in checkpoint:
        is_finished = bool(checkpoint["progress"].get("finished"))
    return {
        "run": str(run.path),
        "state": "finished" if is_finished else "stopped",
        "checkpoint": {"newest": checkpoint["newest"], "created": checkpoint["created"]} if checkpoint else None,
        "metrics": _last_metrics(run),
        "silent": silent.url if silent else None,
    }


def _last_checkpoint(run: Run) -> dict[str, Any] | None:
    """Return the manifest of the newest complete checkpoint; damaged manifests are skipped without a message."""
    found = []
    for path in run.checkpoints.glob(f"*/{MANIFEST}"):
        with contextlib.suppress(OSError, ValueError):
            manifest = json.loads(path.read_bytes())
            # The checkpoint of the shards is written before the final one, perhaps in the same second.
            key = (manifest["created"], not path.parent.name.startswith("ps-"), path.parent.name)
            found.append((key, {**manifest, "newest": path.parent.name}))
    return max(found, key=lambda one: one[0])[1] if found else None


def _last_metrics(run: Run) -> dict[str, Any] | None:
    """Return the last complete line of the metrics file; a crash may have truncated the line after it."""
    try:
        lines = run.metrics_path.read_bytes().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None


def status_lines(status: RunningStatus | StoppedStatus) -> list[str]:
    """Format a status as lines of text."""
    if "coordinator" not in status:
        return _stopped_lines(status)
    passes, units = status["passes"], status["units"]
    complete = "-" if units["complete"] is None else units["complete"]
    of_planned = f" of {passes['planned']}" if passes["planned"] else ""
    lines = [
        f"{status['run']}: {status['state']}, pass {passes['begun']}{of_planned}, "
        f"coordinator {status['coordinator']}, term {status['term']}",
        f"units: {complete} of {units['planned']} complete, {units['leased']} leased, "
        f"{units['behind'] or 0} behind, {units['settling']} not yet confirmed",
        _samples_line(status),
    ]
    if status["failure"]:
        lines.append(f"failed: {status['failure']}")
    if status["moving_to"]:
        lines.append(f"scaling from {len(status['shards'])} to {status['moving_to']} servers")
    serving = sum(shard["state"] == "serving" for shard in status["shards"])
    lines.append(f"servers: {serving} of {status['wanted']['servers']}, map {status['epoch']}")
    lines += [_shard_line(shard) for shard in status["shards"]]
    alive = sum(trainer["state"] == "alive" for trainer in status["trainers"])
    lines.append(f"trainers: {alive} of {status['wanted']['trainers']}")
    lines += sorted(_trainer_line(trainer) for trainer in status["trainers"])
    lines.append(_checkpoint_line(status["checkpoint"]))
    if status["publish"] is not None:
        lines.append(_publish_line(status["publish"]))
    return lines if status["store"] is None else [*lines, *_store_lines(status["store"])]


def _stopped_lines(status: StoppedStatus) -> list[str]:
    checkpoint, metrics = status["checkpoint"], status["metrics"]
    last = f"last checkpoint {checkpoint['newest']} of {checkpoint['created']}" if checkpoint else "no checkpoint"
    state = "finished" if status["state"] == "finished" else "not running"
    if state == "not running" and status["silent"]:
        state = f"not running, the coordinator at {status['silent']} did not answer within {_ANSWER_S:g} s"
    lines = [f"{status['run']}: {state}; {last}"]
    if metrics:
        shown = {key: value for key, value in metrics.items() if key != "time" and isinstance(value, int | float | str)}
        values = ", ".join(f"{key} {_number(value)}" for key, value in shown.items())
        lines.append(f"last metrics: {values}")
    return lines


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _samples_line(status: StatusResponse) -> str:
    """Format the training metrics, which the shard with partition 0 reports."""
    figures: dict[str, Any] = {}
    for shard in status["shards"]:
        figures |= {key: value for key, value in shard["figures"].items() if key.endswith("_0")}
    return (
        f"samples: {figures.get('samples_0', 0):,} in this pass, {status['samples_per_s']:,.0f} samples/s, "
        f"auc {figures.get('auc_0', 0.0):.4f}, loss {figures.get('log_loss_0', 0.0):.4f}"
    )


def _shard_line(shard: ShardStatus) -> str:
    figures = shard["figures"]
    first, end = shard["partitions"]
    text = f"  ps-{shard['index']} {shard['state']}, partitions {first} to {end - 1}"
    if "num_rows" not in figures:
        return text
    up_s = max(figures.get("uptime_s", 0.0), 1e-9)
    pull, push = (figures.get(f"{kind}_nanos", 0) / 1e9 / up_s for kind in ("pull", "push"))
    return (
        f"{text}, {shard['address']}, {figures['num_rows']:,} rows, {_megabytes(figures.get('num_bytes', 0))}, "
        f"time: pull {pull:.1%}, push {push:.1%}"
    )


def _trainer_line(trainer: TrainerStatus) -> str:
    figures = trainer["figures"]
    name = figures.get("name", f"trainer-{trainer['index']}")
    units = ", ".join(str(unit) for unit in trainer["units"])
    pushes = figures.get("staleness_pushes", 0)
    # The strategy `geo` does not measure staleness.
    stale = f"{figures['staleness_sum'] / pushes:.1f} (max {figures['staleness_most']})" if pushes else "-"
    shares = {key.removeprefix("share_"): value for key, value in figures.items() if key.startswith("share_")}
    if shares:
        shares["other"] = max(1.0 - sum(shares.values()), 0.0)
    stages = ", ".join(f"{name} {share:.0%}" for name, share in sorted(shares.items(), key=lambda one: -one[1]))
    return (
        f"  {name} {trainer['state']}, {f'unit {units}' if units else 'no unit'}, "
        f"{trainer['samples_per_s']:,.0f} samples/s, staleness {stale}, "
        f"time: {stages or '-'}"
    )


def _checkpoint_line(checkpoint: CheckpointStatus) -> str:
    if checkpoint["newest"] is None:
        text = "checkpoint: none yet"
    else:
        age = "from an earlier coordinator" if checkpoint["age_s"] is None else f"{checkpoint['age_s']:.0f} s old"
        took = "" if checkpoint["last_s"] is None else f", took {checkpoint['last_s']:.1f} s"
        text = f"checkpoint: {checkpoint['newest']}, {age}{took}"
    writing = f", writing {checkpoint['writing']}" if checkpoint["writing"] else ""
    return f"{text}{writing}; {checkpoint['committed']} committed, {checkpoint['failed']} failed"


def _publish_line(publish: PublishStatus) -> str:
    if publish["version"] is None:
        text = "publish: no version yet"
    else:
        which = f"delta {publish['deltas']} of its base" if publish["deltas"] else "base"
        text = f"publish: version {publish['version']}, {which}, {publish['offer']}"
    if publish["age_s"] is not None:
        rows = f"{publish['changed']:,} of {publish['rows']:,} rows, {publish['removed']:,} removed"
        text += f", {publish['age_s']:.0f} s old, took {publish['last_s']:.1f} s, {rows}"
    if writing := publish["writing"]:
        text += f"; writing a {writing['kind']}"
    elif publish["next_s"] is not None:
        text += f"; next in {publish['next_s']:.0f} s"
    text += f"; {publish['committed']} committed, {publish['failed']} failed"
    return f"{text}; the last publish failed: {publish['error']}" if publish["error"] else text


def _store_lines(store: StoreStatus) -> list[str]:
    lines = [f"store: {store['doing']}", *(f"  late: {replica}" for replica in store["late"])]
    if refused := store["refused"]:
        lines.append(f"  version {refused['version']} is not offered: {'; '.join(refused['why'])}")
    return lines


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
