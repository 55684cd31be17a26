"""Roles started one by one with the command line, as on several machines."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elasticrec.config import load_job
from elasticrec.net.logs import without_stamp
from elasticrec.roles.coordinator import prepare
from elasticrec.run import Run
from support.harness import write_job

TIMEOUT_S = 1800.0
TOKEN = "a-token-that-must-not-be-seen"


def make_run(directory: Path, **changes: Any) -> Run:
    """A run that has not begun, on demo data: 2,000 samples, two servers, leases that outlast a stall."""
    changes = {"train__mode": "ps", "train__servers": 2, "train__ps": {"lease_s": 60}} | changes
    job = load_job(write_job(directory, format="slots", kind="lr", **changes))
    run = Run.create(job, directory / "runs")
    prepare(job, run)
    return run


class Role:
    """A role in a process of its own, told what it needs by the environment alone."""

    def __init__(self, name: str, log: Path, told: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.name, self.log = name, log
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ELASTICREC_")}
        environment = kept | {f"ELASTICREC_{key}": str(value) for key, value in told.items()}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "elasticrec", *name.split()],
                env=environment,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        """What it said so far, without the times of its lines."""
        lines = self.log.read_text(errors="replace").splitlines(keepends=True)
        return "".join(without_stamp(line) for line in lines)

    def wait_for(self, pattern: str) -> str:
        """Until it says something; returns the first group of that."""
        end = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self.output)):
            assert self.process.poll() is None and time.monotonic() < end, self.output
            time.sleep(0.05)
        return found[1]

    def finish(self) -> tuple[int, str]:
        """How it ended, and what it said."""
        return self.process.wait(TIMEOUT_S), self.output

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Roles:
    """The roles of a run; all end with the block."""

    def __init__(self, run: Run) -> None:
        self.run, self.started = run, list[Role]()

    def start(self, name: str, prefix: Sequence[str] = (), **told: Any) -> Role:
        """Another one; a prefix starts it in another world."""
        log = self.run.path.parent / f"{name.split()[0]}-{len(self.started)}.log"
        self.started.append(Role(name, log, {"RUN": self.run.path, "TOKEN": TOKEN} | told, prefix))
        return self.started[-1]

    def coordinator(self, **told: Any) -> str:
        """A coordinator that answers; returns its URL."""
        return self.start("coordinator", **told).wait_for(r"coordinator of .* on (\S+), term")

    def __enter__(self) -> "Roles":
        return self

    def __exit__(self, *_: object) -> None:
        for role in reversed(self.started):
            role.stop()
