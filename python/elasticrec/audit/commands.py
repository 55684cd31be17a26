"""`elasticrec audit`: the command."""

from typing import Annotated

import typer

# Exit code if something differs; a user's mistake exits with 2.
_DIFFERS = 1


def add_audit(app: typer.Typer) -> None:
    """Add the command."""
    app.command("audit")(audit)


def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Job file, run name or run directory.")],
) -> None:
    """Count a run again from its data files and list the differences.

    Compares show and click of every sign in the newest checkpoint and, with parameter servers, the samples of each
    dense slice. Exits with 1 if something differs.
    """
    from elasticrec.audit.audit import audit_run
    from elasticrec.run import resolve_run

    found = audit_run(resolve_run(run))
    for line in found.lines():
        typer.echo(line)
    if found.differs:
        raise typer.Exit(_DIFFERS)
