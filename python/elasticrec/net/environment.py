"""The environment variables from which a role knows its place; each is a flag of its command too."""

import os
from pathlib import Path

RUN = "ELASTICREC_RUN"
COORDINATOR = "ELASTICREC_COORDINATOR"
TOKEN = "ELASTICREC_TOKEN"
INDEX = "ELASTICREC_INDEX"
HOST = "ELASTICREC_HOST"
PORT = "ELASTICREC_PORT"
ADVERTISE = "ELASTICREC_ADVERTISE"
TLS_CERT = "ELASTICREC_TLS_CERT"
TLS_KEY = "ELASTICREC_TLS_KEY"
TLS_CA = "ELASTICREC_TLS_CA"
INSECURE = "ELASTICREC_INSECURE"
WAIT = "ELASTICREC_WAIT"
METRICS_PORT = "ELASTICREC_METRICS_PORT"
THREADS = "ELASTICREC_THREADS"
NAME = "ELASTICREC_NAME"
PARENT = "ELASTICREC_PARENT"

_OF_A_ROLE = (
    RUN, COORDINATOR, TOKEN, INDEX, HOST, PORT, ADVERTISE, TLS_CERT, TLS_KEY, TLS_CA, INSECURE, WAIT, METRICS_PORT,
    THREADS, NAME, PARENT,
)  # fmt: skip


def tls_files() -> dict[str, Path | None]:
    """The files of TLS that this process was told of."""
    names = {"cert": TLS_CERT, "key": TLS_KEY, "ca": TLS_CA}
    return {file: Path(found) if (found := os.environ.get(name)) else None for file, name in names.items()}


def with_roles_of(told: dict[str, str | Path | None]) -> dict[str, str]:
    """This process's environment for a role that is told exactly this, whatever this process was told."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_ROLE}
    return kept | {name: str(value) for name, value in told.items() if value is not None}
