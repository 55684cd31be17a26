"""A run: the directory that one training writes, and how other commands find it.

runs/<name>/job.yaml         the resolved job; secrets stay references
runs/<name>/model.py         the source of a custom model
runs/<name>/reader.py        the source of a custom reader
runs/<name>/checkpoints/     one directory per checkpoint
runs/<name>/metrics.jsonl    one line per report
runs/<name>/units/           the units of each epoch, recorded before they are read
runs/<name>/graphs/          the exported graph, reused by later versions
runs/<name>/start/           with servers: their initial state
runs/<name>/coordinator/     with servers: the coordinator's decisions
runs/<name>/logs/            with servers: the log of each role
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
    """The directory of one training; creating the object touches no file."""

    path: Path

    @property
    def name(self) -> str:
        """Name of the run, equal to the name of its job."""
        return self.path.name

    @property
    def job_path(self) -> Path:
        """The resolved copy of the job."""
        return self.path / "job.yaml"

    @property
    def model_path(self) -> Path:
        """Copy of a custom model's file, so that the run can be loaded without the original."""
        return self.path / "model.py"

    @property
    def reader_path(self) -> Path:
        """Copy of a custom reader's file."""
        return self.path / "reader.py"

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        """Metrics as JSON lines."""
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
        """Return the run of a job, whether it exists or not."""
        return cls(root / job.name)

    @classmethod
    def create(cls, job: Job, root: Path = RUNS) -> "Run":
        """Create the run of a job, with a copy of the job in it.

        Raise an error before anything is written if an existing run has a job with different parameters.
        """
        run = cls.of(job, root)
        if run.has_begun():
            run.check_resumes(job)
        sources = {run.model_path: job.model_source(), run.reader_path: job.reader_source()}
        copies = {path: source for path, source in sources.items() if source is not None}
        for path in (run.job_path, *copies):
            if not run.exists() and path.exists():
                raise ConfigError(
                    f"{run.path}: not a run, but has a `{path.name}`, which the run would replace; "
                    "rename the job or move that file"
                )
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        for path, source in copies.items():
            write_atomically(path, source)
        write_atomically(run.job_path, _with_copies(job, run).to_yaml(references=True).encode())
        return run

    def exists(self) -> bool:
        """Return whether the directory is a run; a directory with only a `job.yaml` may belong to the user."""
        return self.job_path.is_file() and self.checkpoints.is_dir()

    def has_checkpoints(self) -> bool:
        """Return whether the run has checkpoints."""
        return self.exists() and any(self.checkpoints.iterdir())

    def has_begun(self) -> bool:
        """Return whether the run has state that depends on its job: checkpoints, or an initial state for servers."""
        return self.has_checkpoints() or (self.exists() and (self.start / "shard.json").is_file())

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the run for one process; raise an error if it is locked. The lock ends with the process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # The lock file is beside the directory, which may be discarded under the lock.
        with hold(self.path.parent / f".{self.name}.lock", f"{self.path}: another process is training it"):
            yield

    def discard(self) -> None:
        """Remove the files of a training. Other files, and directories that are not runs, are kept."""
        if not self.exists():
            return
        # Remove manifests first and the run's markers last, so that after a crash the next training starts over.
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
        """Load the job of the run."""
        return load_job(self.job_path)

    def check_resumes(self, job: Job) -> None:
        """Raise an error if a job cannot resume this run because of different parameters."""
        changed = differences(self.job(), job)
        if changed:
            keys = ", ".join(f"`{key}`" for key in changed)
            raise ConfigError(
                f"{job.source}: differs from the job of {self.path} in {keys}; "
                f"change it back, rename the job, or remove {self.path}"
            )


def _with_copies(job: Job, run: Run) -> Job:
    """Return the job with model and reader replaced by their copies in the run."""
    if job.model.custom_class is not None:
        kind = f"{run.model_path.name}:{job.model.custom_class[1]}"
        job = job.model_copy(update={"model": job.model.model_copy(update={"kind": kind})})
    if job.data.reader is not None:
        reader = f"{run.reader_path.name}:{job.data.reader.rpartition(':')[2]}"
        job = job.model_copy(update={"data": job.data.model_copy(update={"reader": reader})})
    return job


def resolve_run(text: str, root: Path = RUNS) -> Run:
    """Resolve RUN on the command line: a job file, a name, or the directory of a run."""
    if not text:
        raise ConfigError("run: expected a job file, a name or a directory of a run, got nothing")
    path = Path(text)
    if path.is_file() or path.suffix in _JOB_SUFFIXES:
        return _run_of_job_file(path, root)
    # Names take precedence, because users keep job files in directories named like the job.
    candidates = [Run(root / text), Run(path)] if path.name == text else [Run(path)]
    for run in candidates:
        if run.exists():
            # `.` and `..` have no name.
            return run if run.name not in ("", "..") else Run(run.path.resolve())
    raise ConfigError(_not_found(text, path, root))


def _run_of_job_file(path: Path, root: Path) -> Run:
    job = load_job(path)
    run = Run(root / job.name)
    # The copy inside a run identifies that run, also outside of `root`.
    own = Run(path.parent)
    if not run.exists() and path.name == own.job_path.name and own.exists():
        run = Run(path.resolve().parent)
    if not run.exists():
        raise ConfigError(f"{run.path}: no such run, train it first: elasticrec train {shlex.quote(str(path))}")
    return run


def _not_found(text: str, path: Path, root: Path) -> str:
    if path.is_dir() and path.name != text:
        return f"{text}: not a run, expected `job.yaml` and `checkpoints` in it"
    names = sorted(entry.name for entry in root.iterdir() if Run(entry).exists()) if root.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3)
    if near:
        hint = f"did you mean {' or '.join(f'`{name}`' for name in near)}?"
    elif names:
        more = ", ..." if len(names) > 5 else ""
        hint = f"{root}/ contains {', '.join(f'`{name}`' for name in names[:5])}{more}"
    else:
        hint = f"{root}/ contains no runs"
    return f"{text}: no such run, {hint}"
