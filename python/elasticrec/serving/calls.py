"""Calls of the clients, step by step: what is sent, when it is sent again, when it is given up.

A call is a generator that yields what is to be done, `Send` or `Pause`, and is told what came of it; a client does it
with the sockets it has. So both clients ask, wait and fail alike.
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
from elasticrec.serving.protocol import Answer, BrokenError, Place, Request, Response

T = TypeVar("T")

# Pauses after the first attempt, the second, …; all further ones are as long as the last.
_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)


@dataclass(frozen=True)
class Send:
    """Send a request and get its response: until the deadline, on a new connection if `fresh`.

    `BrokenError` tells of a connection that failed, `TimeoutError` that the deadline is over.
    """

    request: Request
    deadline: float
    fresh: bool


@dataclass(frozen=True)
class Pause:
    """Wait."""

    seconds: float


@dataclass(frozen=True)
class Route:
    """How a call is to be answered: by which variant, and within which time."""

    key: str | int | None
    variant: str | None
    timeout_s: float | None


Steps = Generator[Send | Pause, Response | None, T]


class Patience:
    """The time of a call, all its requests and attempts together."""

    def __init__(self, timeout_s: float, retries: int) -> None:
        self.timeout_s = timeout_s
        self.deadline = time.monotonic() + timeout_s
        self.retries = retries

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()


class Calls:
    """The calls that a client offers, and its settings."""

    def __init__(
        self, url: str, model: str | None, *, token: str | None, timeout_s: float, retries: int, ca: str | Path | None
    ) -> None:
        self.place = Place.of(url)
        self._headers = protocol.base_headers(self.place, token)
        self._timeout_s = protocol.check_seconds("timeout_s", timeout_s)
        if not isinstance(retries, int) or retries < 0:
            raise ConfigError(f"retries: expected a whole number from 0 on, got {retries!r}")
        self._retries = retries
        self._model = model
        if ca is not None and not self.place.has_tls:
            raise ConfigError(f"{self.place.where}: expected https:// with a `ca` file, got http://")
        self.tls = client_context(None if ca is None else Path(ca)) if self.place.has_tls else None

    @property
    def where(self) -> str:
        """What errors call the server."""
        return self.place.where

    def models(self, timeout_s: float | None) -> Steps[list[dict[str, Any]]]:
        """The models that the server has."""
        return self._models(self._patience(timeout_s))

    def metadata(self, timeout_s: float | None) -> Steps[dict[str, Any]]:
        """What the server says of the model."""
        patience = self._patience(timeout_s)
        model = yield from self._name(patience)
        return (yield from self._metadata(model, patience))

    def is_ready(self, timeout_s: float | None) -> Steps[bool]:
        """Whether the server can answer now; asked once."""
        try:
            patience = self._patience(timeout_s, retries=0)
            response = yield from self._until_answered(protocol.get(protocol.READY_PATH), patience)
        except UnavailableError:
            return False
        protocol.read_json(self.where, protocol.READY_PATH, response)
        return True

    def ask(self, instances: list[dict[str, Any]], route: Route) -> Steps[Answer]:
        """The scores of samples given as values by slot and dense name."""
        return self._ask(partial(protocol.predict_instances, instances=instances), route)

    def ask_lines(self, text: bytes | str, route: Route) -> Steps[Answer]:
        """The scores of lines in the training format."""
        content = text.encode() if isinstance(text, str) else text
        return self._ask(partial(protocol.predict_lines, text=content), route)

    def explain_line(self, line: bytes | str, route: Route) -> Steps[dict[str, Any]]:
        """What the model makes of one line in the training format."""
        patience = self._patience(route.timeout_s)
        model = yield from self._name(patience)
        headers = protocol.routing_headers(route.key, route.variant)
        content = line.encode() if isinstance(line, str) else line
        request = protocol.explain_line(model, line=content, headers=headers)
        response = yield from self._until_answered(request, patience)
        return protocol.read_explanation(self.where, model, response)

    def _ask(self, make: Callable[..., Request], route: Route) -> Steps[Answer]:
        headers = protocol.routing_headers(route.key, route.variant)
        patience = self._patience(route.timeout_s)
        model = yield from self._name(patience)
        response = yield from self._until_answered(make(model, headers=headers), patience)
        answer = protocol.read_answer(self.where, model, response)
        if answer.labels:
            return answer
        # no sample, no names of scores: the shape is the model's all the same
        labels = tuple(map(str, (yield from self._metadata(model, patience))["labels"]))
        return replace(answer, labels=labels, scores=answer.scores.reshape(0, len(labels)))

    def _models(self, patience: Patience) -> Steps[list[dict[str, Any]]]:
        response = yield from self._until_answered(protocol.get(protocol.MODELS_PATH), patience)
        return protocol.read_models(self.where, response)

    def _metadata(self, model: str, patience: Patience) -> Steps[dict[str, Any]]:
        response = yield from self._until_answered(protocol.get(protocol.model_path(model)), patience)
        return protocol.read_metadata(self.where, model, response)

    def _name(self, patience: Patience) -> Steps[str]:
        """The model that was named, or the only one that there is, asked for once."""
        if self._model is None:
            self._model = protocol.only_model(self.where, (yield from self._models(patience)))
        return self._model

    def _patience(self, timeout_s: float | None, retries: int | None = None) -> Patience:
        seconds = self._timeout_s if timeout_s is None else protocol.check_seconds("timeout_s", timeout_s)
        return Patience(seconds, self._retries if retries is None else retries)

    def _until_answered(self, request: Request, patience: Patience) -> Steps[Response]:
        """The answer to a request, whatever it is. What is asked changes nothing, so it may be asked again."""
        fresh = False
        attempts = 0
        told = ""
        while True:
            attempts += 1
            # those who were refused together should not come back together
            pause_s = _PAUSES_S[min(attempts, len(_PAUSES_S)) - 1] * random.uniform(0.5, 1.0)
            is_final = False
            try:
                response = yield self._send(request, patience, fresh)
                assert response is not None
                if not response.is_busy:
                    return response
                told = f"{response.status}: {protocol.reason_of(response)}"
                pause_s = max(pause_s, response.retry_after_s)
            except TimeoutError:
                remark = f" (attempt {attempts}, before it: {told})" if attempts > 1 else ""
                raise UnavailableError(f"{self.where}: did not answer in {patience.timeout_s:g} s{remark}") from None
            except BrokenError as error:
                if error.was_kept and not fresh:
                    # the server had closed it, which is no failure of the server
                    fresh, attempts = True, attempts - 1
                    continue
                told = str(error) if error.is_final else f"did not answer: {error}"
                is_final = error.is_final
            if is_final or attempts > patience.retries or pause_s >= patience.left_s:
                remark = f" ({attempts} attempts)" if attempts > 1 else ""
                raise UnavailableError(f"{self.where}: {told}{remark}") from None
            yield Pause(pause_s)

    def _send(self, request: Request, patience: Patience, fresh: bool) -> Send:
        headers = {**self._headers, **request.headers, **protocol.timeout_header(patience.left_s)}
        path = f"{self.place.prefix}{request.path}"
        return Send(replace(request, headers=headers, path=path), patience.deadline, fresh)
