"""Disables protections one by one and checks that the test of each then fails.

    make mutants            all of them, a few minutes each
    python tests/mutants.py NAME…

Runs in its own working tree, which must be clean, and restores every file.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A protection, the edit that disables it, and the test that must fail without it."""

    name: str
    file: str
    before: str
    after: str
    test: str


MUTANTS = (
    Mutant(
        "a batch that was applied is applied again",
        "crates/ps/src/record.rs",
        "Some(&applied) if applied == checksum => BatchState::Applied,",
        "Some(&applied) if applied == checksum => BatchState::Missing,",
        "tests/cluster/test_kill.py::test_any_role_may_be_killed_at_any_moment[async-0]",
    ),
    Mutant(
        "a unit is complete when its trainer reports it",
        "python/elasticrec/coordinator/work.py",
        "        return known and all(record.has(unit) for record in self._records())",
        "        return known and unit < self._leased_end and unit not in self._leases",
        "tests/cluster/test_kill.py::test_any_role_may_be_killed_at_any_moment[async-0]",
    ),
    Mutant(
        "with sync only the lost shard returns to the checkpoint",
        "python/elasticrec/coordinator/members.py",
        "            self.must_reload = set(range(self.map.servers)) - {index}",
        "            self.must_reload = set()",
        "tests/unit/coordinator/test_groups.py::test_shards_return_to_a_checkpoint_together",
    ),
    Mutant(
        "a snapshot has rows and records of different times",
        "crates/ps/src/snapshot.rs",
        "            record: self.records.get(at).clone(),",
        "            record: if partition % 2 == 0 { self.records.get(at).clone() } else { Record::default() },",
        "tests/cluster/test_faults.py::test_roles_may_die_at_every_fail_point[async]",
    ),
    Mutant(
        "checksums of a checkpoint are not verified",
        "python/elasticrec/manifest.py",
        '    for name, entry in document["files"].items():\n        path = directory / name',
        "    for name, entry in ():\n        path = directory / name",
        "tests/cluster/test_kill.py::test_a_damaged_checkpoint_is_skipped_and_named[async]",
    ),
    Mutant(
        "a failed write of a part is not reported",
        "python/elasticrec/roles/background_writer.py",
        '            self._set_report(key, "failed", error=str(error))\n            return',
        "            return",
        "tests/cluster/test_faults.py::test_a_full_disk_fails_checkpoints_and_nothing_else[async]",
    ),
    Mutant(
        "a unit whose servers were lost is not given back",
        "python/elasticrec/roles/trainer.py",
        "            self._link.drop()\n            self._give_back()",
        "            raise",
        "tests/cluster/test_faults.py::test_connections_may_be_cut_in_the_middle_of_a_frame[async]",
    ),
    Mutant(
        "a hung coordinator is not replaced",
        "python/elasticrec/launch/local.py",
        "            child.process.kill()\n\n    def _reconcile",
        "            pass\n\n    def _reconcile",
        "tests/cluster/test_faults.py::test_a_coordinator_that_hangs_is_replaced",
    ),
    Mutant(
        "a hung server is not replaced",
        "python/elasticrec/launch/local.py",
        "            if is_hung:\n",
        "            if False:\n",
        "tests/cluster/test_kill.py::test_a_hung_server_is_replaced_and_does_no_harm_when_it_wakes_up",
    ),
    Mutant(
        "a unit is complete when its trainer reports it, after a server hung",
        "python/elasticrec/coordinator/work.py",
        "        return known and all(record.has(unit) for record in self._records())",
        "        return known and unit < self._leased_end and unit not in self._leases",
        "tests/cluster/test_faults.py::test_any_role_may_hang[async]",
    ),
    Mutant(
        "changes of a failed publish are lost",
        "crates/cube/src/publish.rs",
        "                    table.put_back_changes(partition, &taken);",
        "                    drop(taken);",
        "cargo test -p elasticrec-cube --lib committed_versions_equal_the_table",
    ),
    Mutant(
        "changes of a publish that found the disk full are lost",
        "crates/cube/src/publish.rs",
        "                    table.put_back_changes(partition, &taken);",
        "                    drop(taken);",
        "tests/cluster/test_publish.py::test_a_full_disk_loses_no_change",
    ),
    Mutant(
        "a restored server sends only the changes since the restore",
        "crates/cube/src/publish.rs",
        "                table.mark_all_changed(partition);",
        "                drop(table.take_changes(partition));",
        "tests/cluster/test_publish.py::test_any_role_may_be_killed_while_it_publishes[async]",
    ),
    Mutant(
        "changes of a failed publish of local training are lost",
        "python/elasticrec/publish/local_versions.py",
        "            committed=None if self._last is None else self._last.publish,",
        "            committed=str(self._num_publishes - 1),",
        "tests/unit/publish/test_changes.py::test_a_failed_publish_loses_no_change",
    ),
    Mutant(
        "a loaded table sends only the changes since the load",
        "crates/py/src/table.rs",
        "        self.publish_states = new_publish_states(&self.inner);",
        "",
        "tests/unit/publish/test_table_publish.py::test_a_loaded_table_publishes_all_rows",
    ),
    Mutant(
        "rows evicted after the last batch stay online",
        "python/elasticrec/publish/live.py",
        "    return trainer.progress.steps, trainer.progress.evicted",
        "    return trainer.progress.steps, 0",
        "tests/unit/publish/test_changes.py::test_evictions_after_the_last_batch_are_published",
    ),
    Mutant(
        "removed rows are not listed",
        "crates/table/src/rows/changes.rs",
        "            self.changes.get_or_insert_default().removed.push(sign);",
        "            let _ = sign;",
        "tests/cluster/test_publish.py::test_versions_equal_the_tables_of_the_servers[async]",
    ),
    Mutant(
        "a server without a lease continues",
        "crates/ps/src/server.rs",
        "        if self.start.elapsed().as_nanos() as u64 >= self.lease.load(Ordering::Acquire) {",
        "        if false {",
        "cargo test -p elasticrec-ps --test sockets a_server_without_a_lease_does_nothing",
    ),
    Mutant(
        "a pass that leaves jobs in the queue does not run again",
        "crates/queue/src/lib.rs",
        "            Attempt::More => self.is_due = self.queue.claim_pass(),",
        "            Attempt::More => (),",
        "cargo test -p elasticrec-serve --test serving requests_left_in_the_queue_are_scored_too",
    ),
    Mutant(
        "a worker that ran on a caller is not returned",
        "crates/queue/src/lib.rs",
        "        state.free_workers.push(worker);\n        if state.is_closed {",
        "        drop(worker);\n        if state.is_closed {",
        "cargo test -p elasticrec-queue --lib a_caller_runs_its_job_and_learns_that_more_is_queued",
    ),
    Mutant(
        "an HTTP/2 connection without a preface has no time limit",
        "crates/serve/src/server/listen.rs",
        "stream.with_preface(PREFACE.len(), app.options.header_timeout).joining_writes()",
        "stream.joining_writes()",
        "cargo test -p elasticrec-serve --lib a_connection_that_sends_only_its_start_is_closed",
    ),
    Mutant(
        "a client that does not read has no time limit",
        "crates/serve/src/server/time_limits.rs",
        "        this.writing.check(attempt, this.timeout, context)\n    }\n\n    fn is_write_vectored",
        "        attempt\n    }\n\n    fn is_write_vectored",
        "cargo test -p elasticrec-serve --lib a_client_that_never_reads_its_answers_is_disconnected",
    ),
    Mutant(
        "an expired request is not given up",
        "crates/serve/src/protocols/predict.rs",
        "    match deadline {\n        Some(deadline) => match",
        "    match deadline.filter(|_| false) {\n        Some(deadline) => match",
        "cargo test -p elasticrec-serve --lib a_request_waits_until_its_deadline",
    ),
    Mutant(
        "a full queue accepts one more job",
        "crates/queue/src/lib.rs",
        "        if state.jobs.len() >= self.shared.capacity {",
        "        if state.jobs.len() > self.shared.capacity {",
        "cargo test -p elasticrec-queue --lib a_full_queue_refuses_at_once",
    ),
    Mutant(
        "a delta is applied to rows of another base",
        "crates/serve/src/model/chain.rs",
        "        if other.version != parent || other.base.unwrap_or(other.version) != base {",
        "        if other.version != parent && other.base.is_none() && base == 0 {",
        "cargo test -p elasticrec-serve --test serving chain",
    ),
    Mutant(
        "no token is required",
        "crates/serve/src/protocols/http/front.rs",
        "            Some(token) if !has_token(request.headers(), token.0.as_bytes()) => match is_grpc {",
        "            Some(token) if token.0.is_empty() => match is_grpc {",
        "cargo test -p elasticrec-serve --lib token",
    ),
    Mutant(
        "a socket thread waits for rows of a store",
        "crates/serve/src/queue/deployment.rs",
        "let scores_on_sockets = model.rows().held().is_some() && batching.max_wait.is_zero();",
        "let scores_on_sockets = batching.max_wait.is_zero();",
        "tests/e2e/test_serve_follow.py::test_a_store_that_hangs_blocks_no_socket_thread",
    ),
    Mutant(
        "an answer names the newest version, not the one that scored it",
        "crates/serve/src/protocols/predict.rs",
        "    Ok((deployment.info.clone(), prediction))",
        "    Ok((registry.choose(request.choice)?.info.clone(), prediction))",
        "cargo test -p elasticrec-serve --lib a_switch_of_versions",
    ),
    Mutant(
        "bodies reserve no memory",
        "crates/serve/src/memory.rs",
        "        reservation.grow_to(num_bytes).map_err(ReadError::Refused)?;",
        "        reservation.grow_to(0).map_err(ReadError::Refused)?;",
        "cargo test -p elasticrec-serve --lib http::tests::large_bodies_share_the_memory_limit",
    ),
    Mutant(
        "inflated bodies reserve no memory",
        "crates/serve/src/memory.rs",
        "        reservation.grow_to(out.len()).map_err(ReadError::Refused)?;",
        "        reservation.grow_to(0).map_err(ReadError::Refused)?;",
        "cargo test -p elasticrec-serve --lib large_bodies_share_the_memory_limit",
    ),
    Mutant(
        "bRPC messages reserve no memory",
        "crates/serve/src/protocols/brpc/connection.rs",
        "        let payload = reservation.grow_to(payload.len())",
        "        let payload = reservation.grow_to(0)",
        "cargo test -p elasticrec-serve --lib brpc::tests::large_messages_share_the_memory_limit",
    ),
    Mutant(
        "an incomplete bRPC frame reserves no memory",
        "crates/serve/src/protocols/brpc/connection.rs",
        "reservation.grow_to(buffer.len())",
        "reservation.grow_to(0)",
        "cargo test -p elasticrec-serve --lib messages_count_while_they_arrive",
    ),
    Mutant(
        "a gRPC message is inflated to any length",
        "crates/serve/src/protocols/grpc/message.rs",
        "Compression::Gzip.inflate(message, max_bytes, memory.reservation())",
        "Compression::Gzip.inflate(message, usize::MAX >> 1, memory.reservation())",
        "cargo test -p elasticrec-serve --lib arrived_bytes_of_a_message_count",
    ),
    Mutant(
        "an output that is named twice is returned twice",
        "crates/serve/src/codecs/tensors.rs",
        "            if std::mem::replace(&mut is_wanted[label], true) {",
        "            if std::mem::replace(&mut is_wanted[label], false) {",
        "cargo test -p elasticrec-serve --lib answers_have_the_requested_outputs",
    ),
    Mutant(
        "the flag of a pass is cleared after the look at the queue",
        "crates/queue/src/lib.rs",
        """        self.queue.clear_pass();
        match self.queue.run_on_caller(max_last, accepts) {""",
        """        let attempt = self.queue.run_on_caller(max_last, accepts);
        self.queue.clear_pass();
        match attempt {""",
        "make test-loom",
    ),
    Mutant(
        "a pass that is dropped wakes no thread",
        "crates/queue/src/lib.rs",
        "            self.queue.clear_pass();\n            self.queue.wake();",
        "            self.queue.clear_pass();",
        "make test-loom",
    ),
    Mutant(
        "a worker that waits for more jobs is not notified",
        "crates/queue/src/lib.rs",
        "            return if state.num_waiting_workers > 0 { Attempt::Refused } else { Attempt::Settled };",
        "            return Attempt::Settled;",
        "make test-loom",
    ),
)


def run(command: list[str]) -> int:
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False
    ).returncode


def test(mutant: Mutant) -> bool:
    """Return whether the test still passes."""
    if mutant.test.startswith(("cargo ", "make ")):
        return run(mutant.test.split()) == 0
    assert run(["make", "-s", "setup"]) == 0, "the mutant does not build"
    return run([str(ROOT / ".venv/bin/pytest"), "-q", "-x", mutant.test]) == 0


def main(names: list[str]) -> int:
    if subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, check=True).stdout:
        print("the working tree has uncommitted changes", file=sys.stderr)
        return 2
    survived = []
    for mutant in MUTANTS:
        if names and not any(name in mutant.name for name in names):
            continue
        path = ROOT / mutant.file
        text = path.read_text()
        assert text.count(mutant.before) == 1, f"{mutant.name}: {mutant.file} has changed"
        started = time.monotonic()
        try:
            path.write_text(text.replace(mutant.before, mutant.after))
            passes = test(mutant)
        finally:
            path.write_text(text)
        survived += [mutant.name] if passes else []
        print(f"{'SURVIVED' if passes else 'caught'}: {mutant.name} ({time.monotonic() - started:.0f} s)", flush=True)
    assert run(["make", "-s", "setup"]) == 0
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
