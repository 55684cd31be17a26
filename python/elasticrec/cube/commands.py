"""`elasticrec cube serve | get | status`, `elasticrec deliver` and `elasticrec models rollback`: the online store."""

import json
import logging
import re
import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from elasticrec.machine import allow_many_files
from elasticrec.net import environment
from elasticrec.net.logs import log_to_stderr
from elasticrec.net.options import CaOption, CertOption, InsecureOption, KeyOption
from elasticrec.net.security import check_addresses, store_security
from elasticrec.repository.commands import ThisVersionArgument, models_app, this_version

if TYPE_CHECKING:
    from elasticrec.config.publish import Cube, Gate
    from elasticrec.net.security import Security
    from elasticrec.repository.repository import Repository

cube_app = typer.Typer(help="Serve the rows of published models, and look rows up.", rich_markup_mode=None)

SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A model such as models/demo (directory, URL or name), or the job file that publishes it."
    ),
]
TokenOption = Annotated[
    str, typer.Option("--token", envvar=environment.TOKEN, help="Secret of the store.", show_default=False)
]
AddressOption = Annotated[
    list[str] | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT[,HOST:PORT…]",
        help="Replicas of one shard; repeat for each shard. Default: the addresses in the job file.",
    ),
]

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"([0-9]{1,5})/([0-9]{1,5})")


@dataclass(frozen=True)
class _Source:
    """A model, and the settings of its store from the job."""

    repository: "Repository"
    cube: "Cube"
    gate: "Gate"
    version: int | None = None
    """The version in the argument, if it names one."""


@cube_app.command()
def serve(
    source: SourceArgument,
    shard: Annotated[
        str, typer.Option("--shard", metavar="I/N", help="Index of the shard, from 0, and the number of shards.")
    ] = "0/1",
    host: Annotated[str, typer.Option("--host", envvar=environment.HOST, help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            "--port", envvar=environment.PORT, min=0, max=65535, help="Port for clients; 0 picks a free port."
        ),
    ] = 0,
    http_port: Annotated[
        int,
        typer.Option(
            "--http-port", min=0, max=65535, help="Port of the HTTP API, such as /metrics; 0 picks a free port."
        ),
    ] = 0,
    cache: Annotated[
        Path | None, typer.Option("--cache", help="Directory for files of a remote repository.", show_default=False)
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep-loaded", min=1, help="Number of versions to keep: the current and older ones.")
    ] = None,
    poll_s: Annotated[
        float | None, typer.Option("--poll", min=0.01, help="Seconds between two polls of the repository.")
    ] = None,
    token: TokenOption = "",
    tls_cert: CertOption = None,
    tls_key: KeyOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Serve one shard of a model's rows from memory, and follow the versions of its repository."""
    from elasticrec.cube.node import NodeOptions, StoreNode
    from elasticrec.repository.fetch import default_cache

    found = _open_model(source, "cube serve", insecure)
    number, num_shards = _shard(shard)
    options = NodeOptions(
        repository=found.repository,
        shard=number,
        num_shards=num_shards,
        host=host,
        port=port,
        http_port=http_port,
        security=store_security(found.cube, token, insecure, cert=tls_cert, key=tls_key),
        cache=cache or default_cache(),
        keep=keep or found.cube.keep_loaded,
        poll_s=poll_s or found.cube.poll_s,
    )
    allow_many_files()
    log_to_stderr(stamped=True)
    node = StoreNode(options)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: node.stop())
    logger.info("cube of %s: shard %d of %d, %s", found.repository.location, number, num_shards, node.url)
    node.run()


@cube_app.command()
def get(
    source: SourceArgument,
    signs: Annotated[list[int], typer.Argument(metavar="SIGN…", help="Signs to look up.", min=0, max=2**64 - 1)],
    address: AddressOption = None,
    version: Annotated[int | None, typer.Option("--version", min=1, help="Version; default: the current one.")] = None,
    token: TokenOption = "",
    tls_ca: CaOption = None,
    insecure: InsecureOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per sign.")] = False,
) -> None:
    """Look up the rows of signs: in the store if there is one, else in the files."""
    from elasticrec.cube.lookup import rows_of
    from elasticrec.errors import ConfigError

    found = _open(source, insecure)
    addresses = _addresses(found.cube, address)
    security = _client_security(found.cube, addresses, token, insecure, tls_ca)
    if version is not None and found.version not in (None, version):
        raise ConfigError(f"--version: expected {found.version}, as in `{source}`, got {version}")
    rows = rows_of(found.repository, signs, version or found.version, addresses, security)
    for line in rows.json_lines() if as_json else rows.lines():
        typer.echo(line)


@cube_app.command()
def status(
    source: SourceArgument,
    address: AddressOption = None,
    token: TokenOption = "",
    tls_ca: CaOption = None,
    insecure: InsecureOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the versions that each replica of a store holds, loads, or failed to load."""
    from elasticrec.publish.rollout.deliver import Delivery
    from elasticrec.publish.rollout.replicas import StoreReplicas

    found = _open_model(source, "cube status", insecure)
    addresses = _check_given(_addresses(found.cube, address))
    security = _client_security(found.cube, addresses, token, insecure, tls_ca)
    replicas = StoreReplicas(found.repository.name, addresses, security)
    log_to_stderr(stamped=True)
    decision, shards = Delivery(found.repository, replicas, found.gate, logger.info, found.cube.min_ready).preview()
    if as_json:
        shown = [{**vars(one)} for replicas_of in shards for one in replicas_of]
        typer.echo(json.dumps({"text": decision.text, "target": decision.target, "replicas": shown}))
        return
    typer.echo(f"{found.repository.name}: {decision.text}")
    for one in (one for replicas_of in shards for one in replicas_of):
        held = ", ".join(map(str, one.versions)) or "nothing"
        is_healthy = one.is_there and one.failed is None and one.loading is None
        words = f"shard {one.shard} {one.address}: has {held}"
        typer.echo(f"  {words if is_healthy else one.describe_missing(one.failed or 0)}")


def deliver(
    source: SourceArgument,
    address: AddressOption = None,
    min_ready: Annotated[
        int | None,
        typer.Option(
            "--min-ready", min=1, help="Replicas of each shard that must hold a version; default: all but one."
        ),
    ] = None,
    poll_s: Annotated[float | None, typer.Option("--poll", min=0.01, help="Seconds between two checks.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Reconcile once, then exit.")] = False,
    token: TokenOption = "",
    tls_ca: CaOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Roll out new versions: wait until enough replicas have loaded a version, then offer it on all shards."""
    from elasticrec.publish.rollout.deliver import Delivery
    from elasticrec.publish.rollout.known_store import RecordingReplicas
    from elasticrec.publish.rollout.replicas import StoreReplicas

    found = _open_model(source, "deliver", insecure)
    addresses = _check_given(_addresses(found.cube, address))
    security = _client_security(found.cube, addresses, token, insecure, tls_ca)
    replicas = StoreReplicas(found.repository.name, addresses, security)
    min_ready = min_ready or found.cube.min_ready
    log_to_stderr(stamped=True)
    recording = RecordingReplicas(found.repository, replicas, min_ready, logger.info)
    pause_s = None if once else poll_s or found.cube.poll_s
    delivery = Delivery(found.repository, recording, found.gate, logger.info, min_ready, pause_s)
    if once:
        delivery.step()
        return
    stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: stop.set())
    delivery.run(stop.wait)


@models_app.command()
def rollback(
    model: ThisVersionArgument,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, help="Seconds to wait for a store that must load the version first.")
    ] = 600.0,
    token: TokenOption = "",
    tls_ca: CaOption = None,
    insecure: InsecureOption = False,
) -> None:
    """Serve an older version and hold it: no newer version is offered until `models resume`.

    With a store, the version is offered once the store has loaded it: at once if it is still loaded.
    """
    from elasticrec.config.publish import Cube
    from elasticrec.publish.rollout.known_store import read_known_store
    from elasticrec.publish.rollout.replicas import StoreReplicas
    from elasticrec.publish.rollout.rollback import Rollback

    repository, number = this_version(model, "rollback", insecure=insecure)
    before = repository.current()
    if store := read_known_store(repository):
        security = _client_security(Cube(), store.shards, token, insecure, tls_ca)
        replicas = StoreReplicas(repository.name, store.shards, security)
        store_rollback = Rollback(repository, replicas, store.min_ready, lambda text: typer.echo(text, err=True))
        current = store_rollback.to(number, wait_s)
    else:
        current = repository.rollback(number)
    typer.echo(
        f"{repository.location}: from version {before} to {current.version}, generation {current.generation}; "
        f"held until `elasticrec models resume {repository.location}`"
    )


def _open(source: str, insecure: bool) -> _Source:
    from elasticrec.config.publish import Cube, Gate
    from elasticrec.repository.find import open_model
    from elasticrec.repository.repository import Repository

    if source.endswith((".yaml", ".yml")):
        from elasticrec.config import load_job

        job = load_job(Path(source))
        allowed = insecure or job.cube.insecure
        repository = Repository.open(job.publish.repository, job.publish.model, insecure=allowed)
        return _Source(repository, job.cube, job.publish.gate)
    reference = open_model(source, insecure=insecure)
    return _Source(reference.repository, Cube(), Gate(), reference.number)


def _open_model(source: str, command: str, insecure: bool) -> _Source:
    """Open a model; refuse a single version, because a store follows all versions."""
    from elasticrec.errors import ConfigError

    found = _open(source, insecure)
    if found.version is not None:
        raise ConfigError(
            f"{command}: expected a model, got its version {found.version}: `{source}`; "
            "to serve that version, use `elasticrec models rollback`"
        )
    return found


def _client_security(
    cube: "Cube", addresses: list[list[str]], token: str, insecure: bool, ca: Path | None
) -> "Security":
    security = store_security(cube, token, insecure, ca=ca)
    check_addresses(security, addresses)
    return security


def _shard(text: str) -> tuple[int, int]:
    from elasticrec.errors import ConfigError

    match = _SHARD.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--shard: expected the index and the number of shards, such as 0/2, got `{text}`")
    return int(match[1]), int(match[2])


def _addresses(cube: "Cube", given: list[str] | None) -> list[list[str]]:
    from elasticrec.errors import ConfigError

    if not given:
        return [list(replicas) for replicas in cube.addresses]
    shards = [[one.strip() for one in shard.split(",")] for shard in given]
    for address in (address for shard in shards for address in shard):
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ConfigError(f"--address: expected an address such as 10.0.0.7:8600, got `{address}`")
    return shards


def _check_given(addresses: list[list[str]]) -> list[list[str]]:
    from elasticrec.errors import ConfigError

    if not addresses:
        raise ConfigError("cube: expected --address for each shard, or a job file with `cube.addresses`")
    return addresses
