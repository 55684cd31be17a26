"""The address of a run's coordinator: a file in the run's directory, for commands that query a running job."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticrec.durable import write_atomically
from elasticrec.errors import ModelError

_NAME = "address.json"


@dataclass(frozen=True)
class Address:
    """URL and token of a coordinator."""

    url: str
    token: str | None = None


def write_address(run: Path, address: Address) -> None:
    """Write the address; only the user of the training may read the token."""
    write_atomically(run / "coordinator" / _NAME, json.dumps(asdict(address)).encode(), mode=0o600)


def remove_address(run: Path) -> None:
    """Remove the address when the coordinator ends; a killed coordinator leaves its address behind."""
    (run / "coordinator" / _NAME).unlink(missing_ok=True)


def read_address(run: Path) -> Address | None:
    """Return the address that the last coordinator wrote, or None."""
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
