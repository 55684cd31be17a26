"""Lookups while versions change: a new base during traffic, then one delta after the other."""

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.bench.cube_store import MODEL, RealStore, entry_of
from elasticrec.errors import UnavailableError
from elasticrec.manifest import FileEntry

if TYPE_CHECKING:
    from elasticrec.bench.cube import Sizes

Result = dict[str, Any]

_COLUMNS = [("wide", 1), ("deep", 9)]
_WIDTH = 10
_PARTITIONS = 256
_CHANGED = 100_000
_REPLICAS = 2
# Seconds of traffic before a switch, and during it: a base of ten million rows takes about two.
_BEFORE_S = 2.0
_SWITCH_S = 8.0
_SHAPE = (1, 4)


def measure_switches(sizes: "Sizes", base: Path, directory: Path, say: Callable[[str], None]) -> Result:
    """Measure lookups while a new base is published, loaded and used, compared with the rate before."""
    ratios, took, failed, restarted = [], [], 0, 0
    with RealStore(directory / "switch", _COLUMNS, _PARTITIONS, replicas=1) as store:
        store.wait_for_all(store.publish_base(base, sizes.rows).number)
        traffic = _core.StoreTraffic(
            MODEL,
            [store.addresses],
            token="",
            version=1,
            rows=sizes.rows,
            batch=1000,
            miss_share=0.05,
            connections=_SHAPE[0],
            in_flight=_SHAPE[1],
        )
        for number in range(sizes.repeats):
            say(f"switch during traffic, {number + 1}/{sizes.repeats}")
            path = directory / f"base-{number + 2}"
            _core.write_bench_cube(path, sizes.rows, number + 2)
            entry = entry_of(path)
            ratio, seconds, figures = _measure_switch(store, traffic, path, entry, sizes.rows)
            ratios.append(ratio)
            took.append(seconds)
            failed += figures["failed"]
            restarted += figures["restarted"]
            path.unlink()
            store.repository.remove(str(number + 1))
    return {
        "switch_ratio": statistics.median(ratios),
        "switch_s": statistics.median(took),
        "switch_failed": failed,
        "switch_restarted": restarted,
    }


def _measure_switch(
    store: RealStore, traffic: _core.StoreTraffic, path: Path, entry: FileEntry, rows: int
) -> tuple[float, float, Result]:
    """Return the rate during a switch relative to the rate before, its seconds, and the figures of the requests."""
    figures: Result = {}
    client = threading.Thread(target=lambda: figures.update(traffic.run(_BEFORE_S + _SWITCH_S * max(1.0, rows / 1e7))))
    start = time.monotonic()
    client.start()
    time.sleep(_BEFORE_S)
    begin = time.monotonic() - start
    version = store.publish_base(path, rows, entry).number
    store.wait_for(version)
    traffic.switch(version)
    end = time.monotonic() - start
    client.join()
    slice_s, slices = figures["slice_s"], figures["slices"]
    # Include every time slice that the switch touches.
    first, last = int(begin / slice_s), int(end / slice_s) + 1
    warm = int(0.5 / slice_s)
    before = statistics.mean(slices[warm : first - 1] or [0])
    if not before:
        raise UnavailableError("bench: no lookup was answered in the seconds before a switch")
    return statistics.mean(slices[first:last]) / before, end - begin, figures


def measure_deltas(sizes: "Sizes", base: Path, directory: Path, say: Callable[[str], None]) -> Result:
    """Measure the time from the publish of a delta until every replica has it, alone and with one delta per second."""
    with RealStore(directory / "deltas", _COLUMNS, _PARTITIONS, _REPLICAS) as store:
        version = store.publish_base(base, sizes.rows).number
        store.wait_for_all(version)
        say(f"{sizes.repeats} deltas of {_CHANGED:,} rows")
        clients, times = store.clients(), []
        for _ in range(sizes.repeats):
            signs, values = _make_changes(sizes.rows, version + 1)
            start = time.monotonic()
            version = _publish_delta(store, version, signs, values, sizes.rows)
            store.wait_for_all(version)
            _check_rows(clients, version, signs)
            times.append(time.monotonic() - start)
            # Avoid a fixed phase relative to the polls.
            time.sleep(1.0 + times[-1] % 0.3)
        say(f"{sizes.deltas} deltas, one per second")
        lags = _measure_one_per_second(sizes, store, version)
    return {
        "delta_s": statistics.median(times),
        "delta_rows": min(_CHANGED, sizes.rows),
        "deltas": sizes.deltas,
        "deltas_lag_s": statistics.median(lags) if lags else 0.0,
        "deltas_max_lag_s": max(lags, default=0.0),
        "deltas_last_lag_s": lags[-1] if lags else 0.0,
    }


def _measure_one_per_second(sizes: "Sizes", store: RealStore, version: int) -> list[float]:
    """Return for each delta the seconds until it, or a newer version, was current."""
    due: dict[int, float] = {}
    lags: list[float] = []
    first, last = version + 1, version + sizes.deltas

    def watch() -> None:
        for number in range(first, last + 1):
            store.wait_for(number)
            lags.append(time.monotonic() - due[number])

    watching = threading.Thread(target=watch)
    watching.start()
    start = time.monotonic()
    for number in range(first, last + 1):
        signs, values = _make_changes(sizes.rows, number)
        time.sleep(max(0.0, start + number - first - time.monotonic()))
        # Count from the due time: a delta delayed by the delta before it is late.
        due[number] = start + number - first
        version = _publish_delta(store, version, signs, values, sizes.rows)
    watching.join()
    return lags


def _publish_delta(
    store: RealStore, parent: int, signs: npt.NDArray[np.uint64], values: npt.NDArray[np.float32], rows: int
) -> int:
    return store.publish_delta(parent, rows, len(signs), lambda path: _write_delta(path, signs, values)).number


def _check_rows(clients: list[_core.CubeClient], version: int, signs: npt.NDArray[np.uint64]) -> None:
    """Check that every replica has the rows of a delta."""
    for client in clients:
        found, present = client.get(version, np.ascontiguousarray(signs[:1000]))
        if not present.all() or not (found[:, 0] == version).all():
            raise UnavailableError(f"bench: version {version}: rows of a delta are missing")


def _make_changes(rows: int, version: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32]]:
    """Return distinct signs and their new rows."""
    numbers = np.random.default_rng(version).choice(rows, min(_CHANGED, rows), replace=False).astype(np.uint64)
    signs = numbers * np.uint64(0x9E3779B97F4A7C15)
    return signs, np.full((len(signs), _WIDTH), version, np.float32)


def _write_delta(path: Path, signs: npt.NDArray[np.uint64], values: npt.NDArray[np.float32]) -> tuple[int, str]:
    """Write a delta as a publish does, partition by partition."""
    partitions = partitions_of(signs)
    order = np.argsort(partitions, kind="stable")
    signs, values = signs[order], values[order]
    ends = np.searchsorted(partitions[order], np.arange(_PARTITIONS + 1))
    none = np.empty(0, np.uint64)
    writer = _core.DeltaWriter(str(path), _COLUMNS, row_type="f32", num_partitions=_PARTITIONS)
    for partition in range(_PARTITIONS):
        own = slice(ends[partition], ends[partition + 1])
        writer.add(partition, signs[own], values[own], none)
    size, digest = writer.finish()
    return size, digest


def partitions_of(signs: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return `partition_of` of `docs/formats/part.md` for 256 partitions: the top eight bits of the mixed sign."""
    mixed = signs.copy()
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed ^= mixed >> np.uint64(33)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(33)
    return mixed >> np.uint64(56)


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text."""
    return [
        f"a new base during traffic: {result['switch_ratio']:.2f} of the lookups/s before, for "
        f"{result['switch_s']:.1f} s; "
        f"{result['switch_failed']} failed, {result['switch_restarted']} restarted",
        f"a delta of {result['delta_rows']:,} rows is current and in {_REPLICAS} replicas after "
        f"{result['delta_s']:.2f} s; {result['deltas']} deltas, one per second: half within "
        f"{result['deltas_lag_s']:.2f} s, {result['deltas_max_lag_s']:.2f} s at most, "
        f"the last one {result['deltas_last_lag_s']:.2f} s",
    ]
