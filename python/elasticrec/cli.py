"""The `elasticrec` command: one subcommand for every step of the data path.

Each command imports its implementation when it runs, so `--help`, clients and serving do not need torch.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from elasticrec.audit.commands import add_audit
from elasticrec.bench.commands import bench_app
from elasticrec.cube.commands import cube_app
from elasticrec.data.commands import data_app
from elasticrec.errors import ElasticRecError
from elasticrec.launch.commands import add_launch
from elasticrec.machine import limit_spinning
from elasticrec.net.logs import end_logging, forward_logs
from elasticrec.options import MAX_SAMPLES, JobArgument, SetOption
from elasticrec.publish.rollout.commands import add_rollout
from elasticrec.repository.commands import models_app
from elasticrec.roles.commands import add_roles

USER_ERROR = 2
INTERRUPTED = 130
# Exit code of typer when a command writes to a closed pipe.
BROKEN_PIPE = 1

# Modules that a plain `pip install elasticrec` lacks, and the extra that installs each.
_EXTRAS = {"torch": "train", "onnx": "train", "onnxscript": "train", "pyarrow": "train", "xxhash": "audit"}

app = typer.Typer(
    name="elasticrec",
    help="Train click-through models on click logs, publish them and serve them.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Job file, run name or run directory.")]
BestOption = Annotated[
    bool, typer.Option("--best", help="Use the checkpoint with the best evaluation instead of the newest.")
]
NameOption = Annotated[
    str | None, typer.Option("--name", help="With --server: model name, if the server has several models.")
]
TokenOption = Annotated[
    str | None, typer.Option("--token", help="With --server: access token, as ${ENV} or file:PATH.")
]
CaOption = Annotated[
    Path | None, typer.Option("--ca", metavar="PEM", help="With --server https://…: certificate authorities to trust.")
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
    """Check a job file and print it with all defaults filled in."""
    from elasticrec.config import load_job, match_files
    from elasticrec.data.checks import check_data
    from elasticrec.data.header import with_names
    from elasticrec.data.reader import check_reader

    loaded = with_names(load_job(job, overrides or []))
    if loaded.model.custom_class:
        # Only a trial export shows whether a custom model can be published.
        from elasticrec.publish.export import check_exports

        check_exports(loaded)
    if loaded.data.reader is not None:
        check_reader(loaded)
    if loaded.train.metrics:
        from elasticrec.training.custom_metrics import load_metrics

        load_metrics(loaded)
    num_train, num_eval = len(match_files(loaded, "train")), len(match_files(loaded, "eval"))
    warnings = check_data(loaded)
    typer.echo(loaded.to_yaml(), nl=False)
    for text in warnings:
        typer.echo(f"warning: {text}", err=True)
    typer.echo(f"ok: {num_train} training files, {num_eval} evaluation files", err=True)


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write job.yaml to.")] = Path("."),
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="DATA", help="Data to inspect: a file, directory or glob; may be repeated."),
    ] = None,
    label: Annotated[str | None, typer.Option("--label", help="Label column, if it cannot be detected.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write a first job file, filled in from your data with --from.

    Prints the detected format, slots, dense columns and label. Comments in the job mark guesses to check.
    """
    from elasticrec.data.init.job_file import summary_lines, write_job

    written = write_job(directory, source or [], label=label, force=force)
    for line in summary_lines(written):
        typer.echo(line)
    for line in written.warnings:
        typer.echo(f"warning: {line}", err=True)


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
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard an earlier run of this job and start over.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="With `train.mode: ps`: run one trainer without servers or network, to see its highest throughput.",
        ),
    ] = False,
) -> None:
    """Train a job, or resume its unfinished run.

    Training ends when all data has been read. Checkpoints, metrics and logs are in runs/NAME.
    """
    from elasticrec.config import load_job
    from elasticrec.training.report import Summary, summary_lines

    found = load_job(job, overrides or [])
    if dry_run:
        from elasticrec.roles.dry_run import run_dry

        with forward_logs(typer.echo):
            run_dry(found)
        return
    if found.train.mode == "ps":
        from elasticrec.roles.train import train_with_servers

        summary: Summary | None = train_with_servers(found, fresh=fresh)
    else:
        from elasticrec.publish.train import train_and_publish

        summary = train_and_publish(found, fresh=fresh)
    for line in summary_lines(summary) if summary else ():
        typer.echo(line)


@app.command("eval")
def evaluate(
    run: RunArgument,
    epochs: Annotated[
        str | None,
        typer.Option(
            "--range",
            metavar="FIRST:END",
            help="Evaluate the checkpoints of these epochs, counted from 0, END excluded: 0:4 means 0, 1, 2 and 3.",
        ),
    ] = None,
    best: BestOption = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="FILES", help="File, directory or glob to use instead of data.eval; may be repeated."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON per checkpoint.")] = False,
) -> None:
    """Evaluate the newest checkpoint of a run, the best one, or those at the ends of a range of epochs."""
    import json

    from elasticrec.run import resolve_run
    from elasticrec.training.evaluate_run import choose, evaluate_run, table_lines
    from elasticrec.training.report import worse_than_chance

    found = resolve_run(run)
    results = []
    chosen = choose(found, epochs, best=best)
    with forward_logs(lambda text: typer.echo(text, err=True)):
        for one in evaluate_run(found, chosen, data or []):
            for label, metrics in one.metrics.items():
                if warning := worse_than_chance(metrics):
                    typer.echo(f"{one.checkpoint.name} {label}: {warning}", err=True)
            if as_json:
                _say(json.dumps(one.to_dict()))
            results.append(one)
    if not as_json:
        for line in table_lines(results):
            typer.echo(line)


# A sample without labels begins with `-`, which must not be read as an option.
@app.command(context_settings={"ignore_unknown_options": True})
def explain(
    sample: Annotated[
        str,
        typer.Argument(
            metavar="SAMPLE",
            help="A line in the training format, `@FILE:LINE`, `@FILE:ROW` for Parquet, or `-` for standard input.",
        ),
    ],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="RUN", help="Explain with the newest checkpoint of a run.")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Explain with a published model.")
    ] = None,
    server: Annotated[
        str | None, typer.Option("--server", metavar="URL", help="Explain with a running server, and show its timings.")
    ] = None,
    name: NameOption = None,
    token: TokenOption = None,
    ca: CaOption = None,
    best: BestOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object with all values.")] = False,
) -> None:
    """Show how a model scores a sample.

    Prints its signs with the shows, clicks and weights of their rows, pooled values, dense values and scores.
    """
    import json

    from elasticrec import explain as explaining

    if server is not None:
        if checkpoint is not None or model is not None:
            from elasticrec.errors import ConfigError

            raise ConfigError("explain: expected one of --checkpoint, --model and --server")
        from elasticrec.predict import RemoteServer

        with RemoteServer(server, name, token, None, ca).client() as client:
            result = explaining.explain_served(client, sample)
    else:
        source = explaining.open_source(checkpoint, model, best=best)
        result = explaining.explain(explaining.read_sample(sample, source.features["format"]), source)
    for line in [json.dumps(result)] if as_json else explaining.text_lines(result):
        typer.echo(line)


@app.command()
def publish(
    run: RunArgument,
    best: BestOption = False,
    row_type: Annotated[
        str | None, typer.Option("--row-type", help="f32, f16 or int8; overrides `publish.row_type` of the job.")
    ] = None,
) -> None:
    """Publish the newest or the best checkpoint of a run as a new version of its model.

    The version becomes current if it passes `publish.gate`.
    """
    from elasticrec.publish.local import publish_run
    from elasticrec.run import resolve_run

    published = publish_run(resolve_run(run), best=best, row_type=row_type)
    typer.echo(
        f"published {published.location}: version {published.version} of {published.model}, "
        f"{published.rows:,} rows, {published.num_bytes:,} bytes"
    )
    offer = published.offer
    if offer.collect_error:
        typer.echo(f"warning: old versions were not removed: {offer.collect_error}", err=True)
    if not offer.is_offered:
        typer.echo(f"warning: {offer.summary}", err=True)
    if offer.refusals or offer.has_failed:
        raise typer.Exit(1)


@app.command()
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL_OR_REPOSITORY]...",
            help="Models to serve: models/demo, models/demo:7, a URL, a packed version (.tar.gz), or a repository with "
            "all its models. Default: `serve.models` of the job, or the job's own model.",
        ),
    ] = None,
    job: Annotated[Path | None, typer.Option("--job", metavar="JOB", help="Job file with a `serve` section.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port to listen on; 0 picks a free port.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until a first version is published.")] = False,
    readers: Annotated[
        int | None,
        typer.Option(
            "--readers", metavar="N", help="Number of processes that run a model's custom reader: `serve.readers`."
        ),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Serve published models over HTTP, gRPC and bRPC, and follow new versions."""
    from elasticrec.config import default_job, load_job
    from elasticrec.serving.plan import plan_models
    from elasticrec.serving.server import serve as serve_models

    given = {"serve.port": port, "serve.readers": readers}
    changes = [*(overrides or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    whole = default_job(changes) if job is None else load_job(job, changes)
    variants = plan_models(models or [], whole, is_given=job is not None)
    with forward_logs(_say):
        serve_models(variants, whole, wait=wait)


@app.command()
def predict(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="File of lines in the training format; `-` for standard input.")
    ],
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="RUN", help="Score with the newest checkpoint of a run.")
    ] = None,
    best: BestOption = False,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Score with a published model, in this process.")
    ] = None,
    server: Annotated[str | None, typer.Option("--server", metavar="URL", help="Score with a running server.")] = None,
    name: NameOption = None,
    token: TokenOption = None,
    timeout_s: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", help="With --server: timeout of a request.")
    ] = None,
    ca: CaOption = None,
    run_reader: Annotated[
        bool, typer.Option("--run-reader", help="With --model: run the reader code in the model's directory.")
    ] = False,
) -> None:
    """Print the scores of samples, one line per sample.

    Scores of several labels are separated by tabs. If the lines have labels, AUC and log loss follow on standard
    error.
    """
    from elasticrec.predict import RemoteServer, open_scorer, scores_of, with_metrics
    from elasticrec.terminal import progress_line

    address = RemoteServer(server, name, token, timeout_s, ca)
    with open_scorer(checkpoint, model, address, best=best, run_reader=run_reader) as opened:
        source, metrics = with_metrics(opened)
        num_scored = 0
        with progress_line(None) as progress:
            for scores in scores_of(source, file):
                typer.echo("\n".join("\t".join(f"{value:.9g}" for value in row) for row in scores))
                num_scored += len(scores)
                if not sys.stdout.isatty():
                    # On a terminal the printed scores show the progress.
                    progress(num_scored)
        for line in metrics.lines() if metrics else ():
            typer.echo(line, err=True)


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to work in.")] = Path("demo"),
    samples: Annotated[int, typer.Option(min=1000, max=MAX_SAMPLES, help="Samples to generate.")] = 400_000,
) -> None:
    """Run the whole loop on generated data: train, publish, serve, send requests."""
    from elasticrec.demo import run_demo

    run_demo(directory, samples)


# `--help` lists the commands in this order: those above, a run's commands, roles, then groups.
add_launch(app)
add_rollout(app, models_app, cube_app)
add_audit(app)
add_roles(app)
app.add_typer(data_app, name="data")
app.add_typer(models_app, name="models")
app.add_typer(cube_app, name="cube")
app.add_typer(bench_app, name="bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 for a user's mistake, 130 for Ctrl-C; a traceback is a bug."""
    limit_spinning()
    try:
        result = app(args=arguments, prog_name="elasticrec", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except typer.TyperException as error:
        return _fail(_describe_usage(error))
    except ElasticRecError as error:
        return _fail(str(error))
    except BrokenPipeError:
        # The process that read our output has exited (`| head`); the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except OSError as error:
        return _fail(_describe(error))
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        return _fail(f"this command needs `{error.name}`; install it: pip install 'elasticrec[{_EXTRAS[error.name]}]'")
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    finally:
        end_logging()


def _say(message: str) -> None:
    """Print a line of a long-running command and flush, so that it passes through a pipe at once."""
    typer.echo(message)
    sys.stdout.flush()


def _fail(message: str) -> int:
    for line in message.splitlines():
        typer.echo(f"error: {line}", err=True)
    return USER_ERROR


def _describe_usage(error: typer.TyperException) -> str:
    """Return typer's message in the style of our own messages."""
    text = re.sub(r"'([^']*)'", r"`\1`", error.format_message()).strip().rstrip(".")
    return f"{text[:1].lower()}{text[1:]}, see `--help`"


def _describe(error: OSError) -> str:
    if error.strerror is None:
        return str(error) or type(error).__name__
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
    return f"{where}{error.strerror[:1].lower()}{error.strerror[1:]}"


if __name__ == "__main__":
    sys.exit(main())
