"""The jobs in docs/guide/publish.md are valid; docs/formats/model.md shows the keys of a manifest."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from elasticrec.config import parse_job
from support.versions import content

ROOT = Path(__file__).parents[2]
JOB: dict[str, Any] = {"name": "feed", "data": {"format": "slots", "train": "logs", "slots": "0-2"}}
BLOCKS = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/guide/publish.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("text", BLOCKS)
def test_the_sections_of_the_guide_are_valid(text: str, tmp_path: Path) -> None:
    parse_job({**JOB, **yaml.safe_load(text)}, base=tmp_path)


def test_the_keys_of_the_manifest_are_described() -> None:
    (text,) = re.findall(r"```json\n(\{\n.*?)```", (ROOT / "docs/formats/model.md").read_text(), re.DOTALL)
    shown = json.loads(text)
    format, body = content(changed=1, removed=1).body("demo", 9, 7, 8)
    assert {**body, "format": format}.keys() | {"kind", "self_sha256", "files"} == shown.keys()
    for key in ("table", "graph", "dense"):
        assert body[key].keys() == shown[key].keys()
