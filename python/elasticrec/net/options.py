"""Options of all commands whose processes talk to others, each with the environment variable that stands for it."""

from pathlib import Path
from typing import Annotated

import typer

from elasticrec.net import environment

CertOption = Annotated[
    Path | None, typer.Option("--tls-cert", envvar=environment.TLS_CERT, help="PEM file of the certificate to show.")
]
KeyOption = Annotated[Path | None, typer.Option("--tls-key", envvar=environment.TLS_KEY, help="PEM file of its key.")]
CaOption = Annotated[
    Path | None, typer.Option("--tls-ca", envvar=environment.TLS_CA, help="PEM file of the authorities to trust.")
]
InsecureOption = Annotated[
    bool,
    typer.Option(
        "--insecure", envvar=environment.INSECURE, help="Talk to other machines without TLS, even without a token."
    ),
]
