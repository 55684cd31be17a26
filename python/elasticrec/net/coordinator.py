"""What shards and trainers ask the coordinator with: it may be away for a while, or be another one when it is back."""

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net import messages
from elasticrec.net.messages import FencedError, MovedError, SurplusError
from elasticrec.net.security import Security
from elasticrec.net.tls import client_context, speaks_tls, tls_problem

Answer = dict[str, Any]

# Pauses between attempts.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Term:
    """The highest term that a role has seen; all its clients share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0

    @property
    def value(self) -> int:
        """The term."""
        return self._value

    def accept(self, term: int) -> bool:
        """Whether an answer of this term counts."""
        with self._lock:
            if term < self._value:
                return False
            self._value = term
            return True


class CoordinatorClient:
    """One connection, for one thread at a time. Requests are sent again until `deadline_s` is over: all may be
    repeated."""

    def __init__(
        self,
        url: str,
        *,
        security: Security = Security(),
        term: Term | None = None,
        deadline_s: float = 60.0,
        attempt_s: float = 5.0,
    ) -> None:
        self.term = term or Term()
        self.deadline_s = deadline_s
        self._attempt_s = attempt_s
        self._connection, self._where = _connection(url, security)
        self._headers = {"Content-Type": "application/json"}
        if security.token:
            self._headers["Authorization"] = f"Bearer {security.token}"
        self.sent_at = 0.0
        """Monotonic time just before the request was sent that was answered last: leases run from here."""

    def register(self, role: str, nonce: str, **more: Any) -> Answer:
        """Ask for a place; `index` of a shard, `damaged` checkpoints. A place may be a time to wait."""
        return self._post("register", protocol=messages.PROTOCOL, role=role, nonce=nonce, **more)

    def heartbeat(self, incarnation: int, sequence: int, **more: Any) -> Answer:
        """Tell that it lives, and how it is."""
        return self._post("heartbeat", incarnation=incarnation, sequence=sequence, **more)

    def lease(self, incarnation: int, holds: list[int], *, waiting: bool = False) -> Answer:
        """Ask for a unit beside those that it has; `waiting` for the rest of a group."""
        return self._post("lease", incarnation=incarnation, holds=holds, waiting=waiting)

    def meet(self, incarnation: int, meeting: int) -> Answer:
        """Tell that it is at a meeting; `go` says whether all are."""
        return self._post("meet", incarnation=incarnation, meeting=meeting)

    def done(self, incarnation: int, unit: int) -> Answer:
        """Tell that all of a unit is pushed."""
        return self._post("done", incarnation=incarnation, unit=unit)

    def give_back(self, incarnation: int, unit: int) -> Answer:
        """Tell that it does not go on with a unit."""
        return self._post("give_back", incarnation=incarnation, unit=unit)

    def missing(self, incarnation: int, unit: int, why: str) -> Answer:
        """Tell that the data of a unit is gone."""
        return self._post("missing", incarnation=incarnation, unit=unit, why=why)

    def checkpoint(self) -> Answer:
        """Ask for a checkpoint."""
        return self._post("checkpoint")

    def scale(self, *, servers: int | None = None, trainers: int | None = None) -> Answer:
        """Ask for another number of servers or trainers."""
        return self._post("scale", servers=servers, trainers=trainers)

    def status(self) -> Answer:
        """All there is to see."""
        return self._until_answered(lambda timeout_s: self._ask("GET", "/v1/status", None, timeout_s))

    def _post(self, path: str, **body: Any) -> Answer:
        def attempt(timeout_s: float) -> Answer:
            content = json.dumps({"term": self.term.value, **body}).encode()
            return self._ask("POST", f"/v1/{path}", content, timeout_s)

        return self._until_answered(attempt)

    def _until_answered(self, attempt: Callable[[float], Answer]) -> Answer:
        start = time.monotonic()
        pause_s, attempts = _FIRST_PAUSE_S, 0
        while True:
            # looked at again each time: who has to stop shortens it
            end = start + self.deadline_s
            left_s = end - time.monotonic()
            attempts += 1
            try:
                return attempt(max(min(left_s, self._attempt_s), 0.001))
            except FencedError:
                raise
            except UnavailableError as error:
                self._connection.close()
                # roles that lost the same coordinator should not all come back at once
                pause_s = min(pause_s * 2, _LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
                if time.monotonic() + pause_s >= end:
                    raise UnavailableError(f"{error} ({attempts} attempts in {self.deadline_s:g} s)") from None
                time.sleep(pause_s)

    def _ask(self, method: str, path: str, body: bytes | None, timeout_s: float) -> Answer:
        sent_at = time.monotonic()
        try:
            status, content = self._send(method, path, body, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            problem = self._misunderstanding(error)
            if problem is None:
                raise UnavailableError(f"{self._where} did not answer: {error or type(error).__name__}") from None
            # one that has answered before may be on its way back with the right certificate
            kind = UnavailableError if self.term.value else ConfigError
            raise kind(f"{self._where}: {problem}") from None
        answer = self._check(path, content)
        reason = f"{self._where}: {answer.get('error') or 'no reason given'}"
        if status == http.client.CONFLICT:
            raise MovedError(reason) if answer.get("moved") else FencedError(reason)
        if status >= http.client.INTERNAL_SERVER_ERROR:
            raise UnavailableError(reason)
        if status != http.client.OK:
            raise SurplusError(reason) if answer.get("surplus") else ConfigError(reason)
        self.sent_at = sent_at
        return answer

    def _check(self, path: str, content: bytes) -> Answer:
        try:
            answer = json.loads(content)
            term = answer["term"]
        except (ValueError, RecursionError, LookupError, TypeError):
            raise UnavailableError(f"{self._where}: not a coordinator, {path} gave {content[:60]!r}") from None
        if not isinstance(answer, dict) or not isinstance(term, int) or not self.term.accept(term):
            raise UnavailableError(
                f"{self._where}: an old coordinator: expected term {self.term.value} or later, got {term}"
            )
        return answer

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        self._connection.timeout = timeout_s
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_s)
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def _misunderstanding(self, error: Exception) -> str | None:
        """What is wrong if one end has TLS and the other has none, or another certificate."""
        host, port = self._connection.host, self._connection.port
        if isinstance(error, ssl.SSLError):
            return tls_problem(error, host)
        is_plain = not isinstance(self._connection, http.client.HTTPSConnection)
        cut = (ConnectionResetError, BrokenPipeError, http.client.BadStatusLine)
        if is_plain and isinstance(error, cut) and not self.term.value and speaks_tls(host, port):
            return "it speaks TLS: expected https://, got http://"
        return None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _connection(url: str, security: Security) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not made yet, and how errors call its other end."""
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname, parts.port
    except ValueError:
        scheme, host, port = "", None, None
    if scheme not in ("http", "https") or not host or port is None:
        raise ConfigError(f"coordinator: expected a URL such as http://127.0.0.1:7160, got `{url}`")
    where = f"coordinator at {host}:{port}"
    security.check_send(where, host, encrypted=scheme == "https")
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, context=client_context(security.ca)), where
    if security.ca is not None:
        raise ConfigError(f"{where}: expected https:// with a `ca` file, got http://")
    return http.client.HTTPConnection(host, port), where
