"""The data that a command reads: its files, and a job that describes them, given or detected."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec import _core
from elasticrec.config import Job, match_files, parse_job
from elasticrec.config.data import Holdout
from elasticrec.data.header import check_headers, with_names
from elasticrec.data.init.detect import detect
from elasticrec.data.init.detection import Detection
from elasticrec.data.raw_lines import any_parser
from elasticrec.errors import ConfigError


@dataclass(frozen=True)
class InputData:
    """Files and the job that describes them."""

    job: Job
    """For JSON lines without a job, only its files are meaningful."""
    files: list[Path]
    detection: Detection | None
    """None if a job was given."""

    @property
    def is_json(self) -> bool:
        """Whether the files are JSON lines without a reader."""
        return self.detection is not None and self.detection.kind == "json"

    def line_parser(self) -> _core.Parser:
        """Return a parser that knows which lines are records; for JSON lines it cannot parse them."""
        return any_parser() if self.is_json else _core.Parser(json.dumps(self.job.features()))


def open_input(sources: Sequence[str], job: Job | None, holdout: Holdout | None = None) -> InputData:
    """Open data that a job or detection describes: paths, globs and directories, or without them the job's data."""
    detection = None
    if job is None and not sources:
        raise ConfigError("expected data to read before OUT, or --job")
    if job is None:
        detection = detect(sources)
        # JSON lines have no format in a job; a split does not need one.
        data: dict[str, Any] = detection.data() if detection.kind != "json" else {"format": "slots", "slots": ["0"]}
        raw = {"name": "data", "data": data | {"train": detection.patterns}}
        job = parse_job(raw, base=Path.cwd(), source="data")
    elif sources:
        paths = tuple(str(Path(source).expanduser().absolute()) for source in sources)
        job = job.model_copy(update={"data": job.data.model_copy(update={"train": paths})})
    job = job.model_copy(update={"data": job.data.model_copy(update={"eval": holdout or ()})})
    job = with_names(job)
    files = match_files(job.model_copy(update={"data": job.data.model_copy(update={"eval": ()})}), "train")
    check_headers(job, files)
    return InputData(job, files, detection)
