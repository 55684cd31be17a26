"""The command line: the entry to every step of the data path.

Each command imports what it runs when it runs, so that `--help`, clients and serving need no torch.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from elasticrec.errors import ElasticRecError

USER_ERROR = 2
INTERRUPTED = 130
# What typer exits with where a command itself writes to a closed pipe.
BROKEN_PIPE = 1

app = typer.Typer(
    name="elasticrec",
    help="Train click-through models on logs, publish them and serve them.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobArgument = Annotated[Path, typer.Argument(metavar="JOB", help="Job file.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Job file, name of a run, or its directory.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as train.epochs=3; may be repeated."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from elasticrec import __version__

        typer.echo(f"elasticrec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def check(job: JobArgument, overrides: SetOption = None) -> None:
    """Check a job and its data files, and print the job with all defaults filled in."""
    from elasticrec.config import load_job, match_files

    loaded = load_job(job, overrides or [])
    num_train, num_eval = len(match_files(loaded, "train")), len(match_files(loaded, "eval"))
    typer.echo(loaded.to_yaml(), nl=False)
    typer.echo(f"ok: files to train on: {num_train}, to evaluate on: {num_eval}", err=True)


@app.command()
def schema() -> None:
    """Print the JSON Schema of job files."""
    import json

    from elasticrec.config import job_schema

    typer.echo(json.dumps(job_schema(), indent=2))


@app.command()
def train(
    job: JobArgument,
    overrides: SetOption = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget an earlier run of this job and start over.")] = False,
) -> None:
    """Train a job to the end of its data; an unfinished run goes on where it was."""
    from elasticrec.config import load_job
    from elasticrec.training.loop import train_job
    from elasticrec.training.report import summary_lines

    for line in summary_lines(train_job(load_job(job, overrides or []), fresh=fresh)):
        typer.echo(line)


@app.command()
def publish(run: RunArgument) -> None:
    """Write the newest checkpoint of a run as a version and make it the current one."""
    from elasticrec.publish.publish import publish_run
    from elasticrec.run import resolve_run

    published = publish_run(resolve_run(run))
    typer.echo(
        f"published {published.path}: version {published.version} of {published.model}, "
        f"{published.rows:,} rows, {published.num_bytes:,} bytes"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command: 0, or 2 for a user's mistake, or 130 for Ctrl-C. A traceback is a bug of ours."""
    try:
        result = app(args=arguments, prog_name="elasticrec", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except typer.TyperException as error:
        return _fail(_describe_usage(error))
    except ElasticRecError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); the flush at exit must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        return _fail(_describe(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED


def _fail(message: str) -> int:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    return USER_ERROR


def _describe_usage(error: typer.TyperException) -> str:
    """The words of typer in the style of our own messages."""
    text = re.sub(r"'([^']*)'", r"`\1`", error.format_message()).strip().rstrip(".")
    return f"{text[:1].lower()}{text[1:]}, see `--help`"


def _describe(error: OSError) -> str:
    if error.strerror is None:
        return str(error) or type(error).__name__
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return f"{where}{error.strerror[:1].lower()}{error.strerror[1:]}"


if __name__ == "__main__":
    sys.exit(main())
