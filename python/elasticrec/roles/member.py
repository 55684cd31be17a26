"""Membership of a role process: its options, how it joins a run and how it leaves."""

import os
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from elasticrec.config.fields import show
from elasticrec.errors import ConfigError
from elasticrec.net.coordinator import CoordinatorClient, Term
from elasticrec.net.messages import Figures, Registration, RegistrationDelay
from elasticrec.net.security import Security
from elasticrec.net.server import bind, join_host_port

AnyRegistration = TypeVar("AnyRegistration", bound=Registration)

# A host name, an IPv4 or an IPv6 address.
_HOST = re.compile(r"[A-Za-z0-9_.:-]{1,253}")
_RETRY_S = 0.2
# Timeout of the last requests of a process that shuts down.
_LAST_REQUESTS_S = 2.0


@dataclass(frozen=True)
class RoleOptions:
    """The options that a role process is started with."""

    run: Path
    coordinator: str
    security: Security = field(default_factory=Security)
    index: int | None = None
    wait_s: float = 60.0
    """Seconds to wait for a coordinator that does not answer."""
    metrics_port: int = 0
    name: str = ""
    """The name of this process and of its log, given by the launcher."""

    def figures(self) -> Figures:
        """Figures that every role reports."""
        return {"pid": os.getpid(), **({"name": self.name} if self.name else {})}

    def check(self) -> None:
        """Raise `ConfigError` for unusable options, before anything slow."""
        self.client().close()
        self.security.wire_tls()

    def client(self, term: Term | None = None) -> CoordinatorClient:
        """Return a connection to the coordinator for one thread; threads of a role share the term."""
        return CoordinatorClient(self.coordinator, security=self.security, term=term, deadline_s=self.wait_s)


@dataclass(frozen=True)
class ListenAddress:
    """The address that a server listens on, and the host that it announces."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None

    def check(self, security: Security) -> None:
        """Refuse an address that is unsafe, taken, or unreachable for other processes."""
        security.check_listen("ps", self.host)
        if self.advertise is None and self.host in ("0.0.0.0", "::", ""):
            raise ConfigError(
                f"ps: host: {self.host or 'none'} is not an address that other processes can connect to: "
                "expected the name or address of this machine as `--advertise`"
            )
        if self.advertise is not None and not _HOST.fullmatch(self.advertise):
            raise ConfigError(f"ps: advertise: expected a host name or an address, got {show(self.advertise)}")
        # Fail before the process joins the run; the server binds again once it has its rows.
        bind("ps", self.host, self.port).close()

    @property
    def address(self) -> str:
        """The address to listen on."""
        return join_host_port(self.host, self.port)

    def announced_address(self, address: str) -> str:
        """Return the address that other processes connect to, for a server that listens on `address`."""
        if self.advertise is None:
            return address
        return join_host_port(self.advertise, address.rpartition(":")[2])


class Shutdown(Exception):  # noqa: N818 - not an error
    """The process was asked to shut down and has reached a point where it can."""


class ShutdownRequest:
    """A request to shut down this process; pending requests to the coordinator then time out soon."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._clients: list[CoordinatorClient] = []

    def watch(self, client: CoordinatorClient) -> CoordinatorClient:
        """Shorten the timeout of this client when the process is asked to shut down."""
        self._clients.append(client)
        return client

    def request(self) -> None:
        """Ask the process to shut down; called from a signal handler or another thread."""
        self._event.set()
        for client in self._clients:
            client.deadline_s = min(client.deadline_s, _LAST_REQUESTS_S)

    def is_requested(self) -> bool:
        """Whether the process was asked to shut down."""
        return self._event.is_set()

    def check(self) -> None:
        """Raise `Shutdown` if it was requested."""
        if self._event.is_set():
            raise Shutdown

    def wait(self, seconds: float) -> None:
        """Wait for this time, or until a shutdown is requested."""
        self._event.wait(seconds)


def join(register: Callable[[str], AnyRegistration | RegistrationDelay], shutdown: ShutdownRequest) -> AnyRegistration:
    """Register as a new member with a random nonce; wait while all indexes of the role are taken."""
    nonce = secrets.token_hex(8)
    while True:
        answer = register(nonce)
        if answer["incarnation"] is not None:
            return cast(AnyRegistration, answer)
        shutdown.check()
        # The current holder of the index may leave before its lease ends.
        shutdown.wait(min(cast(RegistrationDelay, answer)["wait_s"], _RETRY_S))
