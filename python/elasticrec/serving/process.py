"""Run `elasticrec serve` as a process on a free port, for the demo, benchmarks and tests."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from elasticrec.errors import UnavailableError

# The line that `elasticrec serve` prints when it is ready.
_READY = re.compile(r"^serving (\S+) version (\d+) .* on (https?://[^/]+)/")


@dataclass(frozen=True)
class ServerProcess:
    """A running server."""

    process: "subprocess.Popen[str]"
    model: str
    version: int
    url: str

    @property
    def address(self) -> str:
        """Host and port."""
        return self.url.partition("://")[2]

    @property
    def predict_path(self) -> str:
        """Path for predictions."""
        return f"/v1/models/{self.model}:predict"

    @property
    def predict_url(self) -> str:
        """URL for predictions."""
        return f"{self.url}{self.predict_path}"


@contextmanager
def server_process(
    *arguments: str,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    stderr: IO[str] | int | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> Iterator[ServerProcess]:
    """Yield `elasticrec serve …` once it is ready, and end it after the block; `say` receives each line it prints."""
    command = [sys.executable, "-u", "-m", "elasticrec.cli", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(
        command, cwd=cwd, env=os.environ | (env or {}), stdout=subprocess.PIPE, stderr=stderr, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        try:
            yield _wait_until_ready(process, process.stdout, say)
        finally:
            process.terminate()
            for line in process.stdout:
                say(line.rstrip("\n"))
            process.wait()


def _wait_until_ready(process: "subprocess.Popen[str]", output: IO[str], say: Callable[[str], object]) -> ServerProcess:
    for line in output:
        say(line.rstrip("\n"))
        if match := _READY.search(line):
            return ServerProcess(process, match[1], int(match[2]), match[3])
    raise UnavailableError(f"serve: the server ended with code {process.wait()} before it was ready")
