"""`elasticrec bench`: the commands; each imports its measurement when it runs."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticrec.errors import ConfigError
from elasticrec.options import MAX_SAMPLES

bench_app = typer.Typer(help="Measure ElasticREC and compare it with the limits of the machine.", rich_markup_mode=None)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Repetitions; each figure is their median.")]


@bench_app.command("parse")
def bench_parse(
    as_json: JsonOption = False,
    samples: Annotated[int, typer.Option(min=1000, max=MAX_SAMPLES, help="Samples to generate per format.")] = 100_000,
    repeats: RepeatsOption = 5,
) -> None:
    """Parse lines of each text format into batches, on one core."""
    from elasticrec.bench import parse

    _print(parse.run(samples, repeats, _say), parse.describe, as_json)


@bench_app.command("train")
def bench_train(
    as_json: JsonOption = False,
    samples: Annotated[int, typer.Option(min=16_384, max=MAX_SAMPLES, help="Samples to generate.")] = 300_000,
    rows: Annotated[int, typer.Option(min=1000, max=10**9, help="Rows of the table.")] = 10_000_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Duration of a measurement of the network.")] = 3.0,
    rivals: Annotated[
        bool, typer.Option("--rivals", help="Also run plain PyTorch; needs a clone of the repository.")
    ] = False,
) -> None:
    """Train over ten million rows, compared with the dense network alone."""
    from elasticrec.bench import train

    _print(train.run(train.Sizes(samples, rows, repeats, seconds, rivals), _say), train.describe, as_json)


@bench_app.command("table")
def bench_table(
    as_json: JsonOption = False,
    rows: Annotated[int, typer.Option(min=1000, max=1_000_000_000, help="Rows of the table.")] = 10_000_000,
    repeats: RepeatsOption = 5,
) -> None:
    """Pull and update rows of the sparse table on one core, compared with plain memory access; report bytes per key."""
    from elasticrec.bench import table

    _print(table.run(rows, repeats, _say), table.describe, as_json)


@bench_app.command("serve")
def bench_serve(
    as_json: JsonOption = False,
    rows: Annotated[int, typer.Option(min=1000, max=10**9, help="Rows of the model.")] = 1_000_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Duration of a measurement.")] = 4.0,
    part: Annotated[
        list[str] | None,
        typer.Option(help="Run only this part: engine, joining, latency, swap or rivals; may be repeated."),
    ] = None,
    rivals: Annotated[
        bool,
        typer.Option("--rivals", help="Also install and measure other model servers; needs a clone of the repository."),
    ] = False,
) -> None:
    """Serve with a real server, compared with ONNX Runtime alone: joined requests, latency, version swaps."""
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
    rows: Annotated[int, typer.Option(min=1000, max=10**9, help="Rows of all servers together.")] = 10_000_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.5, max=600, help="Duration of a measurement.")] = 8.0,
    max_trainers: Annotated[
        int, typer.Option(min=1, max=1024, help="Largest number of trainers in the part `growth`.")
    ] = 8,
    part: Annotated[
        list[str] | None, typer.Option(help="Run only this part: speed, growth, pull or fault; may be repeated.")
    ] = None,
) -> None:
    """Train with parameter servers in real processes, compared with the network alone: growth, pulls, recovery."""
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
    seconds: Annotated[float, typer.Option(min=0.2, max=600, help="Duration of a measurement.")] = 2.0,
    deltas: Annotated[int, typer.Option(min=0, max=86_400, help="Deltas to load, one per second.")] = 120,
    rivals: Annotated[bool, typer.Option("--rivals", help="Also measure a Redis with the same rows.")] = False,
) -> None:
    """Look up rows of a cube: in one process, through sockets compared with Redis, and while versions change."""
    from elasticrec.bench import cube

    _print(cube.run(cube.Sizes(rows, repeats, seconds, deltas, rivals), _say), cube.describe, as_json)


@bench_app.command("load")
def bench_load(
    url: Annotated[str, typer.Argument(metavar="URL", help="A running server, such as http://127.0.0.1:8500.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of lines to send, plain or compressed.")],
    as_json: JsonOption = False,
    name: Annotated[str | None, typer.Option("--name", help="Model name, if the server has several.")] = None,
    token: Annotated[str | None, typer.Option("--token", help="Access token, as ${ENV} or file:PATH.")] = None,
    format: Annotated[
        str, typer.Option(help="text: lines in the training format; json: one object of named slots per line.")
    ] = "text",
    instances: Annotated[int, typer.Option(min=1, max=1_000_000, help="Lines per request.")] = 1,
    connections: Annotated[
        int, typer.Option(min=1, max=60_000, help="Connections, each with one request in flight.")
    ] = 8,
    seconds: Annotated[float, typer.Option(min=0.1, max=86_400, help="Duration.")] = 10.0,
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, max=10_000_000, help="Requests per second. Default: as fast as the server answers."),
    ] = None,
    poisson: Annotated[
        bool, typer.Option("--poisson", help="With --rate: random (Poisson) gaps instead of even ones.")
    ] = False,
) -> None:
    """Send traffic to a running server and report requests per second, latency and failures."""
    from elasticrec.bench import traffic

    settings = traffic.Settings(file, format, instances, connections, seconds, rate, poisson)
    _print(traffic.run(url, name, token, settings, _say), traffic.describe, as_json)


@bench_app.command("spine")
def bench_spine(
    as_json: JsonOption = False,
    samples: Annotated[int, typer.Option(min=16_384, max=MAX_SAMPLES, help="Samples to generate.")] = 200_000,
    repeats: RepeatsOption = 5,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Duration of a measurement.")] = 2.0,
) -> None:
    """Compare training with the network alone and serving with the engine alone, and measure parsing."""
    from elasticrec.bench import spine

    _print(spine.run(samples, repeats, seconds, _say), spine.describe, as_json)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _print(result: dict[str, Any], describe: Callable[[dict[str, Any]], Iterable[str]], as_json: bool) -> None:
    for line in describe(result):
        typer.echo(line)
    if as_json:
        typer.echo(json.dumps(result))
