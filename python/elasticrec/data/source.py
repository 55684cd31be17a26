"""Data that a command was given: its files, and the job that says what they are, found out if there is none."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.config import Job, match_files, parse_job
from elasticrec.config.data import Holdout
from elasticrec.data.header import check_headers, with_names
from elasticrec.data.lines import any_parser
from elasticrec.data.sniff import Found, sniff
from elasticrec.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """Files and what they are."""

    job: Job
    """Of JSON lines that no job describes only the files are right."""
    files: list[Path]
    found: Found | None
    """What was found out, if no job was given."""

    @property
    def is_json(self) -> bool:
        """JSON lines without a reader of the user's own."""
        return self.found is not None and self.found.kind == "json"

    def line_parser(self) -> _core.Parser:
        """A parser that knows which lines are records; it parses only where the format has a job."""
        return any_parser() if self.is_json else _core.Parser(json.dumps(self.job.features()))


def open_source(sources: Sequence[str], job: Job | None, holdout: Holdout | None = None) -> Source:
    """What paths, globs and directories are, by a job or by their content; without any the training data of the job."""
    found = None
    if job is None and not sources:
        raise ConfigError("expected data to read before OUT, or --job")
    if job is None:
        found = sniff(sources)
        # JSON has no format of its own; splitting it needs none
        data: dict[str, Any] = found.data() if found.kind != "json" else {"format": "slots", "slots": ["0"]}
        raw = {"name": "data", "data": data | {"train": found.patterns}}
        job = parse_job(raw, base=Path.cwd(), source="data")
    elif sources:
        paths = tuple(str(Path(source).expanduser().absolute()) for source in sources)
        job = job.model_copy(update={"data": job.data.model_copy(update={"train": paths})})
    job = job.model_copy(update={"data": job.data.model_copy(update={"eval": holdout or ()})})
    job = with_names(job)
    files = match_files(job.model_copy(update={"data": job.data.model_copy(update={"eval": ()})}), "train")
    check_headers(job, files)
    return Source(job, files, found)
