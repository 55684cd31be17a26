"""Certificate authorities and certificates, generated during the tests."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Files:
    """PEM files of an authority and of a server certificate that it signed."""

    cert: Path
    key: Path
    ca: Path

    def environment(self) -> dict[str, str]:
        """Return the environment variables that give the files to a role."""
        names = {"CERT": self.cert, "KEY": self.key, "CA": self.ca}
        return {f"ELASTICREC_TLS_{name}": str(path) for name, path in names.items()}


def write_certificates(
    directory: Path, host: str = "127.0.0.1", *, not_after: datetime.datetime | None = None
) -> Files:
    """Write a new authority and a certificate for `host`."""
    directory.mkdir(parents=True, exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert(host, not_after=not_after)
    files = Files(directory / "cert.pem", directory / "key.pem", directory / "ca.pem")
    authority.cert_pem.write_to_path(files.ca)
    issued.private_key_pem.write_to_path(files.key)
    for number, certificate in enumerate(issued.cert_chain_pems):
        certificate.write_to_path(files.cert, append=number > 0)
    return files
