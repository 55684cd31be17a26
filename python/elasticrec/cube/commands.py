"""`elasticrec cube serve | get`: a process of the online store, and a lookup of rows."""

import logging
import re
from pathlib import Path
from typing import Annotated

import typer

from elasticrec.machine import allow_many_files, on_stop_signal
from elasticrec.net import environment
from elasticrec.net.logs import log_to_stderr
from elasticrec.net.options import CaOption, CertOption, InsecureOption, KeyOption
from elasticrec.net.security import store_security
from elasticrec.repository.store_source import (
    AddressOption,
    SourceArgument,
    TokenOption,
    client_security,
    open_followed_model,
    open_source,
    store_addresses,
)

cube_app = typer.Typer(help="Serve the rows of published models, and look rows up.", rich_markup_mode=None)

logger = logging.getLogger(__name__)

_SHARD = re.compile(r"([0-9]{1,5})/([0-9]{1,5})")


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

    found = open_followed_model(source, "cube serve", insecure)
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
    on_stop_signal(node.stop)
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

    found = open_source(source, insecure)
    addresses = store_addresses(found.cube, address)
    security = client_security(found.cube, addresses, token, insecure, tls_ca)
    if version is not None and found.version not in (None, version):
        raise ConfigError(f"--version: expected {found.version}, as in `{source}`, got {version}")
    rows = rows_of(found.repository, signs, version or found.version, addresses, security)
    for line in rows.json_lines() if as_json else rows.lines():
        typer.echo(line)


def _shard(text: str) -> tuple[int, int]:
    from elasticrec.errors import ConfigError

    match = _SHARD.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--shard: expected the index and the number of shards, such as 0/2, got `{text}`")
    return int(match[1]), int(match[2])
