"""Where the coordinator of a run listens: a file in the run's directory, for commands that ask a running job."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticrec.durable import write_atomically
from elasticrec.errors import ModelError

_NAME = "address.json"


@dataclass(frozen=True)
class Address:
    """What it takes to ask a coordinator."""

    url: str
    token: str | None = None


def write_address(run: Path, address: Address) -> None:
    """Write it down; only the user who trains may read the token."""
    write_atomically(run / "coordinator" / _NAME, json.dumps(asdict(address)).encode(), mode=0o600)


def remove_address(run: Path) -> None:
    """After the end; a coordinator that was killed leaves it, and nobody answers there."""
    (run / "coordinator" / _NAME).unlink(missing_ok=True)


def read_address(run: Path) -> Address | None:
    """The address that was written down last, or none."""
    path = run / "coordinator" / _NAME
    try:
        found = json.loads(path.read_bytes())
        url, token = found["url"], found["token"]
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError):
        raise ModelError(f"{path}: not the address of a coordinator") from None
    if not isinstance(url, str) or not (token is None or isinstance(token, str)):
        raise ModelError(f"{path}: not the address of a coordinator")
    return Address(url, token)
