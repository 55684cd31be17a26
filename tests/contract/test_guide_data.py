"""In the guide "bring your data", each job reads the data shown above it."""

import re
from pathlib import Path

import pytest

from elasticrec.config import parse_job
from elasticrec.config.document import parse
from support.tables import as_criteo, batches_of, rows, samples_of, write, write_parquet

GUIDE = Path(__file__).parents[2] / "docs/guide/data.md"
BLOCK = re.compile(r"```(\w+)(?: (\S+))?\n(.*?)```", re.DOTALL)


def examples() -> list[tuple[str, dict[str, str], str]]:
    """Return the path of the data, the files by name, and the job, for every job in the guide."""
    files: dict[str, str] = {}
    found = []
    for kind, name, text in BLOCK.findall(GUIDE.read_text()):
        if name:
            files[name] = text
        elif kind == "python":
            files["reader.py"] = text
        elif kind in ("text", "csv", "jsonl"):
            files["data"] = text
        elif kind == "yaml":
            found.append((parse(text, "guide")["data"]["train"], dict(files), text))
    return found


@pytest.mark.parametrize(("path", "files", "job"), examples(), ids=[path for path, *_ in examples()])
def test_the_job_reads_the_data_above_it(
    tmp_path: Path, path: str, files: dict[str, str], job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        write(tmp_path / (path if name == "data" else name), text.encode())
    if path.endswith(".tsv"):
        write(tmp_path / path, as_criteo(rows(3)))
    if path.endswith(".parquet"):
        write_parquet(tmp_path / path, rows(3), user=["a", "b", "c"])
    raw = parse(job, "guide")
    parsed = parse_job({"name": "guide", **raw}, base=tmp_path)
    batches = batches_of(parsed)
    if raw["data"].get("eval"):
        batches += batches_of(parsed, held_out=True)
    assert [line for batch in batches for line in batch.bad] == []
    samples = list(samples_of(batches))
    assert len(samples) in (2, 3)
    assert sum(len(slot) for signs, *_ in samples for slot in signs) > 2


def test_there_are_examples_of_every_format() -> None:
    formats = {parse(job, "guide")["data"].get("format", "reader") for *_, job in examples()}
    assert formats == {"slots", "paddlerec", "criteo", "csv", "parquet", "reader"}
