"""Token and TLS of a process: connections with other machines need both, unless `insecure` is set."""

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.config.fields import is_loopback
from elasticrec.config.publish import Cube, host_of
from elasticrec.config.train import Tls
from elasticrec.errors import ConfigError
from elasticrec.net import environment

# Servers refuse a hello with a longer token.
_MAX_TOKEN = 1024


@dataclass(frozen=True)
class Security:
    """The token and the TLS files of a process, and whether it may do without them."""

    token: str | None = field(default=None, repr=False)
    cert: Path | None = None
    """PEM file of the certificate for the sockets it listens on."""
    key: Path | None = None
    """PEM file of the certificate's key."""
    ca: Path | None = None
    """PEM file of the authorities that it trusts when it connects."""
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            raise ConfigError("tls: expected a certificate and its key, got one of them")
        for path in (self.cert, self.key, self.ca):
            if path is not None and not path.is_file():
                raise ConfigError(f"tls: {path}: {'not a file' if path.exists() else 'no such file'}")
        token = self.token or ""
        if len(token) > _MAX_TOKEN or not all("!" <= character <= "~" for character in token):
            raise ConfigError(f"token: expected at most {_MAX_TOKEN} visible ASCII characters, got something else")

    @classmethod
    def of(cls, job: Job, token: str, given: dict[str, Path | None], insecure: bool = False) -> "Security":
        """Return the security of a role; `given` has the files that it needs (see `_tls_files`)."""
        files = _tls_files(job.train.ps.tls, given)
        return cls(token or None, **files, insecure=insecure or job.train.ps.insecure)

    def wire_tls(self) -> _core.PsTls:
        """Return the TLS settings for the binary protocols; raise for files that cannot be used."""
        return _core.PsTls(cert=self.cert, key=self.key, ca=self.ca)

    def check_listen(self, role: str, host: str) -> None:
        """Refuse to listen beyond this machine without a token and TLS, unless `insecure` is set."""
        if is_loopback(host) or self.insecure or (self.token and self.cert):
            return
        missing = " and ".join(name for name, has in (("a token", self.token), ("TLS", self.cert)) if not has)
        raise ConfigError(
            f"{role}: host: {host} is reachable from other machines: expected {missing}, `insecure: true`, or 127.0.0.1"
        )

    def check_send(self, target: str, host: str, *, encrypted: bool) -> None:
        """Refuse to send the token to another machine in clear text, unless `insecure` is set."""
        if self.token and not (encrypted or self.insecure or is_loopback(host)):
            raise ConfigError(
                f"{target}: the token would go to another machine in clear text: expected TLS, or `insecure: true`"
            )


def _tls_files(settings: Tls, given: Mapping[str, Path | None]) -> dict[str, Path | None]:
    """Return the TLS files of a process: those in `given`, or the job's for those that are None there.

    A file that `given` does not name is not needed, and may be missing on this machine.
    """
    of_job = settings.model_dump()
    return {name: path or (Path(of_job[name]) if of_job[name] else None) for name, path in given.items()}


def has_token(authorization: str, token: str) -> bool:
    """Return whether the `Authorization` header of a request contains the token."""
    # Compare in constant time, so that the duration reveals nothing about the token.
    return hmac.compare_digest(authorization.encode("utf-8", "replace"), f"Bearer {token}".encode())


def local_security(job: Job, token: str) -> Security:
    """Return the security of a run whose roles are all on this machine, with TLS if the job or environment has it."""
    security = Security.of(job, token, environment.tls_files())
    if (security.cert is None) != (security.ca is None):
        raise ConfigError("tls: expected a certificate, its key and the `ca` that signed it, got some of them")
    return security


def store_security(cube: Cube, token: str = "", insecure: bool = False, **given: Path | None) -> Security:
    """Return the security of a store process or client; `given` has the files that it needs (see `_tls_files`)."""
    files = _tls_files(cube.tls, given)
    secret = token or (cube.token.reveal_token() if cube.token else None)
    return Security(secret or None, **files, insecure=insecure or cube.insecure)


def check_addresses(security: Security, addresses: Sequence[Sequence[str]], kind: str = "cube") -> None:
    """Refuse to send the token in clear text to a server on another machine, unless `insecure` is set.

    `addresses` has the replicas of each shard.
    """
    for shard, replicas in enumerate(addresses):
        for address in replicas:
            target = f"{kind} shard {shard} at {address}"
            security.check_send(target, host_of(address), encrypted=security.ca is not None)
