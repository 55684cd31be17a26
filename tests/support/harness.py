"""Real processes for tests: the command line, and a server on a free port."""

import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from elasticrec import _core
from elasticrec.serving.process import ServerProcess, server_process

TIMEOUT_S = 600


def elasticrec(*arguments: str, cwd: Path, env: dict[str, str] | None = None, stdin: str | None = None) -> Any:
    """Run a command and wait for its end."""
    return subprocess.run(
        [sys.executable, "-m", "elasticrec.cli", *arguments],
        cwd=cwd,
        env=os.environ | (env or {}),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def succeed(*arguments: str, cwd: Path, **options: Any) -> str:
    """Run a command that must succeed; return its output."""
    result = elasticrec(*arguments, cwd=cwd, **options)
    assert result.returncode == 0, result.stderr
    return str(result.stdout)


@contextmanager
def serving(
    *arguments: str, cwd: Path, env: dict[str, str] | None = None, log: Path | None = None
) -> Iterator[ServerProcess]:
    """Run `elasticrec serve … --port 0`, ready when the block begins; its output goes to `log`."""
    with open(log or os.devnull, "w") as output:
        lines: list[str] = []
        try:
            with server_process(*arguments, cwd=cwd, env=env, stderr=output, say=lines.append) as server:
                yield server
        finally:
            output.writelines(f"{line}\n" for line in lines)


def write_job(directory: Path, *, format: str, kind: str, **changes: Any) -> Path:
    """Write demo data to `directory`, and a small job that trains on it with one thread."""
    samples = changes.pop("samples", 4000)
    slots = 26 if format == "criteo" else 8
    _core.write_demo(
        str(directory / "data"),
        samples=samples,
        slots=slots,
        hours=2,
        seed=1,
        format=format,
        overwrite=True,
        threads=1,
        progress=None,
    )
    job: dict[str, Any] = {
        "name": "tiny",
        "data": {"format": format, "train": ["data/20260101/00"], "eval": ["data/20260101/01"], "unit_bytes": 65536},
        "model": {"kind": kind, "dim": 4, "hidden": [16, 8]},
        "sparse": {"partitions": 16},
        "train": {"batch_size": 128, "threads": 1},
    }
    if format == "slots":
        job["data"]["slots"] = [f"0-{slots - 1}"]
    for key, value in changes.items():
        section, _, name = key.partition("__")
        job.setdefault(section, {})[name] = value
    path = directory / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def odd_lines(lines: Sequence[bytes], format: str, count: int, slots: Sequence[str] = tuple("01234567")) -> list[bytes]:
    """Return `count` samples: unchanged, with unknown signs, with empty slots, and empty.

    For slot text, a sample with unknown signs has one per name in `slots`.
    """
    draw = random.Random(7)
    odd = []
    for number in range(count):
        line = lines[number % len(lines)].rstrip(b"\n")
        kind = number % 4
        if format == "slots":
            fields = line.split(b" ")
            if kind == 1:
                fields[2:] = [f"{draw.getrandbits(64)}:{draw.choice(slots)}".encode() for _ in slots]
            elif kind == 2:
                fields[2:] = fields[2 : 2 + draw.randrange(4)]
            elif kind == 3 and number % 8 == 3:
                fields[2:] = []
            line = b" ".join(fields)
        else:
            columns = line.split(b"\t")
            for at in range(1, 40):
                if kind == 1 and at > 13:
                    columns[at] = b"%08x" % draw.getrandbits(32)
                elif (kind == 2 and draw.random() < 0.5) or (kind == 3 and number % 8 == 3):
                    columns[at] = b""
            line = b"\t".join(columns)
        odd.append(line + b"\n")
    return odd


def instance_of(line: bytes, format: str) -> dict[str, Any]:
    """Return a line as the named values of a JSON request."""
    text = line.decode().rstrip("\n")
    if format == "slots":
        instance: dict[str, Any] = {}
        for field in text.split(" ")[2:]:
            if "=" in field:
                # A label, not a slot.
                continue
            sign, slot = field.split(":")
            instance.setdefault(slot, []).append(int(sign))
        return instance
    columns = text.split("\t")
    numbers = {f"I{i}": float(value) for i, value in enumerate(columns[1:14], 1) if value}
    return numbers | {f"C{i}": value for i, value in enumerate(columns[14:], 1) if value}
