"""Files and tests that the documentation names exist."""

import re
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The changelog names files of past releases.
PAGES = [page for page in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]) if page.name != "CHANGELOG.md"]

_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"(?:tests|crates|python|docs|fuzz|examples|benchmarks)/[\w./{},*-]+")
_TEST = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+){2,}")


def quoted(page: Path) -> list[str]:
    return _SPAN.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def expand(path: str) -> list[str]:
    """Return all paths of `a/{b,c}.rs`."""
    parts = [part.split(",") for part in re.split(r"[{}]", path)]
    return ["".join(chosen) for chosen in product(*parts)] if "{" in path else [path]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quoted_paths_exist(page: Path) -> None:
    paths = [path for span in quoted(page) if _PATH.fullmatch(span.partition("::")[0]) for path in expand(span)]
    missing = [path for path in paths if not list(ROOT.glob(path.partition("::")[0].rstrip("/")))]
    assert missing == []


def defined() -> set[str]:
    """Return the names of all functions in Rust and in the Python tests."""
    names: set[str] = set()
    for path in ROOT.glob("crates/**/*.rs"):
        names |= set(re.findall(r"\bfn (\w+)", path.read_text()))
    for path in ROOT.glob("tests/**/*.py"):
        names |= set(re.findall(r"\bdef (\w+)", path.read_text()))
    return names


def test_tests_that_guard_a_rule_exist() -> None:
    """The last column of the rules names tests in Rust and Python."""
    lines = (ROOT / "docs/exactly-once.md").read_text().splitlines()
    cells = [line.rstrip(" |").rpartition("|")[2] for line in lines if line.startswith("| ")]
    names = {span for cell in cells for span in _SPAN.findall(cell) if _TEST.fullmatch(span)}
    assert names, "the tables name tests"
    assert names - defined() == set()
