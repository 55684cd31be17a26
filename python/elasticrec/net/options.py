"""Command-line options for TLS, each with its environment variable."""

from pathlib import Path
from typing import Annotated

import typer

from elasticrec.net import environment

CertOption = Annotated[
    Path | None, typer.Option("--tls-cert", envvar=environment.TLS_CERT, help="PEM file of this process's certificate.")
]
KeyOption = Annotated[
    Path | None, typer.Option("--tls-key", envvar=environment.TLS_KEY, help="PEM file of the certificate's key.")
]
CaOption = Annotated[
    Path | None, typer.Option("--tls-ca", envvar=environment.TLS_CA, help="PEM file of the authorities to trust.")
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure",
        envvar=environment.INSECURE,
        help="Allow connections with other machines without TLS and without a token.",
    ),
]
