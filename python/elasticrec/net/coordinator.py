"""The coordinator's client for shards, trainers and commands; it retries while the coordinator is unavailable."""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Self, TypeVar, Unpack, cast
from urllib.parse import urlsplit

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net import messages
from elasticrec.net.http_client import Backoff, HttpClient, check_url
from elasticrec.net.messages import FencedError, MovedError, SurplusError
from elasticrec.net.security import Security
from elasticrec.net.tls import TlsError

# Pauses between attempts.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

T = TypeVar("T")


class Term:
    """The highest term that a role has seen; all its clients share one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0

    @property
    def value(self) -> int:
        """The term, 0 before the first response."""
        return self._value

    def accept(self, term: int) -> bool:
        """Record the term of a response; return False if a newer term was seen before."""
        with self._lock:
            if term < self._value:
                return False
            self._value = term
            return True


class CoordinatorClient:
    """One connection, for one thread at a time.

    Requests are retried for `deadline_s` seconds; all of them are idempotent.
    """

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
        self._http = _http_client(url, security, attempt_s)
        self.sent_at = 0.0
        """Monotonic time at which the last answered request was sent: leases run from here."""

    def register_shard(
        self, nonce: str, *, index: int | None = None, run: str = "", damaged: Mapping[str, str] | None = None
    ) -> messages.ShardRegistration | messages.RegistrationDelay:
        """Register a shard; `damaged` are checkpoints that it could not load, with the reasons."""
        answer = self._register("ps", nonce, index=index, run=run, damaged=dict(damaged or {}))
        if answer.get("incarnation") is None:
            return self._check(messages.RegistrationDelay, answer)
        return self._check(messages.ShardRegistration, answer)

    def register_trainer(
        self, nonce: str, *, index: int | None = None, run: str = ""
    ) -> messages.TrainerRegistration | messages.RegistrationDelay:
        """Register a trainer."""
        answer = self._register("trainer", nonce, index=index, run=run)
        if answer.get("incarnation") is None:
            return self._check(messages.RegistrationDelay, answer)
        return self._check(messages.TrainerRegistration, answer)

    def _register(self, role: str, nonce: str, **body: Any) -> dict[str, Any]:
        return self._post("register", protocol=messages.PROTOCOL, role=role, nonce=nonce, **body)

    def shard_heartbeat(
        self, incarnation: int, sequence: int, **report: Unpack[messages.ShardReport]
    ) -> messages.ShardHeartbeatResponse:
        """Renew the lease of a shard and report its state."""
        # Heartbeats are the most frequent requests: their responses are not checked.
        answer = self._post("heartbeat", incarnation=incarnation, sequence=sequence, **report)
        return cast(messages.ShardHeartbeatResponse, answer)

    def trainer_heartbeat(
        self,
        incarnation: int,
        sequence: int,
        *,
        units: Sequence[int] = (),
        meeting: int = 0,
        figures: messages.Figures | None = None,
    ) -> messages.TrainerHeartbeatResponse:
        """Renew the lease of a trainer and report its units."""
        body = {"units": list(units), "meeting": meeting, "figures": figures or {}}
        answer = self._post("heartbeat", incarnation=incarnation, sequence=sequence, **body)
        return cast(messages.TrainerHeartbeatResponse, answer)

    def leave(self, incarnation: int, sequence: int, *, figures: messages.Figures | None = None) -> None:
        """Report that the member has stopped, so that nothing waits for its lease to expire."""
        self._post("heartbeat", incarnation=incarnation, sequence=sequence, leaving=True, figures=figures or {})

    def lease(
        self, incarnation: int, holds: list[int], *, waiting: bool = False
    ) -> messages.UnitLease | messages.NoUnit:
        """Request a unit in addition to those in `holds`; `waiting`: the trainer waits for the rest of its group."""
        answer = self._post("lease", incarnation=incarnation, holds=holds, waiting=waiting)
        if answer.get("unit") is None:
            return self._check(messages.NoUnit, answer)
        return self._check(messages.UnitLease, answer)

    def meet(self, incarnation: int, meeting: int) -> messages.MeetResponse:
        """Report that the trainer has reached a meeting; `go` says whether all have."""
        answer = self._post("meet", incarnation=incarnation, meeting=meeting)
        return self._check(messages.MeetResponse, answer)

    def report_done(self, incarnation: int, unit: int) -> messages.HeldResponse:
        """Report that all batches of a unit are pushed."""
        answer = self._post("done", incarnation=incarnation, unit=unit)
        return self._check(messages.HeldResponse, answer)

    def give_back(self, incarnation: int, unit: int) -> messages.HeldResponse:
        """Return a unit that is not finished."""
        answer = self._post("give_back", incarnation=incarnation, unit=unit)
        return self._check(messages.HeldResponse, answer)

    def report_missing(self, incarnation: int, unit: int, why: str) -> None:
        """Report that the data of a unit is gone."""
        self._post("missing", incarnation=incarnation, unit=unit, why=why)

    def checkpoint(self) -> messages.CheckpointResponse:
        """Request a checkpoint."""
        return self._check(messages.CheckpointResponse, self._post("checkpoint"))

    def scale(self, *, servers: int | None = None, trainers: int | None = None) -> messages.ScaleResponse:
        """Request another number of servers or trainers."""
        return self._check(messages.ScaleResponse, self._post("scale", servers=servers, trainers=trainers))

    def status(self) -> messages.StatusResponse:
        """Return the state of the run."""
        answer = self._retry(lambda timeout_s: self._send("GET", "/v1/status", None, timeout_s))
        return self._check(messages.StatusResponse, answer)

    def _check(self, kind: type[T], answer: dict[str, Any]) -> T:
        try:
            return messages.check_response(kind, answer)
        except ConfigError as error:
            raise ConfigError(f"{self._http.name}: {error}") from None

    def _post(self, path: str, **body: Any) -> dict[str, Any]:
        def attempt(timeout_s: float) -> dict[str, Any]:
            content = json.dumps({"term": self.term.value, **body}).encode()
            return self._send("POST", f"/v1/{path}", content, timeout_s)

        return self._retry(attempt)

    def _retry(self, attempt: Callable[[float], T]) -> T:
        start = time.monotonic()
        backoff, attempts = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S), 0
        while True:
            # Read the deadline in every round: a shutdown shortens it.
            end = start + self.deadline_s
            left_s = end - time.monotonic()
            attempts += 1
            try:
                return attempt(max(min(left_s, self._attempt_s), 0.001))
            except FencedError:
                raise
            except UnavailableError as error:
                self._http.reconnect()
                pause_s = backoff.next_pause_s()
                if time.monotonic() + pause_s >= end:
                    raise UnavailableError(f"{error} ({attempts} attempts in {self.deadline_s:g} s)") from None
                time.sleep(pause_s)

    def _send(self, method: str, path: str, body: bytes | None, timeout_s: float) -> dict[str, Any]:
        sent_at = time.monotonic()
        try:
            response = self._http.request(method, path, body, {"Content-Type": "application/json"}, timeout_s=timeout_s)
        except TlsError as error:
            # A coordinator that has answered before may be restarted with the right certificate.
            if self.term.value:
                raise UnavailableError(str(error)) from None
            raise
        answer = self._parse(path, response.content)
        reason = f"{self._http.name}: {answer.get('error') or 'no reason given'}"
        if response.status == HTTPStatus.CONFLICT:
            raise MovedError(reason) if answer.get("moved") else FencedError(reason)
        if response.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise UnavailableError(reason)
        if response.status != HTTPStatus.OK:
            raise SurplusError(reason) if answer.get("surplus") else ConfigError(reason)
        self.sent_at = sent_at
        return answer

    def _parse(self, path: str, content: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(content)
            term = answer["term"]
        except (ValueError, RecursionError, LookupError, TypeError):
            raise UnavailableError(
                f"{self._http.name}: expected the answer of a coordinator to {path}, got {content[:60]!r}"
            ) from None
        if not isinstance(answer, dict) or not isinstance(term, int) or not self.term.accept(term):
            raise UnavailableError(
                f"{self._http.name}: an old coordinator: expected term {self.term.value} or later, got {term}"
            )
        return answer

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _http_client(url: str, security: Security, timeout_s: float) -> HttpClient:
    check_url("coordinator", url, "http://127.0.0.1:7160")
    parts = urlsplit(url)
    name = f"coordinator at {parts.hostname}:{parts.port}"
    client = HttpClient(url, name=name, security=security, timeout_s=timeout_s)
    if parts.scheme == "http" and security.ca is not None:
        raise ConfigError(f"{name}: expected https:// with a `ca` file, got http://")
    return client
