"""The reference of `job.yaml` matches the code."""

import re
from pathlib import Path

from elasticrec.config import Job, job_schema
from elasticrec.config.fields import Section
from elasticrec.config.problems import section_at
from elasticrec.config.reference import reference

PAGE = Path(__file__).parents[2] / "docs/reference/job.md"


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == reference(), "run `make reference`"


def test_every_key_has_a_meaning() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (.+) \| (.*) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    names = [row[0] for row in rows]
    assert len(names) == len(set(names))
    for definition in job_schema()["$defs"].values():
        for key in definition.get("properties", {}):
            assert any(name.rpartition(".")[2] == key for name in names), key
    for name, kind, _, meaning in rows:
        *parents, key = name.replace("[]", "").split(".")
        section: type[Section] | None = section_at(parents)
        assert section is not None and key in section.model_fields, name
        assert kind and len(meaning) > 3, name
    assert [name for name in names if "." not in name] == list(Job.model_fields)
