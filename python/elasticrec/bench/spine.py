"""A short measurement of parsing, training and serving, compared with the network and the engine alone.

All parts use the same shape: Wide & Deep, 26 slots, dim 9, 13 dense values, MLP 400-400-400, generated Criteo rows.
"""

import contextlib
import io
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.bench.network import dense_only_rate
from elasticrec.bench.parse import parse_rate
from elasticrec.bench.serve_model import bench_job, write_criteo_rows
from elasticrec.bench.stages import mean_us, stages_of
from elasticrec.config import Job, match_files
from elasticrec.machine import num_cores
from elasticrec.publish.local import publish_run
from elasticrec.serving.onnxruntime import library_path
from elasticrec.serving.process import server_process
from elasticrec.training.loop import train_job
from elasticrec.training.report import Summary

Result = dict[str, Any]
_CONNECTIONS = 4


def run(samples: int, repeats: int, seconds: float, say: Callable[[str], None]) -> Result:
    """Return all figures, medians of `repeats`."""
    # Runs and models are written to the current directory.
    with tempfile.TemporaryDirectory(prefix="elasticrec-bench-") as scratch, contextlib.chdir(scratch):
        say(f"writing {samples:,} generated Criteo rows")
        write_criteo_rows(samples)
        job = bench_job()
        result: Result = {"samples": samples, "repeats": repeats, "cores": num_cores()}
        say("parsing")
        result["parse_mb_per_s"] = statistics.median(parse_rate(job) for _ in range(repeats))
        text = b"".join(match_files(job, "train")[0].read_bytes().splitlines(keepends=True)[: job.train.batch_size])
        # Both sides of a comparison take turns, so that other work on the machine affects them equally.
        trained, dense_only = [], []
        for repeat in range(repeats):
            say(f"training {repeat + 1}/{repeats}: the whole loop, then its network alone")
            trained.append(_train(job))
            dense_only.append(dense_only_rate(job, text, seconds))
        middle = sorted(trained, key=lambda summary: summary.samples_per_s)[len(trained) // 2]
        result["train_samples_per_s"] = middle.samples_per_s
        result["train_shares"] = {name: round(share, 4) for name, share in middle.shares.items()}
        result["dense_only_samples_per_s"] = statistics.median(rate for rate, _ in dense_only)
        result["dense_only_threads"] = statistics.mode(threads for _, threads in dense_only)
        result["train_ratio"] = result["train_samples_per_s"] / result["dense_only_samples_per_s"]
        say("publishing")
        published = publish_run(middle.run)
        result["rows"] = published.rows
        say("serving")
        result.update(_measure_serving(job, published.path, repeats, seconds))
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}


def describe(result: Result) -> list[str]:
    """Return the figures as lines of text, with the shares of time."""
    shares = sorted(result["train_shares"].items(), key=lambda item: -item[1])
    stages = result["serve_stages_us_128"]
    return [
        f"parsing, Criteo rows, one core: {result['parse_mb_per_s']:,.0f} MB/s",
        f"training, batch 512: {result['train_samples_per_s']:,.0f} samples/s, {result['train_ratio']:.2f} of the "
        f"network alone ({result['dense_only_samples_per_s']:,.0f}, {result['dense_only_threads']} threads)",
        "  time: " + ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005),
        f"serving, 1 sample per request: {result['serve_rps_1']:,.0f} requests/s, "
        f"p50 {result['serve_p50_us_1']:,.0f} µs, p99 {result['serve_p99_us_1']:,.0f} µs",
        f"serving, 128 samples per request: {result['serve_instances_per_s_128']:,.0f} samples/s, "
        f"{result['serve_ratio_128']:.2f} of the engine alone ({result['engine_instances_per_s_128']:,.0f}); "
        "traffic generator on the same cores",
        "  per request: " + ", ".join(f"{name} {micros:,.0f} µs" for name, micros in stages.items()),
    ]


def _train(job: Job) -> Summary:
    with contextlib.redirect_stderr(io.StringIO()):
        return train_job(job, fresh=True)


def _measure_serving(job: Job, path: Path, repeats: int, seconds: float) -> Result:
    lines = match_files(job, "train")[0].read_bytes().splitlines(keepends=True)
    ones = lines[:4096]
    batches = [b"".join(lines[at : at + 128]) for at in range(0, 128 * 64, 128)]
    rates: dict[str, list[float]] = {name: [] for name in ("one", "many", "engine", "p50", "p99")}
    with server_process(str(path)) as server:
        address = server.address

        def send(bodies: list[bytes]) -> _core.TrafficReport:
            report = _core.run_traffic(
                address,
                server.predict_path,
                bodies,
                connections=_CONNECTIONS,
                seconds=seconds,
            )
            assert not report.failed, report.failures
            return report

        for _ in range(repeats):
            report = send(ones)
            rates["one"].append(report.requests_per_s)
            rates["p50"].append(report.p50_us)
            rates["p99"].append(report.p99_us)
            before = stages_of(address)
            rates["many"].append(send(batches).requests_per_s * 128)
            stages = mean_us(before, stages_of(address))
            cores = num_cores()
            rates["engine"].append(
                _core.engine_rate(str(path), str(library_path()), batch=128, seconds=seconds, threads=cores)
            )
    middle = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "serve_rps_1": middle["one"],
        "serve_p50_us_1": middle["p50"],
        "serve_p99_us_1": middle["p99"],
        "serve_instances_per_s_128": middle["many"],
        "engine_instances_per_s_128": middle["engine"],
        "serve_ratio_128": middle["many"] / middle["engine"],
        "serve_stages_us_128": stages,
    }
