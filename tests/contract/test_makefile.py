"""A missing prerequisite is one line that says what to install, before anything is built."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ("bash", "sh", "make", "find", "grep", "sed", "cat", "python3", "cargo", "cc")


def prerequisites(tmp_path: Path, *missing: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `make prerequisites` as on a machine that lacks some tools."""
    path = tmp_path / "bin"
    path.mkdir()
    for tool in TOOLS:
        found = sys.executable if tool == "python3" else shutil.which(tool)
        if found and tool not in missing:
            # A wrapper, because some tools are shims that depend on the name they are called by.
            (path / tool).write_text(f'#!/bin/sh\nexec "{found}" "$@"\n')
            (path / tool).chmod(0o755)
    make = shutil.which("make")
    assert make is not None
    return subprocess.run(
        [make, "--silent", "prerequisites", *(f"{name}={value}" for name, value in variables.items())],
        cwd=ROOT,
        env=os.environ | {"PATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_all_tools_are_found(tmp_path: Path) -> None:
    result = prerequisites(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ("python3", "missing: Python 3.11 or newer; install it"),
        ("cargo", "missing: a Rust toolchain; install it with rustup"),
        ("cc", "missing: a C compiler; install one"),
    ],
)
def test_a_missing_tool_is_named(tmp_path: Path, tool: str, message: str) -> None:
    result = prerequisites(tmp_path, tool)
    assert result.returncode != 0
    assert result.stderr.splitlines()[0].startswith(message)


def test_an_old_python_is_not_enough(tmp_path: Path) -> None:
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = prerequisites(tmp_path, PYTHON=str(old))
    assert result.returncode != 0 and "Python 3.11 or newer" in result.stderr
