"""`elasticrec status | logs | scale`: commands for a run, mostly for one that is running."""

import json
import sys
import time
from typing import Annotated

import typer

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Job file, run name or run directory.")]

_WATCH_S = 1.0


def add_launch(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command()(status)
    app.command()(logs)
    app.command()(scale)


def status(
    run: RunArgument,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all details.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Print again every second until the run ends.")] = False,
) -> None:
    """Show the state of a run with parameter servers.

    Shows roles, units, throughput, rows, memory, staleness, checkpoints and the time of each stage.
    For a run that is not running, it shows the last checkpoint and metrics.
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
        typer.Argument(
            metavar="ROLE", help="A process such as `coordinator`, `ps-1` or `trainer-0`; `ps`: all servers."
        ),
    ],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    tail: Annotated[
        int | None, typer.Option("--tail", "-n", min=0, help="Print only the last N lines that the log has now.")
    ] = None,
) -> None:
    """Print the log of a role."""
    from elasticrec.launch.logs import print_logs
    from elasticrec.run import resolve_run

    print_logs(resolve_run(run), role, tail=tail, follow=follow)


def scale(
    run: RunArgument,
    servers: Annotated[int | None, typer.Option("--servers", help="New number of parameter servers.")] = None,
    trainers: Annotated[int | None, typer.Option("--trainers", help="New number of trainers.")] = None,
) -> None:
    """Change the number of servers or trainers of a running job."""
    from elasticrec.launch.scale import scale_run
    from elasticrec.run import resolve_run

    for line in scale_run(resolve_run(run), servers=servers, trainers=trainers):
        typer.echo(line)
        sys.stdout.flush()
