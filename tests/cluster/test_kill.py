"""Trainers, servers and the coordinator are killed again and again; every sample counts once."""

import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

import pytest

from elasticrec.config.strategies import STRATEGIES
from support.cluster import TIMEOUT_S, Trainings, Undisturbed, wait_for_end

# `make soak` runs twenty seeds.
SEEDS = int(os.environ.get("ELASTICREC_SOAK", "2"))


@pytest.mark.slow
def test_all_strategies_reach_the_same_auc(undisturbed: Callable[[str], Undisturbed]) -> None:
    auc = {strategy: undisturbed(strategy).auc for strategy in STRATEGIES}
    assert {strategy for strategy in STRATEGIES if abs(auc[strategy] - auc["sync"]) >= 0.002} == set(), auc
    assert auc["sync"] > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_audit_agrees_with_a_count_by_hand(undisturbed: Callable[[str], Undisturbed], strategy: str) -> None:
    """The other tests rely on the audit, which `undisturbed` has run."""
    undisturbed(strategy).trainings.check_by_hand()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_any_role_may_be_killed_at_any_moment(
    trainings: Trainings, undisturbed: Callable[[str], Undisturbed], strategy: str, seed: int
) -> None:
    calm = undisturbed(strategy)
    training = trainings.start(f"train.strategy={strategy}")
    training.wait_for("servers 2/2")
    training.disturb(seed, calm.fault_interval_s, ("ps", "trainer", "coordinator"))
    output = training.finish()
    assert training.kills.total() >= 2, "the run ended before two kills"
    assert f"{trainings.num_samples:,} samples" in output
    assert abs(trainings.check() - calm.auc) < 0.003
    if strategy == "sync":
        assert trainings.parameters() == calm.parameters, "equal bit for bit"


@pytest.mark.slow
def test_a_hung_server_is_replaced_and_does_no_harm_when_it_wakes_up(short_trainings: Trainings) -> None:
    training = short_trainings.start()
    training.wait_for(r"units [1-9]\d* of")
    (process, _), *_ = training.roles("ps")
    training.send(process, signal.SIGSTOP)
    training.wait_for("does not respond: replacing it")
    training.send(process, signal.SIGCONT)
    training.finish()
    short_trainings.check()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_is_scaled(trainings: Trainings, undisturbed: Callable[[str], Undisturbed], strategy: str) -> None:
    """With `sync`, scaling changes no bit: the job defines the steps, not the number of trainers."""
    # Long enough for a fast machine; steps of `sync` are slower.
    epochs = 1 if strategy == "sync" else 3
    training = trainings.start(f"train.strategy={strategy}", f"train.epochs={epochs}")
    training.wait_for(r"units [1-9]\d* of")
    command = [sys.executable, "-m", "elasticrec", "scale", "cluster", "--servers", "3", "--trainers", "3"]
    scaled = subprocess.run(command, cwd=trainings.directory, capture_output=True, text=True, check=False)
    assert scaled.returncode == 0 and "scaled to 3 servers" in scaled.stdout, scaled.stdout + scaled.stderr
    assert f"{epochs * trainings.num_samples:,} samples" in training.finish()
    trainings.check(epochs)
    if strategy == "sync":
        assert trainings.parameters() == undisturbed(strategy).parameters, "equal bit for bit"


@pytest.mark.slow
def test_a_run_resumes_after_all_its_processes_were_killed(trainings: Trainings) -> None:
    training = trainings.start()
    training.wait_for("servers 2/2")
    training.wait_until(lambda: any((trainings.run / "checkpoints").glob("ps-*/manifest.json")))
    roles = dict(training.roles())
    # There is one more if a role took so long to start that it was replaced.
    assert Counter(roles.values()) >= Counter(["coordinator", "ps", "ps", "trainer", "trainer"])
    training.process.kill()
    training.process.wait()
    wait_for_end(roles)
    # Three servers load the checkpoint of two.
    output = trainings.start("train.trainers=1", "train.servers=3").finish()
    assert f"trained runs/cluster: {trainings.num_samples:,} samples" in output and "servers 3/3" in output
    assert "the partitions moved from 2 to 3" in (trainings.run / "logs/coordinator.log").read_text()
    trainings.check()


@pytest.mark.slow
def test_a_coordinator_that_gets_sigterm_does_not_end_the_run(short_trainings: Trainings) -> None:
    training = short_trainings.start()
    training.wait_for(r"units [1-9]\d* of")
    ((process, _),) = training.roles("coordinator")
    training.send(process, signal.SIGTERM)
    training.wait_for("coordinator ended with code 143")
    assert f"trained runs/cluster: {short_trainings.num_samples:,} samples" in training.finish()
    short_trainings.check()


@pytest.mark.slow
def test_a_stopped_run_is_saved_and_resumes(trainings: Trainings) -> None:
    training = trainings.start("train.checkpoint.every_s=3600")
    training.wait_for("servers 2/2")
    training.wait_for(r"units [1-9]\d* of")
    training.process.send_signal(signal.SIGTERM)
    assert training.process.wait(TIMEOUT_S) == 130
    assert "stopped and saved; run the same command to resume" in training.output()
    assert any((trainings.directory / "runs/cluster/checkpoints").glob("ps-*/manifest.json"))
    output = trainings.start().finish()
    assert f"trained runs/cluster: {trainings.num_samples:,} samples" in output
    trainings.check()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_damaged_checkpoint_is_skipped_and_named(trainings: Trainings, strategy: str) -> None:
    training = trainings.start(f"train.strategy={strategy}", "train.checkpoint.every_s=1")
    training.wait_for("servers 2/2")
    checkpoints = trainings.directory / "runs/cluster/checkpoints"
    training.wait_until(lambda: len(list(checkpoints.glob("ps-*/manifest.json"))) >= 2)
    training.process.send_signal(signal.SIGSTOP)
    roles = [process for process, _ in training.roles()]
    for process in roles:
        training.send(process, signal.SIGKILL)
    training.process.kill()
    training.process.wait()
    wait_for_end(roles)
    # Another checkpoint may have been completed before the kill.
    newest = max(checkpoints.glob("ps-*/manifest.json")).parent / "shard-00001.rows"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    trainings.start(f"train.strategy={strategy}").finish()
    log = (trainings.directory / "runs/cluster/logs/coordinator.log").read_text()
    assert re.search(rf"{newest.name}: .*; using ps-\S+ instead", log), log
    trainings.check()
