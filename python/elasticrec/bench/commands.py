"""`elasticrec bench`: the commands; each imports what it measures when it runs."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticrec.errors import ConfigError
from elasticrec.options import MAX_SAMPLES

bench_app = typer.Typer(help="Measure ElasticREC and the limits of the machine.", rich_markup_mode=None)

JsonOption = Annotated[bool, typer.Option("--json", help="End with one JSON object on a line.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Each figure is the median of so many.")]


@bench_app.command("parse")
def bench_parse(
    as_json: JsonOption = False,
    samples: Annotated[
        int, typer.Option(min=1000, max=MAX_SAMPLES, help="Samples to generate of each format.")
    ] = 100_000,
    repeats: RepeatsOption = 5,
) -> None:
    """Lines of each text format to batches, on one core."""
    from elasticrec.bench import parse

    _print(parse.run(samples, repeats, _say), parse.describe, as_json)


@bench_app.command("train")
def bench_train(
    as_json: JsonOption = False,
    samples: Annotated[int, typer.Option(min=16_384, max=MAX_SAMPLES, help="Samples to generate.")] = 300_000,
    rows: Annotated[int, typer.Option(min=1000, max=10**9, help="Rows of the table.")] = 10_000_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of a measurement of the network.")] = 3.0,
    rivals: Annotated[bool, typer.Option("--rivals", help="In a clone: also run plain PyTorch.")] = False,
) -> None:
    """Training against its network alone, over ten million rows."""
    from elasticrec.bench import train

    _print(train.run(samples, rows, repeats, seconds, _say, rivals), train.describe, as_json)


@bench_app.command("table")
def bench_table(
    as_json: JsonOption = False,
    rows: Annotated[int, typer.Option(min=1000, max=1_000_000_000, help="Rows of the table.")] = 10_000_000,
    repeats: RepeatsOption = 5,
) -> None:
    """Pulls and updates of the sparse table on one core, against its memory alone; bytes a key."""
    from elasticrec.bench import table

    _print(table.run(rows, repeats, _say), table.describe, as_json)


@bench_app.command("serve")
def bench_serve(
    as_json: JsonOption = False,
    rows: Annotated[int, typer.Option(min=1000, max=10**9, help="Rows of the model.")] = 1_000_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Seconds of a measurement.")] = 4.0,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Only this part: engine, joining, latency, swap or rivals; may be repeated."),
    ] = None,
    rivals: Annotated[
        bool, typer.Option("--rivals", help="In a clone: also install and ask other model servers.")
    ] = False,
) -> None:
    """Serving against the engine underneath, joined requests, latencies under load, hot swaps; a real server."""
    from elasticrec.bench import serve, serve_model

    known = [*serve.PARTS, serve.RIVALS]
    unknown = [name for name in part or () if name not in known]
    if unknown:
        raise ConfigError(f"bench: --part: expected {', '.join(known)}, got `{unknown[0]}`")
    parts = list(part or serve.PARTS)
    if rivals and serve.RIVALS not in parts:
        parts.append(serve.RIVALS)
    _print(serve.run(serve_model.Sizes(rows, repeats, seconds), parts, _say), serve.describe, as_json)


@bench_app.command("ps")
def bench_ps(
    as_json: JsonOption = False,
    samples: Annotated[int, typer.Option(min=16_384, max=MAX_SAMPLES, help="Samples to generate.")] = 300_000,
    rows: Annotated[int, typer.Option(min=1000, max=10**9, help="Rows of all servers.")] = 10_000_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Seconds of a measurement.")] = 8.0,
    max_trainers: Annotated[int, typer.Option(min=1, max=1024, help="Most trainers of `cpu_growth`.")] = 8,
    part: Annotated[
        list[str] | None, typer.Option(help="Only this part: speed, growth, pull or fault; may be repeated.")
    ] = None,
) -> None:
    """Training with parameter servers against its network alone, growth, pulls, recovery; real processes."""
    from elasticrec.bench import ps

    unknown = [name for name in part or () if name not in ps.PARTS]
    if unknown:
        raise ConfigError(f"bench: --part: expected {', '.join(ps.PARTS)}, got `{unknown[0]}`")
    sizes = ps.Sizes(samples, rows, repeats, seconds, max_trainers)
    _print(ps.run(sizes, part or list(ps.PARTS), _say), ps.describe, as_json)


@bench_app.command("cube")
def bench_cube(
    as_json: JsonOption = False,
    rows: Annotated[int, typer.Option(min=1000, max=10**9, help="Rows of the cube.")] = 10_000_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.2, max=600, help="Seconds of a measurement.")] = 2.0,
    deltas: Annotated[int, typer.Option(min=0, max=86_400, help="Deltas that come one a second.")] = 120,
    rivals: Annotated[bool, typer.Option("--rivals", help="Also ask a Redis for the same rows.")] = False,
) -> None:
    """Lookups of the cube: in one process against its memory, through sockets against Redis, while versions change."""
    from elasticrec.bench import cube

    _print(cube.run(cube.Sizes(rows, repeats, seconds, deltas, rivals), _say), cube.describe, as_json)


@bench_app.command("load")
def bench_load(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running server, such as http://127.0.0.1:8500.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Lines to ask for, plain or compressed.")],
    as_json: JsonOption = False,
    name: Annotated[str | None, typer.Option("--name", help="Which model, if it has several.")] = None,
    token: Annotated[str | None, typer.Option("--token", help="Its token, as ${ENV} or file:PATH.")] = None,
    format: Annotated[
        str, typer.Option(help="text: lines of the training format; json: an object of named slots a line.")
    ] = "text",
    instances: Annotated[int, typer.Option(min=1, max=1_000_000, help="Lines a request.")] = 1,
    connections: Annotated[int, typer.Option(min=1, max=60_000, help="Each has one request under way.")] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="How long.")] = 10.0,
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, max=10_000_000, help="Requests a second; without it as fast as answers come."),
    ] = None,
    poisson: Annotated[bool, typer.Option("--poisson", help="With --rate: random gaps instead of even ones.")] = False,
) -> None:
    """Load on a running server: requests a second, latencies, failures."""
    from elasticrec.bench import load

    what = load.Load(file, format, instances, connections, seconds, rate, poisson)
    _print(load.run(url, name, token, what, _say), load.describe, as_json)


@bench_app.command("spine")
def bench_spine(
    as_json: JsonOption = False,
    samples: Annotated[int, typer.Option(min=16_384, max=MAX_SAMPLES, help="Rows to generate.")] = 200_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds of a measurement.")] = 2.0,
) -> None:
    """Training against its network alone, serving against its engine alone, parsing."""
    from elasticrec.bench import spine

    _print(spine.run(samples, repeats, seconds, _say), spine.describe, as_json)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print(result: dict[str, Any], describe: Callable[[dict[str, Any]], Iterable[str]], as_json: bool) -> None:
    for line in describe(result):
        typer.echo(line)
    if as_json:
        typer.echo(json.dumps(result))
