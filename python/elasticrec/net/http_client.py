"""The HTTP client of ElasticREC's processes: TLS, the token, timeouts, and uniform error messages.

It serves the coordinator's client, repositories behind a URL, and notifications of store processes. Prediction clients
have their own (`serving/protocol.py`): the threaded and the asyncio client share one state machine (docs/adr/0011).
"""

import http.client
import random
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import urllib3
from urllib3 import exceptions

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.security import Security
from elasticrec.net.tls import TlsError, client_context, speaks_tls, tls_problem


@dataclass(frozen=True)
class HttpResponse:
    """A complete response."""

    status: int
    reason: str
    headers: Mapping[str, str]
    """Names are compared without regard to case."""
    content: bytes


class HttpClient:
    """One keep-alive connection to one server, for one thread at a time."""

    def __init__(self, url: str, *, name: str, security: Security, timeout_s: float) -> None:
        """`name` is the server's name in errors, such as `coordinator at 127.0.0.1:7160`."""
        parts = urlsplit(url)
        self.name = name
        self.host, self._port = parts.hostname or "", parts.port
        self._is_https = parts.scheme == "https"
        security.check_send(name, self.host, encrypted=self._is_https)
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {security.token}"} if security.token else {}
        self._has_answered = False
        self._context = client_context(security.ca) if self._is_https else None
        self._pool = self._new_pool()

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        if self._context is None:
            return urllib3.HTTPConnectionPool(self.host, self._port)
        return urllib3.HTTPSConnectionPool(self.host, self._port, ssl_context=self._context)

    def request(
        self,
        method: str,
        target: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> HttpResponse:
        """Send one request and return the response; `body` is bytes or a file.

        Raise `UnavailableError` if there is no response, and `TlsError` if another attempt would fail the same way.
        """
        seconds = self._timeout_s if timeout_s is None else timeout_s
        try:
            response = self._pool.urlopen(
                method,
                target,
                body,
                {**self._headers, **(headers or {})},
                retries=False,
                redirect=False,
                timeout=urllib3.Timeout(connect=seconds, read=seconds),
            )
        except (exceptions.HTTPError, OSError) as error:
            cause = _cause(error)
            if problem := self._tls_mismatch(cause):
                raise TlsError(f"{self.name}: {problem}") from None
            raise UnavailableError(f"{self.name} did not answer: {str(cause) or type(cause).__name__}") from None
        self._has_answered = True
        return HttpResponse(response.status, response.reason or "", response.headers, response.data)

    def _tls_mismatch(self, cause: BaseException) -> str | None:
        """Return the problem if only one end uses TLS or the certificate is not accepted, else None."""
        if isinstance(cause, ssl.SSLError):
            return tls_problem(cause, self.host)
        is_closed = isinstance(cause, ConnectionResetError | BrokenPipeError | http.client.BadStatusLine)
        if is_closed and not self._is_https and not self._has_answered and speaks_tls(self.host, self._port or 80):
            return "it speaks TLS: expected https://, got http://"
        return None

    def reconnect(self) -> None:
        """Use a new connection for the next request."""
        self._pool.close()
        self._pool = self._new_pool()

    def close(self) -> None:
        """Close the connection."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_url(name: str, url: str, example: str) -> None:
    """Refuse anything but an http or https URL with a host and a port."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port is not None:
            return
    except ValueError:
        pass
    raise ConfigError(f"{name}: expected a URL such as {example}, got `{url}`")


def _cause(error: BaseException) -> BaseException:
    """Return the error of the socket, of TLS or of HTTP that urllib3 wrapped."""
    if isinstance(error, exceptions.NewConnectionError):
        return error.__cause__ or error
    if isinstance(error, exceptions.TimeoutError):
        return TimeoutError("timed out")
    return next((one for one in reversed(error.args) if isinstance(one, BaseException)), error)


class Backoff:
    """Pauses between attempts: they double up to `longest_s`, with jitter so that peers do not retry in step."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._pause_s, self._longest_s = first_s, longest_s

    def next_pause_s(self) -> float:
        """Return how long to wait before the next attempt."""
        self._pause_s = min(self._pause_s * 2, self._longest_s) * random.uniform(0.5, 1.0)
        return self._pause_s
