"""A run: the directory that one training writes, and what the other commands find it by.

runs/<name>/job.yaml         the job as it was resolved; secrets stay references
runs/<name>/model.py         the model, where it is one of the user's own
runs/<name>/reader.py        the reader, where it is one of the user's own
runs/<name>/checkpoints/     one directory a checkpoint
runs/<name>/metrics.jsonl    a line a report
runs/<name>/units/           the units of each epoch, written down before they are read
runs/<name>/graphs/          the network's graph, once it was published
runs/<name>/start/           with servers: what they start from; coordinator/: what it decided; logs/: of each role
"""

import contextlib
import difflib
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticrec.config import Job, differences, load_job
from elasticrec.durable import hold, write_atomically
from elasticrec.errors import ConfigError

RUNS = Path("runs")

_JOB_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Run:
    """The directory of one training; making the object touches no file."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run, which is that of its job."""
        return self.path.name

    @property
    def job_path(self) -> Path:
        """The resolved copy of the job."""
        return self.path / "job.yaml"

    @property
    def model_path(self) -> Path:
        """The copy of the file of a model of the user's own: the run can be loaded when the original is gone."""
        return self.path / "model.py"

    @property
    def reader_path(self) -> Path:
        """The copy of the file of a reader of the user's own."""
        return self.path / "reader.py"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """JSON lines of metrics."""
        return self.path / "metrics.jsonl"

    @property
    def units(self) -> Path:
        """Directory of the units, one file per epoch."""
        return self.path / "units"

    @property
    def graphs(self) -> Path:
        """Directory of the exported graph, reused by later versions."""
        return self.path / "graphs"

    @property
    def start(self) -> Path:
        """Directory of the state that servers start from."""
        return self.path / "start"

    @classmethod
    def of(cls, job: Job, root: Path = RUNS) -> "Run":
        """The run of a job, whether it is there or not."""
        return cls(root / job.name)

    @classmethod
    def create(cls, job: Job, root: Path = RUNS) -> "Run":
        """Make the directory of a job and put the copy of the job into it.

        A run that was begun by a job with other parameters is refused before anything is written.
        """
        run = cls.of(job, root)
        if run.has_begun():
            run.check_resumes(job)
        sources = {run.model_path: job.model_source(), run.reader_path: job.reader_source()}
        copies = {path: source for path, source in sources.items() if source is not None}
        for path in (run.job_path, *copies):
            if not run.exists() and path.exists():
                raise ConfigError(
                    f"{run.path}: not the directory of a run, but has a `{path.name}`, which the run would replace; "
                    "give the job another name or move that file"
                )
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        for path, source in copies.items():
            write_atomically(path, source)
        write_atomically(run.job_path, _with_copies(job, run).to_yaml(references=True).encode())
        return run

    def exists(self) -> bool:
        """Whether the directory is that of a run; one with only a `job.yaml` may be a user's own."""
        return self.job_path.is_file() and self.checkpoints.is_dir()

    def has_checkpoints(self) -> bool:
        """Whether anything was saved in this run."""
        return self.exists() and any(self.checkpoints.iterdir())

    def has_begun(self) -> bool:
        """Whether there is anything that its job decided: checkpoints, or what servers start from."""
        return self.has_checkpoints() or (self.exists() and (self.start / "shard.json").is_file())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for one process; a second one is refused. The lock ends with the process, however it ends."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # beside the directory, which may be discarded under the lock
        with hold(self.path.parent / f".{self.name}.lock", f"{self.path}: another process is training it"):
            yield

    def discard(self) -> None:
        """Remove what a training writes; a directory that is not a run, and what else is in one, is left alone."""
        if not self.exists():
            return
        # it stays a run, without a checkpoint to go on from, until the last step: wherever a crash stops this,
        # the next training starts over
        for manifest in self.checkpoints.glob("*/manifest.json"):
            manifest.unlink()
        roles = (self.path / name for name in ("coordinator", "start", "logs", "graphs"))
        for path in (*self.checkpoints.iterdir(), self.units, *roles):
            if path.exists():
                shutil.rmtree(path)
        for path in (self.metrics_path, self.job_path, self.model_path, self.reader_path):
            path.unlink(missing_ok=True)
        self.checkpoints.rmdir()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def job(self) -> Job:
        """The job of the run."""
        return load_job(self.job_path)

    def check_resumes(self, job: Job) -> None:
        """Refuse a job whose parameters would not be those of this run."""
        changed = differences(self.job(), job)
        if changed:
            keys = ", ".join(f"`{key}`" for key in changed)
            raise ConfigError(
                f"{job.source}: differs from the job of {self.path} in {keys}; "
                f"change it back, give the job another name, or remove {self.path}"
            )


def _with_copies(job: Job, run: Run) -> Job:
    """The job as it stands in the run, whose model and reader are the copies beside it."""
    if job.model.own is not None:
        kind = f"{run.model_path.name}:{job.model.own[1]}"
        job = job.model_copy(update={"model": job.model.model_copy(update={"kind": kind})})
    if job.data.reader is not None:
        reader = f"{run.reader_path.name}:{job.data.reader.rpartition(':')[2]}"
        job = job.model_copy(update={"data": job.data.model_copy(update={"reader": reader})})
    return job


def resolve_run(text: str, root: Path = RUNS) -> Run:
    """The run that RUN stands for: a job file, a name, or the directory of a run."""
    if not text:
        raise ConfigError("run: expected a job file, a name or a directory of a run, got nothing")
    path = Path(text)
    if path.is_file() or path.suffix in _JOB_SUFFIXES:
        return _run_of_job_file(path, root)
    # A name goes before a directory of the same name: users keep job files in directories named like the job.
    candidates = [Run(root / text), Run(path)] if path.name == text else [Run(path)]
    for run in candidates:
        if run.exists():
            # `.` and a trailing `..` have no name of their own.
            return run if run.name not in ("", "..") else Run(run.path.resolve())
    raise ConfigError(_not_found(text, path, root))


def _run_of_job_file(path: Path, root: Path) -> Run:
    job = load_job(path)
    run = Run(root / job.name)
    # The copy inside a run stands for that run, also where it is kept elsewhere than in `root`.
    own = Run(path.parent)
    if not run.exists() and path.name == own.job_path.name and own.exists():
        run = Run(path.resolve().parent)
    if not run.exists():
        raise ConfigError(f"{run.path}: no such run, train it first: elasticrec train {shlex.quote(str(path))}")
    return run


def _not_found(text: str, path: Path, root: Path) -> str:
    if path.is_dir() and path.name != text:
        return f"{text}: not the directory of a run, expected `job.yaml` and `checkpoints` in it"
    names = sorted(entry.name for entry in root.iterdir() if Run(entry).exists()) if root.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    if near:
        hint = f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
    elif names:
        more = ", ..." if len(names) > 5 else ""
        hint = f"{root} has {', '.join(f'`{name}`' for name in names[:5])}{more}"
    else:
        hint = f"{root} has none"
    return f"{text}: no such run, {hint}"
