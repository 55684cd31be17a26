"""A role's place in a run: what it is told when it is started, and how it joins."""

import os
import re
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticrec.config.fields import show
from elasticrec.coordinator.client import CoordinatorClient, Term
from elasticrec.coordinator.security import Security
from elasticrec.errors import ConfigError
from elasticrec.web import bind

Answer = dict[str, Any]

# Of a name, an IPv4 or an IPv6 address.
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}")
_ASK_AGAIN_S = 0.2
# Of a process that leaves, for the coordinator to answer.
_LAST_WORDS_S = 2.0


@dataclass(frozen=True)
class RoleOptions:
    """What a role is told when it is started."""

    run: Path
    coordinator: str
    security: Security = field(default_factory=Security)
    index: int | None = None
    wait_s: float = 60.0
    """How long a coordinator that does not answer is waited for."""
    metrics_port: int = 0
    name: str = ""
    """How whoever started it calls it, and its log."""

    def figures(self) -> Answer:
        """What every role tells of itself."""
        return {"pid": os.getpid(), **({"name": self.name} if self.name else {})}

    def check(self) -> None:
        """Refuse what cannot work, before anything that takes long."""
        self.client().close()
        self.security.wire()

    def client(self, term: Term | None = None) -> CoordinatorClient:
        """A connection to the coordinator, for one thread; all of a role share a term."""
        return CoordinatorClient(self.coordinator, security=self.security, term=term, deadline_s=self.wait_s)


@dataclass(frozen=True)
class Listening:
    """Where a server listens, and what others are told of it."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None

    def check(self, security: Security) -> None:
        """Refuse a place that is not safe, taken, or of no use to others."""
        security.check_listen("ps", self.host)
        if self.advertise is None and self.host in ("0.0.0.0", "::", ""):
            raise ConfigError(
                f"ps: host: {self.host or 'none'} is no address to connect to: "
                "expected the name or address of this machine as `--advertise`"
            )
        if self.advertise is not None and not _HOST.fullmatch(self.advertise):
            raise ConfigError(f"ps: advertise: expected a host name or an address, got {show(self.advertise)}")
        # before a place in the run is taken; the server binds it again when it has its rows
        bind("ps", self.host, self.port).close()

    @property
    def address(self) -> str:
        """To listen on."""
        return f"{_in_brackets(self.host)}:{self.port}"

    def announced(self, address: str) -> str:
        """What others connect to, for a server that listens on `address`."""
        if self.advertise is None:
            return address
        return f"{_in_brackets(self.advertise)}:{address.rpartition(':')[2]}"


def _in_brackets(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class Left(Exception):  # noqa: N818 - not an error
    """The process was told to go, and is not in the middle of anything."""


class Leaving:
    """Whether the process was told to go; requests that wait for the coordinator then soon give up."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._clients: list[CoordinatorClient] = []

    def watch(self, client: CoordinatorClient) -> CoordinatorClient:
        """A client that shall not hold the process up."""
        self._clients.append(client)
        return client

    def ask(self) -> None:
        """Tell it to go; from a signal or another thread."""
        self._event.set()
        for client in self._clients:
            client.deadline_s = min(client.deadline_s, _LAST_WORDS_S)

    def is_asked(self) -> bool:
        """Whether it was told."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise `Left` if it was told."""
        if self._event.is_set():
            raise Left

    def wait(self, seconds: float) -> None:
        """So long, or until it is told."""
        self._event.wait(seconds)


def join(client: CoordinatorClient, role: str, index: int | None, leaving: Leaving, **more: Any) -> Answer:
    """Register as a new member, and wait for a place if all are taken."""
    nonce = secrets.token_hex(8)
    while True:
        answer = client.register(role, nonce, index=index, **more)
        if answer["incarnation"] is not None:
            return answer
        leaving.check()
        # who has the place may say that it leaves
        leaving.wait(min(answer["wait_s"], _ASK_AGAIN_S))
