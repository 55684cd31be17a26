"""Environment variables of role processes; each has an equivalent command-line option."""

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

_ROLE_VARIABLES = (
    RUN, COORDINATOR, TOKEN, INDEX, HOST, PORT, ADVERTISE, TLS_CERT, TLS_KEY, TLS_CA, INSECURE, WAIT, METRICS_PORT,
    THREADS, NAME, PARENT,
)  # fmt: skip


def tls_files() -> dict[str, Path | None]:
    """Return the TLS files that the environment of this process names."""
    names = {"cert": TLS_CERT, "key": TLS_KEY, "ca": TLS_CA}
    return {file: Path(found) if (found := os.environ.get(name)) else None for file, name in names.items()}


def with_role_variables(variables: dict[str, str | Path | None]) -> dict[str, str]:
    """Return the environment of this process with its role variables replaced by `variables`."""
    kept = {name: value for name, value in os.environ.items() if name not in _ROLE_VARIABLES}
    return kept | {name: str(value) for name, value in variables.items() if value is not None}
