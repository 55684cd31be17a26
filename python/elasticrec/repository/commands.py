"""`elasticrec models`: inspect and manage published versions. Commands import lazily, so that `--help` is fast."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticrec.net.logs import forward_logs

if TYPE_CHECKING:
    from elasticrec.repository.repository import Repository

models_app = typer.Typer(
    help="Show published models, pin versions, roll back, and remove old versions.", rich_markup_mode=None
)

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Directory, URL or name of a model such as models/demo, or a packed model (.tar.gz)."
    ),
]
VersionArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL[:VERSION]", help="A model with a version, such as models/demo:7; by default its current version."
    ),
]
NamedVersionArgument = Annotated[
    str, typer.Argument(metavar="MODEL:VERSION", help="A version of a model, such as models/demo:7.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@models_app.command("list")
def list_models(
    location: Annotated[
        str,
        typer.Argument(metavar="[MODEL]", help="Directory, URL or name of a model, or a repository of several models."),
    ] = "models",
    as_json: JsonOption = False,
) -> None:
    """List the versions of a model, newest first, or of all models of a repository."""
    from elasticrec.repository.find import open_listing
    from elasticrec.repository.tables import describe_model, model_lines

    found = [describe_model(repository) for repository in open_listing(location)]
    if as_json:
        typer.echo(json.dumps({"models": found}))
        return
    for number, model in enumerate(found):
        for line in [*([""] if number else []), *model_lines(model)]:
            typer.echo(line)


@models_app.command()
def show(model: VersionArgument, as_json: JsonOption = False) -> None:
    """Show a version: its chain, its training data and its metrics."""
    from elasticrec.repository.find import open_model
    from elasticrec.repository.storage import join
    from elasticrec.repository.tables import version_lines

    reference = open_model(model)
    repository, number = reference.repository, reference.version()
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

    references = [open_model(text) for text in (first, second)]
    a, b = (fetch(reference.repository, reference.version(), default_cache()) for reference in references)
    found = compare(a, b, rows=rows)
    left, right = (f"{reference.repository.name}:{reference.version()}" for reference in references)
    for line in [json.dumps(found.to_dict())] if as_json else difference_lines(left, right, found):
        typer.echo(line)


@models_app.command()
def verify(
    model: VersionArgument,
    all_versions: Annotated[bool, typer.Option("--all", help="Check every version of the model.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a version: its chain, size and checksum of every file, finite weights, readable rows."""
    from elasticrec.repository.find import open_model
    from elasticrec.repository.verify import row_problems
    from elasticrec.repository.verify import verify as check

    reference = open_model(model)
    numbers = reference.repository.versions() if all_versions else [reference.version()]
    problems = {number: check(reference.repository, number) for number in numbers}
    whole = {number: reference.repository.version(number) for number, found in problems.items() if not found}
    # Reading the last version of a chain covers the versions below it.
    for number in whole.keys() - {version.parent for version in whole.values()}:
        problems[number] = row_problems(reference.repository, number)
    if as_json:
        typer.echo(json.dumps({"versions": {str(number): found for number, found in problems.items()}}))
    else:
        for number, found in problems.items():
            for line in found or ["ok"]:
                typer.echo(f"{reference.repository.name}:{number}: {line}")
    if any(problems.values()):
        raise typer.Exit(1)


@models_app.command()
def pin(model: NamedVersionArgument) -> None:
    """Keep a version and its chain until it is unpinned."""
    repository, number = resolve_version(model, "pin")
    repository.pin(number)
    typer.echo(f"pinned {repository.name}:{number}; pinned: {', '.join(map(str, repository.pins()))}")


@models_app.command()
def unpin(model: NamedVersionArgument) -> None:
    """Unpin a version, so that `models gc` may remove it."""
    repository, number = resolve_version(model, "unpin")
    repository.unpin(number)
    typer.echo(f"unpinned {repository.name}:{number}; pinned: {', '.join(map(str, repository.pins())) or 'none'}")


@models_app.command()
def resume(model: ModelArgument) -> None:
    """Resume offering new versions after a rollback."""
    from elasticrec.repository.repository import STORE

    repository = _model(model)
    was_held = (state := repository.state()) is not None and state.is_held
    has_store = repository.storage.exists(STORE)
    current = repository.resume()
    result = "resumed" if was_held else "was not held"
    next_offer = (
        "the newest version that passes the gate becomes current once the store has loaded it"
        if has_store
        else "the next published version becomes current"
    )
    newest = max(repository.versions(), default=None)
    typer.echo(f"{repository.location}: {result}; current {current.version}, newest {newest}; {next_offer}")


@models_app.command()
def gc(
    model: ModelArgument,
    keep: Annotated[int, typer.Option("--keep", min=1, help="Newest bases to keep, with their deltas.")] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be removed, without removing it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove old versions; versions that are current, pinned, or needed by a kept version are kept."""
    from elasticrec.repository.collect import collect, plan_collection

    repository = _model(model)
    done = plan_collection(repository, keep) if dry_run else collect(repository, keep)
    if as_json:
        typer.echo(json.dumps(vars(done)))
        return
    verb = "would remove" if dry_run else "removed"
    gone = [*map(str, sorted(done.removed)), *(f"{directory} (incomplete)" for directory in done.abandoned)]
    typer.echo(f"{repository.location}: {verb} {', '.join(gone) or 'nothing'}, {done.num_bytes:,} bytes")
    for number, reason in done.kept.items():
        typer.echo(f"kept {number}: {reason}")


@models_app.command()
def pack(
    model: VersionArgument,
    file: Annotated[Path, typer.Argument(metavar="FILE.tar.gz", help="File to write.")],
) -> None:
    """Write a version and its chain to one file, which commands accept as MODEL."""
    from elasticrec.errors import ConfigError
    from elasticrec.repository.fetch import default_cache, fetch
    from elasticrec.repository.find import open_model
    from elasticrec.repository.pack import is_pack
    from elasticrec.repository.pack import pack as write

    if not is_pack(file.name):
        raise ConfigError(f"{file}: expected a name ending in .tar.gz")
    reference = open_model(model)
    with forward_logs(lambda text: typer.echo(text, err=True)):
        fetched = fetch(reference.repository, reference.version(), default_cache())
    num_bytes = write(fetched, file)
    typer.echo(f"packed {reference.repository.name}:{fetched.version.number} into {file}, {num_bytes:,} bytes")


def _model(text: str) -> "Repository":
    from elasticrec.repository.find import open_model

    return open_model(text).repository


def resolve_version(text: str, command: str, *, insecure: bool = False) -> "tuple[Repository, int]":
    from elasticrec.errors import ConfigError
    from elasticrec.repository.find import open_model

    reference = open_model(text, insecure=insecure)
    if reference.number is None:
        there = ", ".join(map(str, reference.repository.versions())) or "none"
        raise ConfigError(f"models {command}: expected MODEL:VERSION such as {text}:3; available: {there}")
    return reference.repository, reference.number
