"""`elasticrec audit`: the command."""

from typing import Annotated

import typer

# Something differs; a mistake of the user's has another number.
_DIFFERS = 1


def add_audit(app: typer.Typer) -> None:
    """Add the command."""
    app.command("audit")(audit)


def audit(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Job file, name of a run, or its directory.")],
) -> None:
    """Recount a run from its raw files; list what differs.

    Show and click of every sign in the newest checkpoint, with parameter servers the samples of each dense slice too.
    Exits with 1 if something differs.
    """
    from elasticrec.audit.audit import audit_run
    from elasticrec.run import resolve_run

    found = audit_run(resolve_run(run))
    for line in found.lines():
        typer.echo(line)
    if found.differs:
        raise typer.Exit(_DIFFERS)
