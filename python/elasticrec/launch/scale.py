"""`elasticrec scale`: changes the number of servers and trainers of a running job, and waits until it is done."""

import time
from collections.abc import Iterator

from elasticrec.errors import ConfigError, ElasticRecError, UnavailableError
from elasticrec.launch.status import client_of, read_status, status_lines
from elasticrec.net.address import read_address
from elasticrec.net.coordinator import CoordinatorClient
from elasticrec.net.messages import ProcessCounts, StatusResponse
from elasticrec.run import Run

_TIMEOUT_S = 120.0
_POLL_S = 0.1


def scale_run(run: Run, *, servers: int | None, trainers: int | None) -> Iterator[str]:
    """Change the number of servers or trainers; yield lines about the progress until it is done."""
    address = read_address(run.path)
    started = time.monotonic()
    try:
        if address is None:
            raise UnavailableError("not running")
        with client_of(run, address) as client:
            wanted = client.scale(servers=servers, trainers=trainers)["wanted"]
            yield f"scaling to {_counts(wanted)}"
            while not _is_scaled(client, run, wanted):
                if time.monotonic() > started + _TIMEOUT_S:
                    raise ElasticRecError(
                        f"{run.path}: not scaled to {_counts(wanted)} within {_TIMEOUT_S:g} s; see `elasticrec status`"
                    )
                time.sleep(_POLL_S)
    except UnavailableError:
        raise ConfigError("; ".join(status_lines(read_status(run))[:1])) from None
    yield f"scaled to {_counts(wanted)} in {time.monotonic() - started:.1f} s"


def _counts(wanted: ProcessCounts) -> str:
    servers, trainers = wanted["servers"], wanted["trainers"]
    return f"{servers} server{'s' * (servers != 1)} and {trainers} trainer{'s' * (trainers != 1)}"


def _is_scaled(client: CoordinatorClient, run: Run, wanted: ProcessCounts) -> bool:
    try:
        return _has_reached(client.status(), wanted)
    except UnavailableError:
        # The coordinator is busy or restarting. When it ends, it removes its address.
        if read_address(run.path) is None:
            raise
        return False


def _has_reached(status: StatusResponse, wanted: ProcessCounts) -> bool:
    states = [shard["state"] for shard in status["shards"]]
    alive = [trainer for trainer in status["trainers"] if trainer["state"] == "alive"]
    if status["state"] != "running":
        raise ElasticRecError(f"scale: the run is {status['state']}, expected it to be running")
    if status["wanted"] != wanted:
        raise ElasticRecError(f"scale: another command has scaled the run to {_counts(status['wanted'])}")
    return states == ["serving"] * wanted["servers"] and len(alive) == wanted["trainers"]
