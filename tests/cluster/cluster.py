"""Real trainings with parameter servers for tests: started with the command line, disturbed, counted by hand."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

TIMEOUT_S = 240.0

_ROLE = re.compile(r"\s*(\d+)\s+(\d+)\s.* -m elasticrec (\w+) ")


@dataclass
class Training:
    """`elasticrec train` in a process of its own, and the processes it started."""

    process: subprocess.Popen[bytes]
    log: Path
    kills: Counter[str] = field(default_factory=Counter)

    @classmethod
    def start(cls, directory: Path, *settings: str) -> "Training":
        """Train `job.yaml` of a directory with these settings."""
        log = directory / "train.log"
        command = [sys.executable, "-m", "elasticrec", "train", "job.yaml"]
        command += [part for setting in settings for part in ("--set", setting)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, cwd=directory, stdout=output, stderr=output)
        return cls(process, log)

    def roles(self, *wanted: str) -> list[tuple[int, str]]:
        """Process ids and names of the roles that run now."""
        listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        found = [match for match in map(_ROLE.match, listed.splitlines()) if match]
        return [(int(m[1]), m[3]) for m in found if int(m[2]) == self.process.pid and (not wanted or m[3] in wanted)]

    def wait_for(self, pattern: str) -> None:
        """Until the log says something."""
        end = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.output()):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def disturb(self, seed: int, every_s: float, roles: Iterable[str]) -> None:
        """Kill a random role every few seconds until the training ends."""
        chance = random.Random(seed)
        end = time.monotonic() + TIMEOUT_S
        next_kill = time.monotonic() + every_s
        while self.process.poll() is None:
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)
            if time.monotonic() >= next_kill:
                next_kill = time.monotonic() + every_s * chance.uniform(0.5, 1.5)
                if running := self.roles(*roles):
                    process, role = chance.choice(running)
                    self.send(process, signal.SIGKILL)
                    self.kills[role] += 1

    def send(self, process: int, number: signal.Signals) -> None:
        """A signal to one of its processes, which may just have ended."""
        try:
            os.kill(process, number)
        except ProcessLookupError:
            return

    def finish(self) -> str:
        """Wait for its end, which must be a good one; returns what it said."""
        try:
            code = self.process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(self.output()) from None
        assert code == 0, self.output()
        return self.output()

    def stop(self) -> None:
        """End it and everything it started."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                for process, _ in self.roles():
                    self.send(process, signal.SIGKILL)
                self.process.kill()
                self.process.wait()

    def output(self) -> str:
        """What it said so far."""
        return self.log.read_text(errors="replace")


def count(files: Iterable[Path], epochs: int) -> dict[int, tuple[int, int]]:
    """Show and click of every sign of slot text, by hand."""
    counts: dict[int, list[int]] = {}
    for path in files:
        with path.open() as lines:
            for line in lines:
                show, click, *fields = line.split()
                for item in fields:
                    found = counts.setdefault(int(item.partition(":")[0]), [0, 0])
                    found[0] += int(show)
                    found[1] += int(click)
    return {sign: (show * epochs, click * epochs) for sign, (show, click) in counts.items()}
