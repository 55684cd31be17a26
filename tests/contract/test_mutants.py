"""Every protection that `make mutants` disables is still in the code, and so is the test that must fail."""

import re

import pytest

from mutants import MUTANTS, ROOT, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_snippet_of_a_mutant_occurs_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.before) == 1


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_test_of_a_mutant_exists(mutant: Mutant) -> None:
    if mutant.test.startswith("cargo "):
        words = mutant.test.split()
        crate, name = words[3].removeprefix("elasticrec-"), words[-1].rpartition("::")[2]
        texts = [path.read_text() for path in (ROOT / "crates" / crate).rglob("*.rs")]
        assert any(re.search(rf"#\[(tokio::)?test\b.*\](\s*#\[.*\])*\s*(async )?fn \w*{name}", text) for text in texts)
    elif mutant.test.startswith("make "):
        assert f"\n{mutant.test.removeprefix('make ')}:" in (ROOT / "Makefile").read_text()
    else:
        file, _, name = mutant.test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
