"""What a killed server costs, and how long a checkpoint holds training up."""

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
# Between two looks at what a server has applied.
_LOOK_S = 0.002
# The age of the checkpoint when the server is killed, in windows of a measurement.
_AGE_WINDOWS = 2.0


def run(bench: "Bench") -> Result:
    """Seconds from the kill of a server to its successor's first push and until it lacks nothing; pauses of pushes."""
    recovery: list[float] = []
    caught_up: list[float] = []
    ages: list[float] = []
    pauses: list[tuple[float, float]] = []
    written: list[float] = []
    with Cluster(bench.job(_SERVERS, _TRAINERS, threads=1), bench.checkpoint) as cluster:
        status = cluster.wait_for_samples(_WARM_UP_SAMPLES)
        rows = [shard["figures"]["num_rows"] for shard in status["shards"]]
        for repeat in range(bench.sizes.repeats):
            bench.say(f"fault, {repeat + 1}/{bench.sizes.repeats}: a checkpoint, a window without one, a kill")
            at, without, took = _pause(cluster)
            pauses.append((at, without))
            written.append(took)
            time.sleep(max(_AGE_WINDOWS * bench.sizes.seconds - took, 0.0))
            age, first_push, nothing_lacks = _kill(cluster)
            ages.append(age)
            recovery.append(first_push)
            caught_up.append(nothing_lacks)
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


def _pause(cluster: Cluster) -> tuple[float, float, float]:
    """The longest gap between pushes while a checkpoint is written, that of an equal time after it, and that time."""
    with cluster.servers(cluster.wait_for_servers()) as client:
        ticket = cluster.checkpoint()
        start = time.monotonic()
        with Gaps(client) as at_checkpoint:
            cluster.wait(lambda status: status["checkpoint"]["ticket"] >= ticket, "a checkpoint")
        took = time.monotonic() - start
        end = time.monotonic() + took
        with Gaps(client) as without:
            cluster.wait(lambda _: time.monotonic() >= end, "an equal time")
        return at_checkpoint.longest, without.longest, took


class Gaps:
    """The longest time in which a server applied nothing, looked at from outside.

    On a thread of its own: somebody who also waits for the coordinator would take that for a gap.
    """

    def __init__(self, client: _core.PsClient) -> None:
        self._client = client
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="gaps")
        self.longest = 0.0

    def _look(self) -> None:
        before = self._client.applied()
        since = [time.monotonic()] * len(before)
        while not self._ended.wait(_LOOK_S):
            applied, now = self._client.applied(), time.monotonic()
            for server, count in enumerate(applied):
                # one that is still open counts too
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


def _kill(cluster: Cluster) -> tuple[float, float, float]:
    """Kill a server: the age of the checkpoint, the time to its successor's first push, and until nothing lacks."""
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
            time.sleep(_LOOK_S)
        first_push = time.monotonic() - start
    cluster.wait(lambda status: status["units"]["behind"] == 0 and is_back(status), "that nothing lacks")
    return age, first_push, time.monotonic() - start


def describe(result: Result) -> list[str]:
    """For people."""
    return [
        f"kill -9 of a server with {result['rows_a_server']:,} rows: its successor applies a push after "
        f"{result['recovery_s']:.1f} s (the longest of all {result['recovery_worst_s']:.1f} s) and lacks nothing after "
        f"{result['caught_up_s']:.1f} s, with a checkpoint {result['checkpoint_age_s']:.1f} s old "
        f"(allowed {result['caught_up_allowed_s']:.1f} s)",
        f"a checkpoint takes {result['checkpoint_s']:.1f} s; the longest gap between pushes meanwhile "
        f"{result['longest_gap_ms']:.0f} ms, without one {result['longest_gap_without_ms']:.0f} ms: "
        f"{result['pause_ms']:.0f} ms beyond",
    ]
