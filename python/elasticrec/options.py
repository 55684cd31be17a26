"""Command-line arguments and options that several files use."""

from pathlib import Path
from typing import Annotated

import typer

# Upper limit for commands that generate or inspect samples; 10**9 samples take about a terabyte.
MAX_SAMPLES = 10**9

JobArgument = Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.epochs=3; may be repeated."),
]
