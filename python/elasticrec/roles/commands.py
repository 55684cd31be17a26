"""`elasticrec coordinator | ps | trainer`: run one role in this process, from flags or environment variables only."""

import ctypes
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticrec.machine import allow_many_files, on_stop_signal
from elasticrec.net import environment
from elasticrec.net.logs import StampedStream, log_to_stderr
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
    str, typer.Option("--token", envvar=environment.TOKEN, help="Access token of the run.", show_default=False)
]
IndexOption = Annotated[
    int | None, typer.Option("--index", envvar=environment.INDEX, min=0, help="Index of this process within its role.")
]
HostOption = Annotated[str, typer.Option("--host", envvar=environment.HOST, help="Address to listen on.")]
PortOption = Annotated[
    int,
    typer.Option("--port", envvar=environment.PORT, min=0, max=65535, help="Port to listen on; 0 picks a free port."),
]
WaitOption = Annotated[
    float,
    typer.Option(
        "--wait", envvar=environment.WAIT, min=0.1, help="Seconds to wait for a coordinator that does not answer."
    ),
]
MetricsPortOption = Annotated[
    int,
    typer.Option(
        "--metrics-port",
        envvar=environment.METRICS_PORT,
        min=0,
        max=65535,
        help="Port of /metrics on 127.0.0.1; 0 picks a free port.",
    ),
]

_PR_SET_PDEATHSIG = 1

# Exit code of a role that was replaced: its supervisor may start it again.
_REPLACED = 3
# Exit code of a coordinator that was stopped by a signal.
_STOPPED = 143

logger = logging.getLogger(__name__)


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
    """Run the coordinator: it leases units, owns the partition map and commits checkpoints. One per run."""
    _set_up()
    from elasticrec.coordinator.api import ServerOptions
    from elasticrec.net.security import Security

    found, job = _open_run(run)
    listen = ServerOptions(host, port, Security.of(job, token, {"cert": tls_cert, "key": tls_key}, insecure))
    listen.check()
    from elasticrec.roles.coordinator import serve_coordinator

    stop = threading.Event()
    on_stop_signal(stop.set)
    if not serve_coordinator(job, found, listen, stop):
        # The launcher must not take this for the end of the run.
        raise typer.Exit(_STOPPED)


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
            help="Host name or address that other processes connect to; needed if --host is 0.0.0.0 or ::.",
        ),
    ] = None,
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    tls_ca: CaOption = None,
    insecure: InsecureOption = False,
    wait: WaitOption = 60.0,
    metrics_port: MetricsPortOption = 0,
) -> None:
    """Run a parameter server: it holds partitions of the table."""
    _set_up()
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
    _run(ShardProcess(options, listening, job.train.ps))


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
            help="Threads of the network if the job sets no `train.threads`; default: all cores.",
        ),
    ] = None,
) -> None:
    """Run a trainer: it pulls rows, steps the network and pushes gradients, unit by unit."""
    _set_up()
    from elasticrec.net.security import Security
    from elasticrec.roles.member import RoleOptions

    _, job = _open_run(run)
    if job.train.threads is None:
        job = job.model_copy(update={"train": job.train.model_copy(update={"threads": threads})})
    security = Security.of(job, token, {"ca": tls_ca}, insecure)
    options = RoleOptions(run, coordinator, security, index, wait, metrics_port, _name())
    options.check()
    from elasticrec.roles.trainer import TrainerProcess

    _run(TrainerProcess(job, options))


def _open_run(path: Path) -> tuple["Run", "Job"]:
    from elasticrec.errors import ConfigError
    from elasticrec.run import Run

    run = Run(path)
    if not run.exists():
        raise ConfigError(f"{path}: not a run directory: expected `job.yaml` and `checkpoints` in it")
    return run, run.job()


def _run(process: "ShardProcess | TrainerProcess") -> None:
    """Run a role until it ends. On SIGTERM and Ctrl-C it leaves the run, and nothing waits for its lease to expire."""
    from elasticrec.errors import UnavailableError
    from elasticrec.net.messages import FencedError
    from elasticrec.roles.member import Shutdown

    on_stop_signal(process.shutdown.request)
    try:
        process.run()
    except Shutdown:
        logger.info("left the run")
    except FencedError as error:
        logger.warning("%s", error)
        raise typer.Exit(_REPLACED) from None
    except UnavailableError:
        # A process that shuts down does not need the coordinator.
        if not process.shutdown.is_requested():
            raise


def _name() -> str:
    """Return the name that the launcher gave to this process."""
    return os.environ.get(environment.NAME, "")


def _set_up() -> None:
    """Set up logging; have the kernel kill this process when the launcher ends."""
    parent = os.environ.get(environment.PARENT)
    if parent is not None:
        # The log file gets a time stamp on every line, also on errors and on the output of libraries.
        sys.stdout, sys.stderr = StampedStream(sys.stdout), StampedStream(sys.stderr)
    log_to_stderr(stamped=parent is None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        # The launcher ended before the call above.
        raise typer.Exit(1)
