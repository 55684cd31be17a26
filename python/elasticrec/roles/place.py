"""A role's place in a run: what it is told when it is started, and how it joins."""

import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.coordinator.client import CoordinatorClient

Answer = dict[str, Any]


@dataclass(frozen=True)
class RoleOptions:
    """What a role is told when it is started."""

    run: Path
    coordinator: str
    token: str = ""
    index: int | None = None
    host: str = "127.0.0.1"

    def client(self) -> CoordinatorClient:
        """A connection to the coordinator, for one thread."""
        return CoordinatorClient(self.coordinator, token=self.token or None)


def join(client: CoordinatorClient, role: str, index: int | None, **more: Any) -> Answer:
    """Register as a new member, and wait for a place if all are taken."""
    nonce = secrets.token_hex(8)
    while True:
        answer = client.register(role, nonce, index=index, **more)
        if answer["incarnation"] is not None:
            return answer
        time.sleep(answer["wait_s"])
