"""The speed of training with servers compared with its network alone, and the cost of more trainers."""

import statistics
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from elasticrec.bench.cluster import Cluster, Rates
from elasticrec.bench.network import dense_only_rate
from elasticrec.errors import ModelError

if TYPE_CHECKING:
    from elasticrec.bench.ps import Bench

Result = dict[str, Any]

# Servers, trainers, and numbers of threads per trainer to try; the network alone uses its best number too.
SHAPES = {"1_1": (1, 1, (1, 2)), "2_2": (2, 2, (1,))}
_GROWTH_SERVERS = 2
# Batches that warm up caches, threads and the allocator.
_WARM_UP_BATCHES = 40


def speed(bench: "Bench") -> Result:
    """Measure samples per second with as many cores as the network alone; both are measured in turn."""
    rates: dict[str, list[float]] = {"dense": [], "dense_2": []}
    measured: dict[str, dict[int, list[Rates]]] = {
        shape: {number: [] for number in threads} for shape, (_, _, threads) in SHAPES.items()
    }
    job = bench.job(1, 1)
    for repeat in range(bench.sizes.repeats):
        bench.say(f"speed, {repeat + 1}/{bench.sizes.repeats}: the network alone, then with servers")
        rates["dense"].append(dense_only_rate(job, bench.text, bench.sizes.seconds / 2)[0])
        rates["dense_2"].append(_dense_processes(bench, 2)[0])
        for shape, (servers, trainers, threads) in SHAPES.items():
            for number in threads:
                measured[shape][number].append(_measure(bench, servers, trainers, number))
    alone = statistics.median(rates["dense"])
    result: Result = {
        "dense_only_samples_per_s": alone,
        "dense_only_2_processes_samples_per_s": statistics.median(rates["dense_2"]),
    }
    for shape, by_threads in measured.items():
        medians = {
            number: statistics.median(one.samples_per_s for one in found) for number, found in by_threads.items()
        }
        best = max(medians, key=lambda number: medians[number])
        found, rate = by_threads[best], medians[best]
        middle = sorted(found, key=lambda one: one.samples_per_s)[len(found) // 2]
        result |= {
            f"samples_per_s_{shape}": rate,
            f"samples_per_s_{shape}_by_threads": {str(number): round(median) for number, median in medians.items()},
            f"threads_{shape}": best,
            f"ratio_{shape}": rate / alone,
            f"shares_{shape}": middle.shares,
            f"cpu_s_{shape}": {role: round(cpu_s, 3) for role, cpu_s in middle.cpu_s.items()},
        }
    return result


def growth(bench: "Bench") -> Result:
    """Measure CPU seconds per million samples with more and more trainers; networks alone are measured in turn."""
    counts = [1 << power for power in range(16) if 1 << power <= bench.sizes.max_trainers]
    ours: dict[int, list[Rates]] = {count: [] for count in counts}
    alone: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(bench.sizes.repeats):
        for count in counts:
            bench.say(f"growth, {repeat + 1}/{bench.sizes.repeats}: {count} trainers, then {count} networks alone")
            ours[count].append(_measure(bench, _GROWTH_SERVERS, count, 1))
            alone[count].append(_dense_processes(bench, count)[1])
    cost = {count: statistics.median(one.cpu_s_a_million for one in found) for count, found in ours.items()}
    dense = {count: statistics.median(found) for count, found in alone.items()}
    first, last = counts[0], counts[-1]
    own, theirs = cost[last] / cost[first] - 1, dense[last] / dense[first] - 1
    result: Result = {"cpu_growth": own - theirs, "cpu_growth_ours": own, "cpu_growth_dense_only": theirs}
    for count in counts:
        middle = sorted(ours[count], key=lambda one: one.cpu_s_a_million)[len(ours[count]) // 2]
        result |= {
            f"cpu_s_a_million_{count}": cost[count],
            f"dense_only_cpu_s_a_million_{count}": dense[count],
            f"cpu_s_a_million_{count}_by_role": {
                role: round(cpu_s / middle.samples_per_s * 1e6, 2) for role, cpu_s in middle.cpu_s.items()
            },
        }
    result["growth_trainers"] = counts
    return result


def _measure(bench: "Bench", servers: int, trainers: int, threads: int) -> Rates:
    with Cluster(bench.job(servers, trainers, threads=threads), bench.checkpoint) as cluster:
        cluster.wait_for_samples(_WARM_UP_BATCHES * 512)
        return cluster.measure(bench.sizes.seconds)


def _dense_processes(bench: "Bench", count: int) -> tuple[float, float]:
    """Run networks alone in single-threaded processes; return samples per second and CPU seconds per million."""
    Path("dense.yaml").write_text(yaml.safe_dump(bench.raw))
    Path("dense.txt").write_bytes(bench.text)
    command = [sys.executable, "-m", "elasticrec.bench.dense_process", "dense.yaml", "dense.txt"]
    processes = [
        subprocess.Popen([*command, str(bench.sizes.seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    try:
        for process in processes:
            if _line_of(process) != "ready":
                raise ModelError("bench: process of the network alone: expected `ready`, but it exited")
        for process in processes:
            assert process.stdin is not None
            print("go", file=process.stdin, flush=True)
        figures = [[float(figure) for figure in _line_of(process).split()] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    cpu_s, samples = sum(cpu for _, _, cpu in figures), sum(samples for samples, _, _ in figures)
    return sum(samples / took for samples, took, _ in figures), cpu_s / samples * 1e6


def _line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def describe_speed(result: Result) -> list[str]:
    """Return the figures as lines of text."""
    lines = [
        f"the network alone: {result['dense_only_samples_per_s']:,.0f} samples/s; as two single-threaded processes "
        f"{result['dense_only_2_processes_samples_per_s']:,.0f}"
    ]
    for shape, (servers, trainers, _) in SHAPES.items():
        rate, threads = result[f"samples_per_s_{shape}"], result[f"threads_{shape}"]
        lines.append(
            f"{trainers} trainers with {threads} threads, {servers} servers: {rate:,.0f} samples/s: "
            f"{result[f'ratio_{shape}']:.2f} of the network alone"
        )
        shares = sorted(result[f"shares_{shape}"].items(), key=lambda item: -item[1])
        lines.append("  trainer time: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005))
        cores = result[f"cpu_s_{shape}"].items()
        lines.append("  cores used: " + ", ".join(f"{role} {cpu_s:.2f}" for role, cpu_s in cores))
    return lines


def describe_growth(result: Result) -> list[str]:
    """Return the figures as lines of text."""
    lines = []
    for count in result["growth_trainers"]:
        roles = result[f"cpu_s_a_million_{count}_by_role"].items()
        lines.append(
            f"{count} trainers: {result[f'cpu_s_a_million_{count}']:.1f} CPU seconds per million samples ("
            + ", ".join(f"{role} {cpu_s:.1f}" for role, cpu_s in roles)
            + f"); networks alone {result[f'dense_only_cpu_s_a_million_{count}']:.1f}"
        )
    lines.append(
        f"growth: {result['cpu_growth_ours']:+.3f}, networks alone {result['cpu_growth_dense_only']:+.3f}: "
        f"{result['cpu_growth']:+.3f} more"
    )
    return lines
