"""`elasticrec status | logs | scale`: a run while it goes on."""

import json
import sys
import time
from typing import Annotated

import typer

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Job file, name of a run, or its directory.")]

_WATCH_S = 1.0


def add_launch(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(status)
    app.command()(logs)
    app.command()(scale)


def status(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with all there is.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second until the run ends.")] = False,
) -> None:
    """Show how a run with parameter servers is.

    Roles, units, throughput, rows, memory, staleness, checkpoints, where the time goes.
    """
    from elasticrec.launch.status import read_status, status_lines
    from elasticrec.run import resolve_run

    found = resolve_run(run)
    while True:
        now = read_status(found)
        if watch and not as_json and sys.stdout.isatty():
            typer.echo("\x1b[2J\x1b[H", nl=False)
        for line in [json.dumps(now)] if as_json else status_lines(now):
            typer.echo(line)
        sys.stdout.flush()
        if not watch or now["state"] not in ("running", "stopping"):
            return
        time.sleep(_WATCH_S)


def logs(
    run: RunArgument,
    role: Annotated[
        str,
        typer.Argument(metavar="ROLE", help="Such as `coordinator`, `ps-1`, `trainer-0`, or `ps` for all servers."),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Only the last so many lines of what is there.")
    ] = None,
) -> None:
    """Print the log of a role."""
    from elasticrec.launch.logs import print_logs
    from elasticrec.run import resolve_run

    print_logs(resolve_run(run), role, tail=tail, follow=follow)


def scale(
    run: RunArgument,
    servers: Annotated[int | None, typer.Option("--servers", help="Parameter servers from now on.")] = None,
    trainers: Annotated[int | None, typer.Option("--trainers", help="Trainers from now on.")] = None,
) -> None:
    """Give a running job another number of servers or trainers."""
    from elasticrec.launch.status import scale_run
    from elasticrec.run import resolve_run

    for line in scale_run(resolve_run(run), servers=servers, trainers=trainers):
        typer.echo(line)
        sys.stdout.flush()
