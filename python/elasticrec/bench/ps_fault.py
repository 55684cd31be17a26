"""The cost of a killed server, and the pause that a checkpoint causes."""

import os
import signal
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from elasticrec import _core
from elasticrec.bench.cluster import Cluster, Status, process_of

if TYPE_CHECKING:
    from elasticrec.bench.ps import Bench

Result = dict[str, Any]

_SERVERS, _TRAINERS = 2, 2
_KILLED = 1
_WARM_UP_SAMPLES = 20_000
# Seconds between two polls of the updates that a server has applied.
_POLL_S = 0.002
# Age of the checkpoint when the server is killed, as a multiple of the duration of a measurement.
_AGE_WINDOWS = 2.0


def run(bench: "Bench") -> Result:
    """Measure the recovery from a killed server, and the pauses of pushes during a checkpoint."""
    recovery: list[float] = []
    caught_up: list[float] = []
    ages: list[float] = []
    pauses: list[tuple[float, float]] = []
    written: list[float] = []
    with Cluster(bench.job(_SERVERS, _TRAINERS, threads=1), bench.checkpoint) as cluster:
        status = cluster.wait_for_samples(_WARM_UP_SAMPLES)
        rows = [shard["figures"]["num_rows"] for shard in status["shards"]]
        for repeat in range(bench.sizes.repeats):
            bench.say(f"fault, {repeat + 1}/{bench.sizes.repeats}: a checkpoint, an equal time without one, a kill")
            at, without, took = _measure_pause(cluster)
            pauses.append((at, without))
            written.append(took)
            time.sleep(max(_AGE_WINDOWS * bench.sizes.seconds - took, 0.0))
            age, first_push, all_caught_up = _measure_recovery(cluster)
            ages.append(age)
            recovery.append(first_push)
            caught_up.append(all_caught_up)
    return {
        "rows_a_server": min(rows),
        "recovery_s": statistics.median(recovery),
        "recovery_worst_s": max(recovery),
        "caught_up_s": statistics.median(caught_up),
        "checkpoint_age_s": statistics.median(ages),
        "caught_up_allowed_s": 1.5 * statistics.median(ages) + 10,
        "checkpoint_s": statistics.median(written),
        "pause_ms": statistics.median(1000 * (at - without) for at, without in pauses),
        "longest_gap_ms": statistics.median(1000 * at for at, _ in pauses),
        "longest_gap_without_ms": statistics.median(1000 * without for _, without in pauses),
    }


def _measure_pause(cluster: Cluster) -> tuple[float, float, float]:
    """Return the longest gap between pushes during a checkpoint and in an equal time after it, and that time."""
    with cluster.servers(cluster.wait_for_servers()) as client:
        ticket = cluster.checkpoint()
        start = time.monotonic()
        with Gaps(client) as at_checkpoint:
            cluster.wait(lambda status: status["checkpoint"]["ticket"] >= ticket, "a checkpoint")
        took = time.monotonic() - start
        end = time.monotonic() + took
        with Gaps(client) as without:
            cluster.wait(lambda _: time.monotonic() >= end, "the end of an equal time")
        return at_checkpoint.longest, without.longest, took


class Gaps:
    """Measures from outside the longest time in which a server applied no push.

    Runs on its own thread, because waiting for the coordinator would look like a gap.
    """

    def __init__(self, client: _core.PsClient) -> None:
        self._client = client
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="gaps")
        self.longest = 0.0

    def _poll(self) -> None:
        before = self._client.applied()
        since = [time.monotonic()] * len(before)
        while not self._ended.wait(_POLL_S):
            applied, now = self._client.applied(), time.monotonic()
            for server, count in enumerate(applied):
                # A gap that is still open counts too.
                self.longest = max(self.longest, now - since[server])
                if count != before[server]:
                    since[server] = now
            before = applied

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _measure_recovery(cluster: Cluster) -> tuple[float, float, float]:
    """Kill a server; return the age of the checkpoint, and the seconds to the first push and until it caught up."""
    status = cluster.wait(lambda status: status["checkpoint"]["age_s"] is not None, "a checkpoint")
    age = status["checkpoint"]["age_s"] or 0.0
    before = status["shards"][_KILLED]["incarnation"]
    start = time.monotonic()
    os.kill(process_of(cluster.child(f"ps-{_KILLED}")), signal.SIGKILL)

    def is_back(status: Status) -> bool:
        shard = status["shards"][_KILLED]
        return bool(shard["state"] == "serving" and shard["incarnation"] != before)

    status = cluster.wait(is_back, "a successor")
    with cluster.servers(status) as client:
        while client.applied()[_KILLED] == 0:
            time.sleep(_POLL_S)
        first_push = time.monotonic() - start
    cluster.wait(lambda status: status["units"]["behind"] == 0 and is_back(status), "a server that has caught up")
    return age, first_push, time.monotonic() - start


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text."""
    return [
        f"kill -9 of a server with {result['rows_a_server']:,} rows: its successor applies a push after "
        f"{result['recovery_s']:.1f} s (at most {result['recovery_worst_s']:.1f} s) and has caught up after "
        f"{result['caught_up_s']:.1f} s, with a checkpoint {result['checkpoint_age_s']:.1f} s old "
        f"(allowed {result['caught_up_allowed_s']:.1f} s)",
        f"a checkpoint takes {result['checkpoint_s']:.1f} s; the longest gap between pushes during it is "
        f"{result['longest_gap_ms']:.0f} ms, without a checkpoint {result['longest_gap_without_ms']:.0f} ms: "
        f"{result['pause_ms']:.0f} ms longer",
    ]
