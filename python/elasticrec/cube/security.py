"""Token and TLS of a store: what was given goes before what the job says."""

from collections.abc import Sequence
from pathlib import Path

from elasticrec.config.publish import Cube
from elasticrec.coordinator.security import Security


def store_security(cube: Cube, token: str = "", insecure: bool = False, **given: Path | None) -> Security:
    """For a process of the store, or for whoever asks one; `given` names the files that it needs."""
    of_job = cube.tls.model_dump()
    files = {name: path or (Path(of_job[name]) if of_job[name] else None) for name, path in given.items()}
    secret = token or (cube.token.reveal_token() if cube.token else None)
    return Security(secret or None, **files, insecure=insecure or cube.insecure)


def check_addresses(security: Security, addresses: Sequence[Sequence[str]]) -> None:
    """Before anything is sent: no token goes to another machine in clear, unless that is wanted."""
    for shard, replicas in enumerate(addresses):
        for address in replicas:
            host = address.rpartition(":")[0].strip("[]")
            security.check_send(f"cube shard {shard} at {address}", host, encrypted=security.ca is not None)
