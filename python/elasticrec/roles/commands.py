"""`elasticrec coordinator | ps | trainer`: one role in this process, from flags or environment variables alone."""

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

RunOption = Annotated[Path, typer.Option("--run", envvar="ELASTICREC_RUN", help="Directory of the run.")]
CoordinatorOption = Annotated[
    str, typer.Option("--coordinator", envvar="ELASTICREC_COORDINATOR", help="Address of the coordinator.")
]
TokenOption = Annotated[
    str, typer.Option("--token", envvar="ELASTICREC_TOKEN", help="Secret of the run.", show_default=False)
]
IndexOption = Annotated[
    int | None, typer.Option("--index", envvar="ELASTICREC_INDEX", min=0, help="Number of this one among its role.")
]
HostOption = Annotated[str, typer.Option("--host", envvar="ELASTICREC_HOST", help="Address to listen on.")]

_PR_SET_PDEATHSIG = 1

# A role that another one replaced: its supervisor may start it again.
_REPLACED = 3


def add_roles(app: typer.Typer) -> None:
    """Add the commands of the roles."""
    app.command("coordinator")(coordinator)
    app.command("ps")(ps)
    app.command("trainer")(trainer)


def coordinator(
    run: RunOption,
    token: TokenOption = "",
    host: HostOption = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar="ELASTICREC_PORT", min=0, max=65535, help="0 for any.")] = 0,
) -> None:
    """Hand out units, own the partition map, commit checkpoints: one a run."""
    _follow_parent()
    from elasticrec.config import load_job
    from elasticrec.coordinator.api import Listen
    from elasticrec.roles.coordinator import serve_coordinator
    from elasticrec.run import Run

    found = Run(run)
    job = load_job(found.job_path)
    with _stopping() as stop:
        serve_coordinator(job, found, Listen(host=host, port=port, token=token or None), _say, stop)


def ps(
    run: RunOption,
    coordinator: CoordinatorOption,
    token: TokenOption = "",
    index: IndexOption = None,
    host: HostOption = "127.0.0.1",
) -> None:
    """Hold partitions of the table: a parameter server."""
    _follow_parent()
    from elasticrec.coordinator.messages import FencedError
    from elasticrec.roles.place import RoleOptions
    from elasticrec.roles.shard import ShardProcess

    try:
        ShardProcess(RoleOptions(run, coordinator, token, index, host), _say).run()
    except FencedError as error:
        _say(str(error))
        raise typer.Exit(_REPLACED) from None


def trainer(run: RunOption, coordinator: CoordinatorOption, token: TokenOption = "", index: IndexOption = None) -> None:
    """Train units: pull, step the network, push."""
    _follow_parent()
    from elasticrec.config import load_job
    from elasticrec.coordinator.messages import FencedError
    from elasticrec.roles.place import RoleOptions
    from elasticrec.roles.trainer import TrainerProcess
    from elasticrec.run import Run

    job = load_job(Run(run).job_path)
    try:
        TrainerProcess(job, RoleOptions(run, coordinator, token, index), _say).run()
    except FencedError as error:
        _say(str(error))
        raise typer.Exit(_REPLACED) from None


def _follow_parent() -> None:
    """End with the launcher that started this process, however that ends."""
    parent = os.environ.get("ELASTICREC_PARENT")
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
    typer.echo(text, err=True)
