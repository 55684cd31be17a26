"""The model whose rows an online store serves, and the store's settings: given on the command line or in a job file."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticrec.net import environment
from elasticrec.net.security import check_addresses, store_security

if TYPE_CHECKING:
    from elasticrec.config.publish import Cube, Gate
    from elasticrec.net.security import Security
    from elasticrec.repository.repository import Repository

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model such as models/demo (directory, URL or name), or the job file that publishes it."
    ),
]
TokenOption = Annotated[
    str, typer.Option("--token", envvar=environment.TOKEN, help="Access token of the store.", show_default=False)
]
AddressOption = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT[,HOST:PORT…]",
        help="Replicas of one shard; repeat for each shard. Default: the addresses in the job file.",
    ),
]


@dataclass(frozen=True)
class StoreSource:
    """A model, and the settings of its store from the job."""

    repository: "Repository"
    cube: "Cube"
    gate: "Gate"
    version: int | None = None
    """The version in the argument, if it names one."""


def open_source(source: str, insecure: bool) -> StoreSource:
    """Open the model that the argument or the job file names."""
    from elasticrec.config.publish import Cube, Gate
    from elasticrec.repository.find import open_model
    from elasticrec.repository.repository import Repository

    if source.endswith((".yaml", ".yml")):
        from elasticrec.config import load_job

        job = load_job(Path(source))
        allowed = insecure or job.cube.insecure
        repository = Repository.open(job.publish.repository, job.publish.model, insecure=allowed)
        return StoreSource(repository, job.cube, job.publish.gate)
    reference = open_model(source, insecure=insecure)
    return StoreSource(reference.repository, Cube(), Gate(), reference.number)


def open_followed_model(source: str, command: str, insecure: bool) -> StoreSource:
    """Open a model; refuse a single version, because a store follows all versions."""
    from elasticrec.errors import ConfigError

    found = open_source(source, insecure)
    if found.version is not None:
        raise ConfigError(
            f"{command}: expected a model, got its version {found.version}: `{source}`; "
            "to serve that version, use `elasticrec models rollback`"
        )
    return found


def client_security(
    cube: "Cube", addresses: list[list[str]], token: str, insecure: bool, ca: Path | None
) -> "Security":
    """Return the security of a client of the store; refuse addresses that need a token or TLS."""
    security = store_security(cube, token, insecure, ca=ca)
    check_addresses(security, addresses)
    return security


def store_addresses(cube: "Cube", given: list[str] | None) -> list[list[str]]:
    """Return the addresses of the replicas by shard: those of `--address`, or of the job."""
    from elasticrec.errors import ConfigError

    if not given:
        return [list(replicas) for replicas in cube.addresses]
    shards = [[one.strip() for one in shard.split(",")] for shard in given]
    for address in (address for shard in shards for address in shard):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"--address: expected an address such as 10.0.0.7:8600, got `{address}`")
    return shards


def required_addresses(cube: "Cube", given: list[str] | None) -> list[list[str]]:
    """Return the addresses of the replicas by shard; without any, raise `ConfigError`."""
    from elasticrec.errors import ConfigError

    addresses = store_addresses(cube, given)
    if not addresses:
        raise ConfigError("cube: expected --address for each shard, or a job file with `cube.addresses`")
    return addresses
