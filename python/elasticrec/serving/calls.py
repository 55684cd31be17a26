"""Calls of the clients without I/O: requests, retries with back-off, timeouts.

A call is a generator that yields steps, `SendStep` or `PauseStep`, and receives their results; a client executes the
steps with its sockets. Both clients therefore behave the same.
"""

import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elasticrec.errors import ConfigError, UnavailableError
from elasticrec.net.tls import client_context
from elasticrec.serving import protocol
from elasticrec.serving.protocol import Answer, BrokenConnectionError, Request, Response, ServerAddress

T = TypeVar("T")

# Pauses after the first attempt, the second, …; the last one repeats.
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


@dataclass(frozen=True)
class SendStep:
    """Send a request and wait for its response until the deadline, on a new connection if `fresh`.

    The client throws `BrokenConnectionError` for a failed connection and `TimeoutError` after the deadline.
    """

    request: Request
    deadline: float
    fresh: bool


@dataclass(frozen=True)
class PauseStep:
    """Wait before the next attempt."""

    seconds: float


@dataclass(frozen=True)
class Route:
    """Options of a call: the variant that answers, and the timeout."""

    key: str | int | None
    variant: str | None
    timeout_s: float | None


Steps = Generator[SendStep | PauseStep, Response | None, T]


class TimeLimit:
    """Deadline and retries of a call, including all of its requests."""

    def __init__(self, timeout_s: float, retries: int) -> None:
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.retries = retries

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


class Calls:
    """The calls of a client, and its settings."""

    def __init__(
        self, url: str, model: str | None, *, token: str | None, timeout_s: float, retries: int, ca: str | Path | None
    ) -> None:
        self.address = ServerAddress.of(url)
        self._headers = protocol.base_headers(self.address, token)
        self._timeout_s = protocol.check_seconds("timeout_s", timeout_s)
        if not isinstance(retries, int) or retries < 0:
            raise ConfigError(f"retries: expected a whole number of at least 0, got {retries!r}")
        self._retries = retries
        self._model = model
        if ca is not None and not self.address.has_tls:
            raise ConfigError(f"{self.address.where}: expected https:// with a `ca` file, got http://")
        self.tls = client_context(None if ca is None else Path(ca)) if self.address.has_tls else None

    @property
    def where(self) -> str:
        """Host and port of the server, for errors."""
        return self.address.where

    def models(self, timeout_s: float | None) -> Steps[list[dict[str, Any]]]:
        """Return the models of the server."""
        return self._models(self._time_limit(timeout_s))

    def metadata(self, timeout_s: float | None) -> Steps[dict[str, Any]]:
        """Return the metadata of the model."""
        limit = self._time_limit(timeout_s)
        model = yield from self._model_name(limit)
        return (yield from self._metadata(model, limit))

    def is_ready(self, timeout_s: float | None) -> Steps[bool]:
        """Return whether the server is ready; without retries."""
        try:
            limit = self._time_limit(timeout_s, retries=0)
            response = yield from self._until_answered(protocol.get(protocol.READY_PATH), limit)
        except UnavailableError:
            return False
        protocol.read_json(self.where, protocol.READY_PATH, response)
        return True

    def ask(self, instances: list[dict[str, Any]], route: Route) -> Steps[Answer]:
        """Score samples given as values by slot and dense name."""
        return self._ask(partial(protocol.predict_instances, instances=instances), route)

    def ask_lines(self, text: bytes | str, route: Route) -> Steps[Answer]:
        """Score lines in the training format."""
        content = text.encode() if isinstance(text, str) else text
        return self._ask(partial(protocol.predict_lines, text=content), route)

    def explain_line(self, line: bytes | str, route: Route) -> Steps[dict[str, Any]]:
        """Explain the scores of a line in the training format."""
        limit = self._time_limit(route.timeout_s)
        model = yield from self._model_name(limit)
        headers = protocol.routing_headers(route.key, route.variant)
        content = line.encode() if isinstance(line, str) else line
        request = protocol.explain_line(model, line=content, headers=headers)
        response = yield from self._until_answered(request, limit)
        return protocol.read_explanation(self.where, model, response)

    def _ask(self, make: Callable[..., Request], route: Route) -> Steps[Answer]:
        headers = protocol.routing_headers(route.key, route.variant)
        limit = self._time_limit(route.timeout_s)
        model = yield from self._model_name(limit)
        response = yield from self._until_answered(make(model, headers=headers), limit)
        answer = protocol.read_answer(self.where, model, response)
        if answer.labels:
            return answer
        # A response without samples has no labels: take them from the model, so that the shape is right.
        labels = tuple(map(str, (yield from self._metadata(model, limit))["labels"]))
        return replace(answer, labels=labels, scores=answer.scores.reshape(0, len(labels)))

    def _models(self, limit: TimeLimit) -> Steps[list[dict[str, Any]]]:
        response = yield from self._until_answered(protocol.get(protocol.MODELS_PATH), limit)
        return protocol.read_models(self.where, response)

    def _metadata(self, model: str, limit: TimeLimit) -> Steps[dict[str, Any]]:
        response = yield from self._until_answered(protocol.get(protocol.model_path(model)), limit)
        return protocol.read_metadata(self.where, model, response)

    def _model_name(self, limit: TimeLimit) -> Steps[str]:
        """Return the model's name; if not given, ask the server once for its only model."""
        if self._model is None:
            self._model = protocol.only_model(self.where, (yield from self._models(limit)))
        return self._model

    def _time_limit(self, timeout_s: float | None, retries: int | None = None) -> TimeLimit:
        seconds = self._timeout_s if timeout_s is None else protocol.check_seconds("timeout_s", timeout_s)
        return TimeLimit(seconds, self._retries if retries is None else retries)

    def _until_answered(self, request: Request, limit: TimeLimit) -> Steps[Response]:
        """Send a request until there is a response. Retries are safe, because requests change nothing."""
        fresh = False
        attempts = 0
        last_failure = ""
        while True:
            attempts += 1
            # Jitter, so that clients that failed together do not retry together.
            pause_s = _PAUSES_S[min(attempts, len(_PAUSES_S)) - 1] * random.uniform(0.5, 1.0)
            is_final = False
            try:
                response = yield self._send(request, limit, fresh)
                assert response is not None
                if not response.is_busy:
                    return response
                last_failure = f"{response.status}: {protocol.reason_of(response)}"
                pause_s = max(pause_s, response.retry_after_s)
            except TimeoutError:
                remark = f" (attempt {attempts}; before: {last_failure})" if attempts > 1 else ""
                raise UnavailableError(f"{self.where}: did not answer in {limit.timeout_s:g} s{remark}") from None
            except BrokenConnectionError as error:
                if error.was_reused and not fresh:
                    # The server closed an idle connection, which does not count as an attempt.
                    fresh, attempts = True, attempts - 1
                    continue
                last_failure = str(error) if error.is_final else f"did not answer: {error}"
                is_final = error.is_final
            if is_final or attempts > limit.retries or pause_s >= limit.left_s:
                remark = f" ({attempts} attempts)" if attempts > 1 else ""
                raise UnavailableError(f"{self.where}: {last_failure}{remark}") from None
            yield PauseStep(pause_s)

    def _send(self, request: Request, limit: TimeLimit, fresh: bool) -> SendStep:
        headers = {**self._headers, **request.headers, **protocol.timeout_header(limit.left_s)}
        path = f"{self.address.prefix}{request.path}"
        return SendStep(replace(request, headers=headers, path=path), limit.deadline, fresh)
