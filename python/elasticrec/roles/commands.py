"""`elasticrec coordinator | ps | trainer`: one role in this process, from flags or environment variables alone."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticrec.launch.logs import Stamped, stamp
from elasticrec.machine import allow_many_files
from elasticrec.net import environment
from elasticrec.net.options import CaOption, CertOption, InsecureOption, KeyOption

if TYPE_CHECKING:
    from elasticrec.config import Job
    from elasticrec.roles.shard import ShardProcess
    from elasticrec.roles.trainer import TrainerProcess
    from elasticrec.run import Run


RunOption = Annotated[Path, typer.Option("--run", envvar=environment.RUN, help="Directory of the run.")]
CoordinatorOption = Annotated[
    str, typer.Option("--coordinator", envvar=environment.COORDINATOR, help="Address of the coordinator.")
]
TokenOption = Annotated[
    str, typer.Option("--token", envvar=environment.TOKEN, help="Secret of the run.", show_default=False)
]
IndexOption = Annotated[
    int | None, typer.Option("--index", envvar=environment.INDEX, min=0, help="Number of this one among its role.")
]
HostOption = Annotated[str, typer.Option("--host", envvar=environment.HOST, help="Address to listen on.")]
PortOption = Annotated[
    int, typer.Option("--port", envvar=environment.PORT, min=0, max=65535, help="Port to listen on; 0 for any.")
]
WaitOption = Annotated[
    float,
    typer.Option("--wait", envvar=environment.WAIT, min=0.1, help="Seconds to wait for a coordinator that is away."),
]
MetricsPortOption = Annotated[
    int,
    typer.Option(
        "--metrics-port",
        envvar=environment.METRICS_PORT,
        min=0,
        max=65535,
        help="Port of this machine for /metrics; 0 for any.",
    ),
]

_PR_SET_PDEATHSIG = 1

# A role that another one replaced: its supervisor may start it again.
_REPLACED = 3
# A coordinator that a signal ended.
_TOLD_TO_STOP = 143


def add_roles(app: typer.Typer) -> None:
    """Add the commands of the roles."""
    app.command("coordinator")(coordinator)
    app.command("ps")(ps)
    app.command("trainer")(trainer)


def coordinator(
    run: RunOption,
    token: TokenOption = "",
    host: HostOption = "127.0.0.1",
    port: PortOption = 0,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Hand out units, own the partition map, commit checkpoints: one a run."""
    _follow_parent()
    from elasticrec.coordinator.api import Listen
    from elasticrec.net.security import Security

    found, job = _open_run(run)
    listen = Listen(host, port, Security.of(job, token, {"cert": tls_cert, "key": tls_key}, insecure))
    listen.check()
    from elasticrec.roles.coordinator import serve_coordinator

    with _stopping() as stop:
        if not serve_coordinator(job, found, listen, _say, stop):
            # whoever watches must not take this for the end of the run
            raise typer.Exit(_TOLD_TO_STOP)


def ps(
    run: RunOption,
    coordinator: CoordinatorOption,
    token: TokenOption = "",
    index: IndexOption = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 0,
    advertise: Annotated[
        str | None,
        typer.Option(
            "--advertise",
            envvar=environment.ADVERTISE,
            metavar="HOST",
            help="Name or address of this machine for the others, where --host is not one.",
        ),
    ] = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    tls_ca: CaOption = None,
    insecure: InsecureOption = False,
    wait: WaitOption = 60.0,
    metrics_port: MetricsPortOption = 0,
) -> None:
    """Hold partitions of the table: a parameter server."""
    _follow_parent()
    from elasticrec.net.security import Security
    from elasticrec.roles.member import ListenAddress, RoleOptions

    _, job = _open_run(run)
    security = Security.of(job, token, {"cert": tls_cert, "key": tls_key, "ca": tls_ca}, insecure)
    options = RoleOptions(run, coordinator, security, index, wait, metrics_port, _name())
    listening = ListenAddress(host, port, advertise)
    options.check()
    listening.check(security)
    from elasticrec.roles.shard import ShardProcess

    allow_many_files()
    _run(ShardProcess(options, listening, _say, job.train.ps))


def trainer(
    run: RunOption,
    coordinator: CoordinatorOption,
    token: TokenOption = "",
    index: IndexOption = None,
    tls_ca: CaOption = None,
    insecure: InsecureOption = False,
    wait: WaitOption = 60.0,
    metrics_port: MetricsPortOption = 0,
    threads: Annotated[
        int | None,
        typer.Option(
            "--threads",
            envvar=environment.THREADS,
            min=1,
            max=4096,
            help="Threads of the network, where the job has no `train.threads`; all cores if not given.",
        ),
    ] = None,
) -> None:
    """Train units: pull, step the network, push."""
    _follow_parent()
    from elasticrec.net.security import Security
    from elasticrec.roles.member import RoleOptions

    _, job = _open_run(run)
    if job.train.threads is None:
        job = job.model_copy(update={"train": job.train.model_copy(update={"threads": threads})})
    security = Security.of(job, token, {"ca": tls_ca}, insecure)
    options = RoleOptions(run, coordinator, security, index, wait, metrics_port, _name())
    options.check()
    from elasticrec.roles.trainer import TrainerProcess

    _run(TrainerProcess(job, options, _say))


def _open_run(path: Path) -> tuple["Run", "Job"]:
    from elasticrec.errors import ConfigError
    from elasticrec.run import Run

    run = Run(path)
    if not run.exists():
        raise ConfigError(f"{path}: not the directory of a run, expected `job.yaml` and `checkpoints` in it")
    return run, run.job()


def _run(process: "ShardProcess | TrainerProcess") -> None:
    """Run a role to its end; SIGTERM and Ctrl-C have it leave: it says so, and nobody has to wait for its lease."""
    from elasticrec.errors import UnavailableError
    from elasticrec.net.messages import FencedError
    from elasticrec.roles.member import Shutdown

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: process.shutdown.request())
    try:
        process.run()
    except Shutdown:
        _say("left")
    except FencedError as error:
        _say(str(error))
        raise typer.Exit(_REPLACED) from None
    except UnavailableError:
        # whoever leaves need not be heard
        if not process.shutdown.is_requested():
            raise


def _name() -> str:
    """How the launcher calls this process."""
    return os.environ.get(environment.NAME, "")


def _follow_parent() -> None:
    """Lines with a time stamp; end with the launcher that started this process, however that ends."""
    parent = os.environ.get(environment.PARENT)
    if parent is not None:
        # all of them, those of errors too
        sys.stdout, sys.stderr = Stamped(sys.stdout), Stamped(sys.stderr)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        # it ended before
        raise typer.Exit(1)


@contextlib.contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that a signal sets."""
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    yield stop


def _say(text: str) -> None:
    if not isinstance(sys.stderr, Stamped):
        text = f"{stamp()} {text}"
    typer.echo(text, err=True)
