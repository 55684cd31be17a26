"""The base of both clients: their settings, and errors of their connections."""

import os
import re
import ssl
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from elasticrec.errors import ConfigError
from elasticrec.net.tls import tls_problem
from elasticrec.serving.calls import Calls
from elasticrec.serving.protocol import BrokenConnectionError, Exchange

TIMEOUT_S = 30.0
RETRIES = 2
CONNECTIONS = 32

C = TypeVar("C")

_NUMBER = re.compile(r"\[Errno (\d+)\]")


class BaseClient(ABC, Generic[C]):
    """The settings of a client, and its connections."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        ca: str | Path | None = None,
        connections: int = CONNECTIONS,
    ) -> None:
        """Create a client; nothing is sent before the first call. `model` may be omitted if the server has one model.

        `timeout_s` limits a whole call. An unreachable or busy server is retried up to `retries` times. `ca` is a PEM
        file with the authorities to trust instead of the system's. At most `connections` calls run at the same time.
        """
        if not isinstance(connections, int) or connections < 1:
            raise ConfigError(f"connections: expected a whole number of at least 1, got {connections!r}")
        self._calls = Calls(url, model, token=token, timeout_s=timeout_s, retries=retries, ca=ca)
        self._connections = self._make_connections(connections)

    @abstractmethod
    def _make_connections(self, limit: int) -> C:
        """Return an empty set of at most `limit` connections."""

    @property
    def where(self) -> str:
        """Host and port of the server."""
        return self._calls.where


def connection_error(
    error: OSError | BrokenConnectionError, exchange: Exchange, host: str
) -> BrokenConnectionError | TimeoutError:
    """Return the error of a failed connection, for the retry logic in `calls.py`."""
    # Timeouts of the operating system have an error number; without one the deadline has passed.
    if isinstance(error, TimeoutError) and error.errno is None:
        return error
    was_reused = exchange.num_answered > 0 and not exchange.has_received
    if isinstance(error, BrokenConnectionError):
        return BrokenConnectionError(str(error), was_reused=was_reused, is_final=error.is_final)
    if isinstance(error, ssl.SSLError) and (problem := tls_problem(error, host)):
        return BrokenConnectionError(problem, is_final=True)
    return BrokenConnectionError(_reason(error), was_reused=was_reused)


def _reason(error: OSError) -> str:
    """Return the operating system's text for an error; asyncio wraps it in text of its own."""
    number = error.errno if error.errno is not None else next(map(int, _NUMBER.findall(str(error))), None)
    text = os.strerror(number) if number is not None and number > 0 else error.strerror or str(error)
    text = text or type(error).__name__
    return f"{text[:1].lower()}{text[1:]}"
