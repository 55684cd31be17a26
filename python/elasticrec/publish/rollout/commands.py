"""`elasticrec deliver`, `elasticrec cube status` and `elasticrec models rollback`: versions of an online store."""

import json
import threading
from typing import Annotated

import typer

from elasticrec.machine import on_stop_signal
from elasticrec.net.logs import forward_logs, log_to_stderr
from elasticrec.net.options import CaOption, InsecureOption
from elasticrec.repository.commands import NamedVersionArgument, resolve_version
from elasticrec.repository.store_source import (
    AddressOption,
    SourceArgument,
    TokenOption,
    client_security,
    open_followed_model,
    required_addresses,
)


def add_rollout(app: typer.Typer, models_app: typer.Typer, cube_app: typer.Typer) -> None:
    """Add the commands to the command line and to its groups `models` and `cube`."""
    app.command()(deliver)
    models_app.command()(rollback)
    cube_app.command()(status)


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

    found = open_followed_model(source, "deliver", insecure)
    addresses = required_addresses(found.cube, address)
    security = client_security(found.cube, addresses, token, insecure, tls_ca)
    replicas = StoreReplicas(found.repository.name, addresses, security)
    min_ready = min_ready or found.cube.min_ready
    log_to_stderr(stamped=True)
    recording = RecordingReplicas(found.repository, replicas, min_ready)
    pause_s = None if once else poll_s or found.cube.poll_s
    delivery = Delivery(found.repository, recording, found.gate, min_ready, pause_s)
    if once:
        delivery.step()
        return
    stop = threading.Event()
    on_stop_signal(stop.set)
    delivery.run(stop.wait)


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

    found = open_followed_model(source, "cube status", insecure)
    addresses = required_addresses(found.cube, address)
    security = client_security(found.cube, addresses, token, insecure, tls_ca)
    replicas = StoreReplicas(found.repository.name, addresses, security)
    log_to_stderr(stamped=True)
    decision, shards = Delivery(found.repository, replicas, found.gate, found.cube.min_ready).preview()
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


def rollback(
    model: NamedVersionArgument,
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

    repository, number = resolve_version(model, "rollback", insecure=insecure)
    before = repository.current()
    if store := read_known_store(repository):
        security = client_security(Cube(), store.shards, token, insecure, tls_ca)
        replicas = StoreReplicas(repository.name, store.shards, security)
        with forward_logs(lambda text: typer.echo(text, err=True)):
            current = Rollback(repository, replicas, store.min_ready).roll_back(number, wait_s)
    else:
        current = repository.rollback(number)
    typer.echo(
        f"{repository.location}: from version {before} to {current.version}, generation {current.generation}; "
        f"held until `elasticrec models resume {repository.location}`"
    )
