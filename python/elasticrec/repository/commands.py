"""`elasticrec models`: what is published, and what is served of it; each command imports what it runs when it runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from elasticrec.repository.repository import Repository

models_app = typer.Typer(
    help="Look at published models, pin versions, roll back, collect old ones.", rich_markup_mode=None
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Directory, URL or name of a model such as models/demo, or a packed one (.tar.gz)."
    ),
]
VersionArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL[:VERSION]", help="A model as models/demo:7; without a version the current one."),
]
ThisVersionArgument = Annotated[
    str, typer.Argument(metavar="MODEL:VERSION", help="A version of a model, such as models/demo:7.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object.")]


@models_app.command("list")
def list_models(
    place: Annotated[
        str,
        typer.Argument(metavar="[MODEL]", help="A model, or a repository with several: directory, URL or name."),
    ] = "models",
    as_json: JsonOption = False,
) -> None:
    """List the versions of a model, newest first, or of all models of a repository."""
    from elasticrec.repository.find import open_listing
    from elasticrec.repository.tables import describe_model, model_lines

    found = [describe_model(repository) for repository in open_listing(place)]
    if as_json:
        typer.echo(json.dumps({"models": found}))
        return
    for number, model in enumerate(found):
        for line in [*([""] if number else []), *model_lines(model)]:
            typer.echo(line)


@models_app.command()
def show(model: VersionArgument, as_json: JsonOption = False) -> None:
    """Show a version: what it is made of, what it was trained on, its metrics."""
    from elasticrec.repository.find import open_model
    from elasticrec.repository.storage import join
    from elasticrec.repository.tables import version_lines

    place = open_model(model)
    repository, number = place.repository, place.version()
    chain = repository.chain(number)
    state = repository.state()
    shown = {
        "place": join(repository.location, chain[-1].name),
        "chain": [version.number for version in chain],
        "bytes": sum(version.num_bytes for version in chain),
        "current": state is not None and state.version == number,
        "held": state is not None and state.version == number and state.is_held,
        "pinned": number in repository.pins(),
        "manifest": chain[-1].manifest,
    }
    for line in [json.dumps(shown)] if as_json else version_lines(shown):
        typer.echo(line)


@models_app.command()
def diff(
    first: VersionArgument,
    second: VersionArgument,
    rows: Annotated[bool, typer.Option("--rows/--no-rows", help="Compare row by row.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Show what differs between two versions: manifest, metrics, files, rows."""
    from elasticrec.repository.diff import compare
    from elasticrec.repository.fetch import default_cache, fetch
    from elasticrec.repository.find import open_model
    from elasticrec.repository.tables import difference_lines

    places = [open_model(text) for text in (first, second)]
    a, b = (fetch(place.repository, place.version(), default_cache()) for place in places)
    found = compare(a, b, rows=rows)
    left, right = (f"{place.repository.name}:{place.version()}" for place in places)
    for line in [json.dumps(found.to_dict())] if as_json else difference_lines(left, right, found):
        typer.echo(line)


@models_app.command()
def verify(
    model: VersionArgument,
    all_versions: Annotated[bool, typer.Option("--all", help="Every version of the model.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a version: its chain, every file's size and checksum, weights that are numbers, rows that can be read."""
    from elasticrec.repository.find import open_model
    from elasticrec.repository.verify import unreadable
    from elasticrec.repository.verify import verify as check

    place = open_model(model)
    numbers = place.repository.versions() if all_versions else [place.version()]
    problems = {number: check(place.repository, number) for number in numbers}
    whole = {number: place.repository.version(number) for number, found in problems.items() if not found}
    # a version is read with the last of those that are made of it
    for number in whole.keys() - {version.parent for version in whole.values()}:
        problems[number] = unreadable(place.repository, number)
    if as_json:
        typer.echo(json.dumps({"versions": {str(number): found for number, found in problems.items()}}))
    else:
        for number, found in problems.items():
            for line in found or ["ok"]:
                typer.echo(f"{place.repository.name}:{number}: {line}")
    if any(problems.values()):
        raise typer.Exit(1)


@models_app.command()
def pin(model: ThisVersionArgument) -> None:
    """Keep a version, and all it is made of, until it is unpinned."""
    repository, number = this_version(model, "pin")
    repository.pin(number)
    typer.echo(f"pinned {repository.name}:{number}; pinned: {', '.join(map(str, repository.pins()))}")


@models_app.command()
def unpin(model: ThisVersionArgument) -> None:
    """Let a version go with the others of its age."""
    repository, number = this_version(model, "unpin")
    repository.unpin(number)
    typer.echo(f"unpinned {repository.name}:{number}; pinned: {', '.join(map(str, repository.pins())) or 'none'}")


@models_app.command()
def resume(model: ModelArgument) -> None:
    """Let new versions be offered again after a rollback."""
    from elasticrec.repository.repository import STORE

    repository = _model(model)
    was_held = (state := repository.state()) is not None and state.is_held
    # where there is a store its roll-out looks all the time
    next_one = "the newest that the gate lets through is offered" if repository.storage.exists(STORE) else None
    current = repository.resume()
    words = "resumed" if was_held else "was not held"
    newest = max(repository.versions(), default=None)
    typer.echo(
        f"{repository.location}: {words}; current {current.version}, the newest is {newest}, "
        + (f"{next_one} as soon as the store has it" if next_one else "the next one published is offered")
    )


@models_app.command()
def gc(
    model: ModelArgument,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Newest bases to keep, with their deltas.")] = 3,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old versions, never one that is current, pinned, or needed by another that stays."""
    from elasticrec.repository.collect import collect, plan_collection

    repository = _model(model)
    done = plan_collection(repository, keep) if dry_run else collect(repository, keep)
    if as_json:
        typer.echo(json.dumps(vars(done)))
        return
    verb = "would remove" if dry_run else "removed"
    gone = [*map(str, sorted(done.removed)), *(f"{directory} (never finished)" for directory in done.abandoned)]
    typer.echo(f"{repository.location}: {verb} {', '.join(gone) or 'nothing'}, {done.num_bytes:,} bytes")
    for number, why in done.kept.items():
        typer.echo(f"kept {number}: {why}")


@models_app.command()
def pack(
    model: VersionArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="Where to write.")],
) -> None:
    """Write a version with all it is made of into one file, which is taken wherever a model is."""
    from elasticrec.errors import ConfigError
    from elasticrec.repository.fetch import default_cache, fetch
    from elasticrec.repository.find import open_model
    from elasticrec.repository.pack import is_pack
    from elasticrec.repository.pack import pack as write

    if not is_pack(file.name):
        raise ConfigError(f"{file}: expected a name that ends in .tar.gz")
    place = open_model(model)
    fetched = fetch(place.repository, place.version(), default_cache(), lambda text: typer.echo(text, err=True))
    num_bytes = write(fetched, file)
    typer.echo(f"packed {place.repository.name}:{fetched.version.number} into {file}, {num_bytes:,} bytes")


def _model(text: str) -> "Repository":
    from elasticrec.repository.find import open_model

    return open_model(text).repository


def this_version(text: str, command: str, *, insecure: bool = False) -> "tuple[Repository, int]":
    from elasticrec.errors import ConfigError
    from elasticrec.repository.find import open_model

    place = open_model(text, insecure=insecure)
    if place.number is None:
        there = ", ".join(map(str, place.repository.versions())) or "none"
        raise ConfigError(f"models {command}: expected MODEL:VERSION such as {text}:3; there are {there}")
    return place.repository, place.number
