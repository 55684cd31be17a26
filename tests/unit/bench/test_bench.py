"""`bench`: every benchmark runs and reports consistent figures; the speed itself is not tested."""

import json
from typing import Any

import pytest

from elasticrec.bench import traffic
from elasticrec.cli import main


def test_bench_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--json", "--rows", "20000", "--repeats", "1"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["rows"], result["repeats"], result["row_bytes"]) == (20_000, 1, 98)
    assert result["pull_ratio"] == pytest.approx(result["pulls_per_s"] / result["probe_pulls_per_s"], abs=0.001)
    assert result["update_ratio"] == pytest.approx(result["updates_per_s"] / result["probe_updates_per_s"], abs=0.001)
    assert result["bytes_per_key"] > 10
    assert any(line.startswith("pulls: ") for line in lines)
    assert any(line.startswith("updates: ") for line in lines)


@pytest.mark.slow
def test_train_compared_with_its_network_and_the_rival(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--samples", "16384", "--rows", "2600", "--repeats", "1", "--seconds", "0.1"]
    assert main(["bench", "train", "--json", "--rivals", *sizes]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    for size in (512, 4096):
        ours, alone = result[f"samples_per_s_{size}"], result[f"dense_only_samples_per_s_{size}"]
        assert result[f"ratio_{size}"] == pytest.approx(ours / alone, abs=0.001)
        assert sum(result[f"shares_{size}"].values()) > 0.9
        assert any(line.startswith(f"batch {size}: ") for line in lines)
    for rival in ("torch", "torch_one_bag"):
        expected = result["samples_per_s"] / result[f"{rival}_samples_per_s"]
        assert result[f"vs_{rival}"] == pytest.approx(expected, abs=0.001)


@pytest.mark.slow
def test_serve_compared_with_its_engine_joining_latency_and_swaps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--json", "--rows", "26000", "--repeats", "1", "--seconds", "0.5"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    for instances in (128, 512):
        alone = result[f"engine_instances_per_cpu_s_{instances}"]
        ratios = []
        for protocol in ("http", "grpc"):
            ratios.append(result[f"instances_per_cpu_s_{protocol}_{instances}"] / alone)
            assert result[f"engine_ratio_{protocol}_{instances}"] == pytest.approx(ratios[-1], abs=0.001)
            assert {"queue", "parse", "lookup", "infer", "write"} <= result[f"stages_us_{protocol}_{instances}"].keys()
        assert result[f"engine_ratio_{instances}"] == pytest.approx(min(ratios), abs=0.001)
    gain = result["joined_requests_per_cpu_s"] / result["alone_requests_per_cpu_s"]
    assert result["batching_gain"] == pytest.approx(gain, abs=0.001)
    for share in (50, 80):
        for instances in (1, 16):
            p50, p99, p999 = (result[f"{name}_ms_at_{share}_{instances}"] for name in ("p50", "p99", "p999"))
            assert 0 < p50 <= p99 <= p999
    assert result["p99_ms_at_50"] == max(result["p99_ms_at_50_1"], result["p99_ms_at_50_16"])
    seen = result["p99s_ms_around_swaps"]
    assert {kind: len(values) for kind, values in seen.items()} == {"calm": 1, "base": 1, "delta": 1}
    worst = max(seen["base"][0], seen["delta"][0]) / seen["calm"][0]
    assert result["swap_p99_ratio"] == pytest.approx(worst, rel=0.05)
    assert any("each alone: " in line for line in lines) and any(
        "during a switch to a new base" in line for line in lines
    )


def ps_result(capsys: pytest.CaptureFixture[str], *parts: str) -> tuple[list[str], dict[str, Any]]:
    sizes = ["--samples", "16384", "--rows", "26000", "--repeats", "1", "--seconds", "1", "--max-trainers", "2"]
    chosen = [option for part in parts for option in ("--part", part)]
    assert main(["bench", "ps", "--json", *sizes, *chosen]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


@pytest.mark.slow
def test_ps_compared_with_its_network_and_cost_of_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = ps_result(capsys, "speed", "growth")
    for shape in ("1_1", "2_2"):
        expected = result[f"samples_per_s_{shape}"] / result["dense_only_samples_per_s"]
        assert result[f"ratio_{shape}"] == pytest.approx(expected, abs=0.001)
        by_threads = result[f"samples_per_s_{shape}_by_threads"]
        assert round(result[f"samples_per_s_{shape}"]) == max(by_threads.values()) > 0
        assert by_threads[str(result[f"threads_{shape}"])] == max(by_threads.values())
        assert {"forward", "backward", "pull", "push", "wait"} <= result[f"shares_{shape}"].keys()
        assert result[f"cpu_s_{shape}"].keys() == {"coordinator", "ps", "trainer"}
    ours, alone = (
        result[f"{kind}cpu_s_a_million_2"] / result[f"{kind}cpu_s_a_million_1"] for kind in ("", "dense_only_")
    )
    assert result["cpu_growth"] == pytest.approx(ours - alone, abs=0.001)
    assert sum("samples/s" in line for line in lines) == 3
    assert any(line.startswith("growth: ") for line in lines)


@pytest.mark.slow
def test_ps_pulls_through_the_socket_and_recovery_of_a_killed_server(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = ps_result(capsys, "pull", "fault")
    ratios = [result[f"pull_socket_ratio_{rows}"] for rows in (520, 2080, 8190)]
    assert result["pull_socket_ratio"] == pytest.approx(min(ratios), abs=0.001) and min(ratios) > 0
    # The lease must expire before the new server may apply updates.
    assert 0 < result["recovery_s"] <= result["caught_up_s"]
    assert result["caught_up_allowed_s"] == pytest.approx(1.5 * result["checkpoint_age_s"] + 10, abs=0.001)
    gaps = result["longest_gap_ms"] - result["longest_gap_without_ms"]
    assert result["pause_ms"] == pytest.approx(gaps, abs=0.001)
    assert result["rows_a_server"] > 10_000
    assert any(line.startswith("kill -9 of a server with ") for line in lines)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ps", "--part", "luck"]) == 2
    assert capsys.readouterr().err == "error: bench: --part: expected speed, growth, pull, fault, got `luck`\n"


def test_bench_cube(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "cube", "--json", "--rows", "20000", "--repeats", "1", "--seconds", "1", "--deltas", "1"]
    assert main(arguments) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["keys_per_s"] > 0 and result["keys_per_server_cpu_s"] > 0
    assert result["inprocess_ratio"] > 0 and 10 < result["bytes_per_key"] < 13
    assert result["switch_failed"] == 0 and result["switch_ratio"] > 0
    assert result["delta_s"] > 0 and result["delta_rows"] == 20_000
    assert "redis_ratio" not in result


def test_rivals_of_the_cube_must_be_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(["bench", "cube", "--rows", "1000", "--rivals"]) == 2
    assert "redis-server is not installed" in capsys.readouterr().err


def test_traffic_warns_about_unreliable_figures() -> None:
    times = dict.fromkeys(("p50_us", "p90_us", "p99_us", "p999_us", "max_us", "lag_p99_us"), 10.0)
    counts = {"answered": 90, "failed": 2, "failures": {"status 429": 2}, "offered": 100, "connections": 8}
    rates = {"requests_per_s": 9.0, "instances_per_s": 9.0, "seconds": 10.0}
    good = {**times, **counts, **rates, "late": 0, "unsent": 0}
    assert traffic.describe(good)[1:] == [
        "  failed: 2 × status 429",
        "latency of answered requests: p50 0.01 ms, p90 0.01 ms, p99 0.01 ms, p99.9 0.01 ms, max 0.01 ms",
    ]
    assert traffic.describe({**good, "unsent": 8, "late": 50})[-1].startswith(
        "the generator fell behind: 8 of 100 requests were never sent: all 8 connections were busy"
    )
    assert traffic.describe({**good, "late": 50})[-1].startswith("50 of 100 requests waited for a connection")
    assert traffic.describe({**good, "lag_p99_us": 2500.0})[-1].startswith(
        "the generator fell behind: 1 % of the requests were sent 2.5 ms or more after they were due"
    )
