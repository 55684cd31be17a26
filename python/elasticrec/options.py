"""Arguments and options that commands of several files share."""

from pathlib import Path
from typing import Annotated

import typer

# Files of a terabyte and more are not what a command generates or looks at.
MAX_SAMPLES = 10**9

JobArgument = Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.epochs=3; may be repeated."),
]
