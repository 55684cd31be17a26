"""What keeps others out: a token and TLS, and the rule that nothing goes beyond this machine without both."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticrec import _core
from elasticrec.config import Job
from elasticrec.config.fields import is_loopback
from elasticrec.config.publish import Cube
from elasticrec.errors import ConfigError
from elasticrec.net import environment

# A server takes no longer hello.
_MAX_TOKEN = 1024


@dataclass(frozen=True)
class Security:
    """What a role shows, whom it trusts, and whether it may do without."""

    token: str | None = field(default=None, repr=False)
    cert: Path | None = None
    """PEM files: what it shows where it listens, and the key of that;"""
    key: Path | None = None
    ca: Path | None = None
    """and the authorities it trusts where it connects."""
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
        """From what a role was given; a file that it needs and was not given is the one that its job names.

        Keys that `given` does not have are not needed: the role may run where those files are not.
        """
        tls = job.train.ps.tls.model_dump()
        files = {name: path or (Path(tls[name]) if tls[name] else None) for name, path in given.items()}
        return cls(token or None, **files, insecure=insecure or job.train.ps.insecure)

    def wire(self) -> _core.PsTls:
        """The same for the wire between trainers and servers, read now: files that are of no use are told here."""
        return _core.PsTls(cert=self.cert, key=self.key, ca=self.ca)

    def check_listen(self, role: str, host: str) -> None:
        """Beyond this machine nothing listens without a token and TLS, unless that is wanted."""
        if is_loopback(host) or self.insecure or (self.token and self.cert):
            return
        missing = " and ".join(name for name, has in (("a token", self.token), ("TLS", self.cert)) if not has)
        raise ConfigError(f"{role}: host: {host} is open to others: expected {missing}, `insecure: true`, or 127.0.0.1")

    def check_send(self, target: str, host: str, *, encrypted: bool) -> None:
        """To another machine no token goes in clear, unless that is wanted."""
        if self.token and not (encrypted or self.insecure or is_loopback(host)):
            raise ConfigError(
                f"{target}: the token would go to another machine in clear text: expected TLS, or `insecure: true`"
            )


def local_security(job: Job, token: str) -> Security:
    """What roles on this machine alone have: TLS where the environment or the job says so."""
    security = Security.of(job, token, environment.tls_files())
    if (security.cert is None) != (security.ca is None):
        raise ConfigError("tls: expected a certificate, its key and the `ca` that signed it, got some of them")
    return security


def store_security(cube: Cube, token: str = "", insecure: bool = False, **given: Path | None) -> Security:
    """Return the security of a store process or client; `given` names the files it needs and overrides the job."""
    of_job = cube.tls.model_dump()
    files = {name: path or (Path(of_job[name]) if of_job[name] else None) for name, path in given.items()}
    secret = token or (cube.token.reveal_token() if cube.token else None)
    return Security(secret or None, **files, insecure=insecure or cube.insecure)


def check_addresses(security: Security, addresses: Sequence[Sequence[str]]) -> None:
    """Refuse to send the token in clear text to a replica on another machine, unless `insecure` is set."""
    for shard, replicas in enumerate(addresses):
        for address in replicas:
            host = address.rpartition(":")[0].strip("[]")
            security.check_send(f"cube shard {shard} at {address}", host, encrypted=security.ca is not None)
