"""`elasticrec data`: the commands; each imports what it runs when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from elasticrec.options import MAX_SAMPLES, JobArgument, SetOption
from elasticrec.progress import counting

data_app = typer.Typer(help="Make data, look at it, convert and split it.", rich_markup_mode=None)

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="[SRC]... OUT", help="Files, directories or globs, and where to write; without SRC those of --job."
    ),
]
JobOption = Annotated[
    Path | None, typer.Option("--job", metavar="JOB", help="Job that describes the data; found out if not given.")
]


@data_app.command("demo")
def data_demo(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Directory to write to.")],
    samples: Annotated[int, typer.Option(min=1, max=MAX_SAMPLES, help="Samples over all hours.")] = 200_000,
    slots: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Slots of a sample; 20 if not given, 26 for criteo.")
    ] = None,
    hours: Annotated[int, typer.Option(min=1, max=2**20, help="Hours the samples are spread over.")] = 4,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same bytes.")] = 1,
    format: Annotated[str, typer.Option(help="slots or criteo.")] = "slots",
    kind: Annotated[
        str,
        typer.Option(
            help="What there is to learn: pairwise (pairs of slots), multitask (clicks and rare buys) or "
            "sequence (a history of items)."
        ),
    ] = "pairwise",
    structure: Annotated[
        bool, typer.Option("--structure/--no-structure", help="Without, that is shuffled away and cannot be learned.")
    ] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace hours that are there.")] = False,
) -> None:
    """Write click logs and a job to train on them.

    Their best possible AUC is known, and printed.
    """
    from elasticrec.data.demo import summary_lines, write_demo

    with counting(samples) as progress:
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
        int, typer.Option(min=100, max=MAX_SAMPLES, help="Samples of the training data to look at, at most.")
    ] = 1_000_000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Print what each slot and dense column has to say about the click.

    Coverage, distinct signs, click rate, the AUC of it alone, drift between train and eval, and signs of leakage.
    """
    import json
    from dataclasses import asdict

    from elasticrec.config import load_job
    from elasticrec.data.stats.collect import collect
    from elasticrec.data.stats.report import report_lines

    with counting(samples) as progress:
        stats = collect(load_job(job, overrides or []), num_samples=samples, progress=progress)
    for line in [json.dumps(asdict(stats))] if as_json else report_lines(stats):
        typer.echo(line)


@data_app.command("convert")
def data_convert(
    paths: PathsArgument,
    to: Annotated[
        str | None,
        typer.Option("--to", help="slots, paddlerec, csv, parquet or json; by the name of OUT if not given."),
    ] = None,
    job: JobOption = None,
    separator: Annotated[str, typer.Option(help="CSV: what stands between several values in one field.")] = "|",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Convert data to another format: SRC... OUT.

    OUT is a file, compressed by its name (.gz, .zst), or a directory with a file for each of SRC. Prints how a job
    reads the result; it gives the same samples.
    """
    from elasticrec.config import load_job
    from elasticrec.data.convert import convert, format_of, summary_lines

    *sources, out = paths
    described = load_job(job) if job is not None else None
    with counting(None) as progress:
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
    ratio: Annotated[float | None, typer.Option(help="Share of the samples for OUT/eval, chosen by hash.")] = None,
    time: Annotated[str | None, typer.Option(help="Samples from this time on go to OUT/eval.")] = None,
    parts: Annotated[int | None, typer.Option(min=2, max=500, help="Write so many OUT/part-00000.")] = None,
    job: JobOption = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that are there.")] = False,
) -> None:
    """Split data on the disk: SRC... OUT.

    By --ratio or --time into OUT/train and OUT/eval, as `data.eval` splits it in a job; or into --parts of equal size.
    """
    from elasticrec.config import load_job
    from elasticrec.data.split import holdout_of, split_by, split_parts

    described = load_job(job) if job is not None else None
    *sources, out = paths
    with counting(None) as progress:
        if parts is not None and ratio is None and time is None:
            counts = split_parts(sources, Path(out), parts, job=described, overwrite=overwrite, progress=progress)
        else:
            holdout = holdout_of(ratio, time, parts)
            counts = split_by(sources, Path(out), holdout, job=described, overwrite=overwrite, progress=progress)
    for name, count in counts.items():
        typer.echo(f"wrote {Path(out) / name}: {count:,} samples")
