"""Processes that run a custom reader in parallel; batches keep the order of the units."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.data.reader import SHOWN_BAD
from elasticrec.data.reader_worker import read_message, write_message
from elasticrec.data.units import Unit
from elasticrec.errors import SampleError


class _Worker:
    """One reader process and the unit that it reads."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "elasticrec.data.reader_worker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        self._send(process, self._setup)
        return process

    @staticmethod
    def _send(process: "subprocess.Popen[bytes]", message: Any) -> None:
        assert process.stdin is not None
        try:
            write_message(process.stdin, message)
        except BrokenPipeError:
            # The process has died; reading its replies raises the error.
            pass

    def begin(self, unit: Unit, options: dict[str, Any]) -> None:
        """Request the batches of a unit."""
        self._unit, self._options = unit, options
        self._send(self._process, (unit.core(), options))

    def batches(self) -> Iterator[Any]:
        """Yield the parts of the unit's batches, each with the seconds spent reading and parsing it.

        Restart a process that dies, but raise if it dies twice at the same batch.
        """
        num_done, died_at = 0, -1
        while True:
            assert self._process.stdout is not None
            try:
                kind, content = read_message(self._process.stdout)
            except EOFError:
                code = self._process.wait()
                if died_at == num_done:
                    raise SampleError(
                        f"{self._unit.path}: the reader process (data.reader) died twice, with exit code {code}, "
                        f"in batch {self._options['skip_batches'] + num_done} of unit {self._unit.id}"
                    ) from None
                died_at = num_done
                self.close()
                self._process = self._start()
                options = {**self._options, "skip_batches": self._options["skip_batches"] + num_done}
                self._send(self._process, (self._unit.core(), options))
                continue
            if kind == "error":
                raise content
            if kind == "end":
                return
            num_done += 1
            yield content

    def close(self) -> None:
        """Stop the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass
        self._process.kill()
        self._process.wait()


class ReaderProcesses:
    """An iterator over the batches of units that starts its own reader processes."""

    def __init__(
        self, job: Job, parser: _core.Parser, units: list[Unit], options: dict[str, Any], *, labels: bool
    ) -> None:
        setup = {
            "features": json.dumps(job.features()),
            "missing": parser.missing,
            "reader": job.data.reader,
            "source": job.reader_source(),
            "labels": labels,
        }
        self._parser = parser
        self._seconds = [0.0, 0.0]
        self._workers = [_Worker(setup) for _ in range(min(job.data.workers, max(len(units), 1)))]
        self._batches = self._read(units, options)

    def _read(self, units: list[Unit], options: dict[str, Any]) -> Iterator[_core.Batch]:
        workers, shown = self._workers, 0
        # Each process has one unit at a time: while one is read, the others fill their pipes.
        rest = {**options, "skip_batches": 0}
        for at, worker in enumerate(workers[: len(units)]):
            worker.begin(units[at], rest if at else options)
        for at in range(len(units)):
            worker = workers[at % len(workers)]
            for parts, (read_s, parse_s) in worker.batches():
                self._seconds[0] += read_s
                self._seconds[1] += parse_s
                numbers, (bad, location), *arrays = parts
                bad = bad[: max(SHOWN_BAD - shown, 0)]
                shown += len(bad)
                yield _core.batch_from_parts(self._parser, (numbers, (bad, location), *arrays))
            if at + len(workers) < len(units):
                worker.begin(units[at + len(workers)], rest)

    def __iter__(self) -> Iterator[_core.Batch]:
        return self

    def __next__(self) -> _core.Batch:
        return next(self._batches)

    def times(self) -> tuple[float, float]:
        """Return the mean seconds that a process spent reading, and the seconds that all spent parsing, so far."""
        return self._seconds[0] / len(self._workers), self._seconds[1]

    def close(self) -> None:
        """Stop the processes."""
        for worker in self._workers:
            worker.close()
