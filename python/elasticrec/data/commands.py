"""`elasticrec data`: the commands; each imports its implementation when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from elasticrec.options import MAX_SAMPLES, JobArgument, SetOption
from elasticrec.terminal import progress_line

data_app = typer.Typer(help="Generate, inspect, convert and split data.", rich_markup_mode=None)

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[SRC]... OUT",
        help="Input files, directories or globs, then the path to write to. Without SRC, the files of --job are read.",
    ),
]
JobOption = Annotated[
    Path | None, typer.Option("--job", metavar="JOB", help="Job that describes the data; detected if not given.")
]


@data_app.command("demo")
def data_demo(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write to.")],
    samples: Annotated[int, typer.Option(min=1, max=MAX_SAMPLES, help="Number of samples, over all hours.")] = 200_000,
    slots: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Number of slots. Default: 20, or 26 for format criteo.")
    ] = None,
    hours: Annotated[int, typer.Option(min=1, max=2**20, help="Number of hours to spread the samples over.")] = 4,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same bytes.")] = 1,
    format: Annotated[str, typer.Option(help="slots or criteo.")] = "slots",
    kind: Annotated[
        str,
        typer.Option(
            help="Pattern to learn: pairwise (pairs of slots), multitask (clicks and rare purchases) or "
            "sequence (a history of items)."
        ),
    ] = "pairwise",
    structure: Annotated[
        bool,
        typer.Option(
            "--structure/--no-structure", help="--no-structure shuffles the pattern away: nothing can be learned."
        ),
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing hours.")] = False,
) -> None:
    """Generate click logs and a job that trains on them.

    Prints the best AUC that a model can reach on them.
    """
    from elasticrec.data.demo import summary_lines, write_demo

    with progress_line(samples) as progress:
        summary = write_demo(
            out,
            samples=samples,
            slots=slots,
            hours=hours,
            seed=seed,
            format=format,
            kind=kind,
            structure=structure,
            overwrite=overwrite,
            progress=progress,
        )
    for line in summary_lines(summary):
        typer.echo(line)


@data_app.command("stats")
def data_stats(
    job: JobArgument,
    overrides: SetOption = None,
    samples: Annotated[
        int, typer.Option(min=100, max=MAX_SAMPLES, help="Maximum number of training samples to read.")
    ] = 1_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Show how well each slot and dense column predicts the click.

    Prints coverage, distinct signs, click rate, the AUC of the column alone, and drift between train and eval. Warns
    of possible leakage.
    """
    import json
    from dataclasses import asdict

    from elasticrec.config import load_job
    from elasticrec.data.stats.collect import collect
    from elasticrec.data.stats.report import report_lines

    with progress_line(samples) as progress:
        stats = collect(load_job(job, overrides or []), num_samples=samples, progress=progress)
    for line in [json.dumps(asdict(stats))] if as_json else report_lines(stats):
        typer.echo(line)


@data_app.command("convert")
def data_convert(
    paths: PathsArgument,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", help="Output format: slots, paddlerec, csv, parquet or json. Default: by the name of OUT."
        ),
    ] = None,
    job: JobOption = None,
    separator: Annotated[str, typer.Option(help="CSV: separator between several values in one field.")] = "|",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Convert data to another format: SRC... OUT.

    OUT is a file, compressed if its name ends in .gz or .zst, or a directory that gets one file per input file. The
    samples stay the same. Prints the `data` section of a job that reads them.
    """
    from elasticrec.config import load_job
    from elasticrec.data.convert.convert import convert, format_of, summary_lines

    *sources, out = paths
    described = load_job(job) if job is not None else None
    with progress_line(None) as progress:
        converted = convert(
            sources,
            Path(out),
            format_of(Path(out), to),
            job=described,
            separator=separator,
            overwrite=overwrite,
            progress=progress,
        )
    for line in summary_lines(converted):
        typer.echo(line)


@data_app.command("split")
def data_split(
    paths: PathsArgument,
    ratio: Annotated[float | None, typer.Option(help="Share of the samples for OUT/eval, selected by hash.")] = None,
    time: Annotated[str | None, typer.Option(help="Write samples from this time on to OUT/eval.")] = None,
    parts: Annotated[int | None, typer.Option(min=2, max=500, help="Number of files OUT/part-NNNNN to write.")] = None,
    job: JobOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Split data files on disk: SRC... OUT.

    --ratio and --time write OUT/train and OUT/eval, split as `data.eval` of a job would split them. --parts writes
    parts of equal size.
    """
    from elasticrec.config import load_job
    from elasticrec.data.convert.split import holdout_of, split_by, split_parts

    described = load_job(job) if job is not None else None
    *sources, out = paths
    with progress_line(None) as progress:
        if parts is not None and ratio is None and time is None:
            counts = split_parts(sources, Path(out), parts, job=described, overwrite=overwrite, progress=progress)
        else:
            holdout = holdout_of(ratio, time, parts)
            counts = split_by(sources, Path(out), holdout, job=described, overwrite=overwrite, progress=progress)
    for name, count in counts.items():
        typer.echo(f"wrote {Path(out) / name}: {count:,} samples")
