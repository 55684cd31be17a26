"""README and guides are correct: make targets, commands, options, links and job files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from elasticrec.config import parse_job

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")], key=lambda path: path.relative_to(ROOT).as_posix())


def commands() -> list[str]:
    """Return every `elasticrec …` in a shell block of a page."""
    found = set()
    for page in PAGES:
        for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL):
            for line in block.splitlines():
                if match := re.match(r"(?:\$ )?elasticrec ([^#|]+)", line):
                    found.add(match[1].strip())
    return sorted(found)


@pytest.mark.parametrize("command", commands())
def test_commands_and_their_options_exist(command: str) -> None:
    words = command.split()
    name = words[:2] if words[0] in ("data", "models", "cube", "bench") else words[:1]
    result = subprocess.run(
        [sys.executable, "-m", "elasticrec.cli", *name, "--help"], capture_output=True, text=True, check=True
    )
    for option in re.findall(r"--[a-z-]+", command):
        assert option in result.stdout


def test_readme_has_commands() -> None:
    assert any(command.startswith("train") for command in commands())


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), (page.name, target)


def test_links_and_paths_exist() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), (page.name, target)
    for path in re.findall(r"`((?:tests|crates|python|docs)/[\w/.-]+\.\w+)`", (ROOT / "ARCHITECTURE.md").read_text()):
        assert (ROOT / path).exists(), path


def test_the_job_of_the_readme_is_valid(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    job = parse_job(yaml.safe_load(text), base=tmp_path)
    assert len(job.data.slots) == 26


def test_ci_runs_the_readmes_test_command_and_nothing_else() -> None:
    lines = (ROOT / ".ci/run").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith("#")][-1] == "make test"
    assert "make test" in (ROOT / "README.md").read_text()
