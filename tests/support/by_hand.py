"""Roles started individually with the command line, as on several machines."""

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
    """Create a run on demo data that has not started: 2,000 samples, two servers, leases that outlast a stall."""
    changes = {"train__mode": "ps", "train__servers": 2, "train__ps": {"lease_s": 60}} | changes
    job = load_job(write_job(directory, format="slots", kind="lr", **changes))
    run = Run.create(job, directory / "runs")
    prepare(job, run)
    return run


class Role:
    """A role in its own process, configured by environment variables only."""

    def __init__(self, name: str, log: Path, settings: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.name, self.log = name, log
        kept = {key: value for key, value in os.environ.items() if not key.startswith("ELASTICREC_")}
        environment = kept | {f"ELASTICREC_{key}": str(value) for key, value in settings.items()}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "elasticrec", *name.split()],
                env=environment,
                stdout=output,
                stderr=output,
            )

    @property
    def output(self) -> str:
        """The output so far, without the times of its lines."""
        lines = self.log.read_text(errors="replace").splitlines(keepends=True)
        return "".join(without_stamp(line) for line in lines)

    def wait_for(self, pattern: str) -> str:
        """Wait until the output matches a pattern; return the first group."""
        end = time.monotonic() + TIMEOUT_S
        while not (found := re.search(pattern, self.output)):
            assert self.process.poll() is None and time.monotonic() < end, self.output
            time.sleep(0.05)
        return found[1]

    def finish(self) -> tuple[int, str]:
        """Wait for its end and return exit code and output."""
        return self.process.wait(TIMEOUT_S), self.output

    def stop(self) -> None:
        """Stop it, if it is running."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Roles:
    """The roles of a run, which are stopped at the end of the block."""

    def __init__(self, run: Run) -> None:
        self.run, self.started = run, list[Role]()

    def start(self, name: str, prefix: Sequence[str] = (), **settings: Any) -> Role:
        """Start a role; `prefix` is a command that runs it, for example in another network namespace."""
        log = self.run.path.parent / f"{name.split()[0]}-{len(self.started)}.log"
        self.started.append(Role(name, log, {"RUN": self.run.path, "TOKEN": TOKEN} | settings, prefix))
        return self.started[-1]

    def coordinator(self, **settings: Any) -> str:
        """Start a coordinator, wait until it answers, and return its URL."""
        return self.start("coordinator", **settings).wait_for(r"coordinator of .* on (\S+), term")

    def __enter__(self) -> "Roles":
        return self

    def __exit__(self, *_: object) -> None:
        for role in reversed(self.started):
            role.stop()
