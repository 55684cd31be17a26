"""The clients' side of the HTTP protocol without sockets: paths, headers, bodies, errors."""

import json
import math
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlsplit

import h11
import numpy as np
import numpy.typing as npt

from elasticrec.errors import ConfigError, ElasticRecError, SampleError, UnavailableError

Scores = npt.NDArray[np.float32]
Headers = dict[str, str]

KEY = "elasticrec-key"
VARIANT = "elasticrec-variant"
TIMEOUT_MS = "elasticrec-timeout-ms"
# The largest timeout that a server accepts.
_MAX_TIMEOUT_MS = 3_600_000
_RETRY_AFTER = "retry-after"

_PORTS = {"http": 80, "https": 443}

MODELS_PATH = "/v1/models"
READY_PATH = "/ready"

_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_NOT_SAMPLES = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
_SHOWN_CHARACTERS = 60

_HTTP = b"HTTP/1."
_TLS_ALERT = b"\x15\x03"
_CLOSED = "the connection was closed"


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server."""

    host: str
    port: int
    has_tls: bool
    prefix: str
    """Path prefix, if a proxy adds one."""

    @property
    def where(self) -> str:
        """Host and port, for errors."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, url: str) -> "ServerAddress":
        """Parse a URL."""
        try:
            parts = urlsplit(url)
            default = _PORTS.get(parts.scheme)
            port = default if parts.port is None else parts.port
            has_extras = parts.query or parts.fragment or "@" in parts.netloc or any(c.isspace() for c in url)
            host = (parts.hostname or "").encode("idna").decode()
            if default and port and host and not has_extras:
                return cls(host, port, parts.scheme == "https", quote(parts.path.rstrip("/"), safe="/%"))
        except ValueError:
            pass
        raise ConfigError(f"server: expected a URL such as http://127.0.0.1:8500, got `{url}`")


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""


@dataclass(frozen=True)
class Response:
    """The response of a server; names of headers are in lower case."""

    status: int
    headers: Headers
    body: bytes

    @property
    def is_busy(self) -> bool:
        """Whether a retry may succeed."""
        return self.status in _BUSY

    @property
    def retry_after_s(self) -> float:
        """Seconds in the header `Retry-After`, else 0; dates, which proxies may send, are ignored."""
        value = self.headers.get(_RETRY_AFTER, "")
        return float(value) if value.isdecimal() else 0.0


@dataclass(frozen=True, eq=False)
class Answer:
    """The scores of a request, and the model that computed them."""

    scores: Scores
    """`[samples, labels]`."""
    labels: tuple[str, ...]
    model: str
    version: int | None
    """None if the server does not report it."""
    variant: str | None
    """None for a model without variants."""


def base_headers(address: ServerAddress, token: str | None) -> Headers:
    """Return the headers of every request to a server."""
    headers = {"host": address.where, "accept": "application/json"}
    if token is not None:
        if not token or not all("!" <= character <= "~" for character in token):
            raise ConfigError("token: expected visible ASCII without spaces, got something else")
        headers["authorization"] = f"Bearer {token}"
    return headers


def routing_headers(key: str | int | None, variant: str | None) -> Headers:
    """Return the headers that select a variant, by key or by name."""
    headers = {}
    for name, header, value in (("key", KEY, key), ("variant", VARIANT, variant)):
        if value is None:
            continue
        text = str(value)
        if not text.isprintable() or not text or text != text.strip():
            raise ConfigError(f"{name}: expected printable text without spaces around it, got {text!r}")
        headers[header] = text
    if variant is not None and not variant.isascii():
        raise ConfigError(f"variant: expected a name in ASCII, got {variant!r}")
    return headers


def timeout_header(left_s: float) -> Headers:
    """Return the header with the remaining time, so that the server drops expired requests."""
    return {TIMEOUT_MS: str(min(max(int(left_s * 1000), 1), _MAX_TIMEOUT_MS))}


def model_path(model: str) -> str:
    """Return the path of a model."""
    return f"{MODELS_PATH}/{quote(model, safe='')}"


def get(path: str) -> Request:
    """Return a GET request."""
    return Request("GET", path, {})


def predict_lines(model: str, *, text: bytes, headers: Headers) -> Request:
    """Return a request for the scores of lines in the training format."""
    return _predict(model, text, {"content-type": "text/plain", **headers})


def predict_instances(model: str, *, instances: list[dict[str, Any]], headers: Headers) -> Request:
    """Return a request for the scores of samples given as values by slot and dense name."""
    try:
        body = json.dumps({"instances": instances}, allow_nan=False, default=_to_json_value).encode()
    except (TypeError, ValueError) as error:
        raise SampleError(f"instances: cannot be written as JSON: {error}") from None
    return _predict(model, body, {"content-type": "application/json", **headers})


def explain_line(model: str, *, line: bytes, headers: Headers) -> Request:
    """Return a request to explain one line."""
    return Request("POST", f"{model_path(model)}:explain", {"content-type": "text/plain", **headers}, line)


def _predict(model: str, body: bytes, headers: Headers) -> Request:
    return Request("POST", f"{model_path(model)}:predict", headers, body)


def _to_json_value(value: object) -> object:
    """Convert numpy values for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"got a value of type {type(value).__name__}")


def read_json(where: str, path: str, response: Response) -> Any:
    """Return the JSON of a response with status 200; raise an error for any other response."""
    try:
        content = json.loads(response.body)
    except (ValueError, RecursionError):
        if response.status != HTTPStatus.OK:
            raise refusal(where, response) from None
        shown = response.body[:_SHOWN_CHARACTERS]
        raise UnavailableError(f"{where}: expected JSON from {path}, got {shown!r}") from None
    if response.status != HTTPStatus.OK:
        raise refusal(where, response)
    return content


def refusal(where: str, response: Response) -> ElasticRecError:
    """Return the error for a response with a status other than 200."""
    kind = SampleError if response.status in _NOT_SAMPLES else UnavailableError
    return kind(f"{where}: {response.status}: {reason_of(response)}")


def reason_of(response: Response) -> str:
    """Return the reason in an error response, from our server or from a proxy."""
    try:
        content = json.loads(response.body)
        reason = content.get("error") if isinstance(content, dict) else None
        return str(reason) if reason else "no reason given"
    except (ValueError, RecursionError):
        pass
    text = " ".join(response.body.decode("utf-8", "replace").split())
    return text[:_SHOWN_CHARACTERS] if text.isprintable() and text else "no reason given"


def unexpected_format(where: str) -> UnavailableError:
    """Return the error for a response in an unexpected format."""
    return UnavailableError(f"{where}: unexpected response format, not a prediction server")


def read_models(where: str, response: Response) -> list[dict[str, Any]]:
    """Return the models of a server."""
    content = read_json(where, MODELS_PATH, response)
    models = content.get("models") if isinstance(content, dict) else None
    if not isinstance(models, list) or not all(isinstance(one, dict) and "name" in one for one in models):
        raise unexpected_format(where)
    return models


def only_model(where: str, models: list[dict[str, Any]]) -> str:
    """Return the name of the only model of a server."""
    # Variants of a model share its name.
    names = list(dict.fromkeys(str(model["name"]) for model in models))
    if not names:
        raise UnavailableError(f"{where}: no model is ready yet")
    if len(names) > 1:
        raise ConfigError(f"{where}: expected one model, got {', '.join(names)}; name one")
    return names[0]


def read_metadata(where: str, model: str, response: Response) -> dict[str, Any]:
    """Return the metadata of a model."""
    content = read_json(where, model_path(model), response)
    if not isinstance(content, dict) or not isinstance(content.get("labels"), list):
        raise unexpected_format(where)
    return content


def read_explanation(where: str, model: str, response: Response) -> dict[str, Any]:
    """Return the explanation of a sample."""
    content = read_json(where, model_path(model), response)
    if not isinstance(content, dict) or not {"signs", "offsets", "rows", "dense", "scores", "timing_ms"} <= set(
        content
    ):
        raise unexpected_format(where)
    return content


def read_answer(where: str, model: str, response: Response) -> Answer:
    """Return the scores of a response; a response without samples has no labels."""
    content = read_json(where, model_path(model), response)
    try:
        predictions: list[dict[str, float]] = content["predictions"]
        labels = tuple(map(str, predictions[0])) if predictions else ()
        values = [[float(prediction[label]) for label in labels] for prediction in predictions]
        if predictions and not labels:
            raise KeyError("labels")
        scores = np.array(values, np.float32).reshape(len(predictions), len(labels))
        version = content.get("version")
        return Answer(
            scores,
            labels,
            str(content.get("model", model)),
            None if version is None else int(version),
            content.get("variant") or response.headers.get(VARIANT),
        )
    except (AttributeError, LookupError, TypeError, ValueError):
        raise unexpected_format(where) from None


def check_seconds(name: str, value: float) -> float:
    """Return a duration after checking it."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}: expected a number of seconds above 0, got {value!r}")
    return float(value)


class Exchange:
    """HTTP/1.1 on one connection: converts requests to bytes, and received bytes to responses."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._response: h11.Response | None = None
        self._body: list[bytes] = []
        self.num_answered = 0
        """Requests answered before the current one."""
        self.has_received = False
        """Whether a part of the current response was received."""

    def send(self, request: Request) -> bytes:
        """Return the bytes of a request."""
        headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
        if request.body or request.method == "POST":
            headers.append((b"content-length", str(len(request.body)).encode()))
        self._response, self._body, self.has_received = None, [], False
        head = self._http.send(h11.Request(method=request.method, target=request.path, headers=headers))
        body = self._http.send(h11.Data(data=request.body)) if request.body else b""
        return (head or b"") + (body or b"") + (self._http.send(h11.EndOfMessage()) or b"")

    def receive(self, data: bytes) -> Response | None:
        """Return the response once it is complete; empty `data` ends the stream.

        Raise `BrokenConnectionError` for bad data.
        """
        if not self.has_received:
            self.has_received = bool(data)
            _check_start(data)
        try:
            self._http.receive_data(data)
            while True:
                event = self._http.next_event()
                if event is h11.NEED_DATA:
                    return None
                if isinstance(event, h11.Response):
                    self._response = event
                elif isinstance(event, h11.Data):
                    self._body.append(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    return self._finish()
                elif isinstance(event, h11.ConnectionClosed):
                    raise BrokenConnectionError(_CLOSED)
        except h11.RemoteProtocolError as error:
            raise BrokenConnectionError(f"expected HTTP, got something else: {error}" if data else _CLOSED) from None

    def _finish(self) -> Response:
        assert self._response is not None
        headers = {name.decode().lower(): value.decode("utf-8", "replace") for name, value in self._response.headers}
        response = Response(self._response.status_code, headers, b"".join(self._body))
        self.num_answered += 1
        if self.is_reusable:
            self._http.start_next_cycle()
        return response

    @property
    def is_reusable(self) -> bool:
        """Whether the connection can be used for another request."""
        return self._http.our_state in (h11.DONE, h11.IDLE) and self._http.their_state in (h11.DONE, h11.IDLE)


def _check_start(data: bytes) -> None:
    """Raise `BrokenConnectionError` for data that does not begin like HTTP, without waiting for more."""
    if data.startswith(_TLS_ALERT):
        raise BrokenConnectionError("the server uses TLS: expected https://, got http://", is_final=True)
    if not data.startswith(_HTTP[: len(data)]):
        raise BrokenConnectionError(f"expected HTTP, got {data[:_SHOWN_CHARACTERS]!r}")


class BrokenConnectionError(Exception):
    """A connection failed before the response was complete."""

    def __init__(self, reason: str, *, was_reused: bool = False, is_final: bool = False) -> None:
        super().__init__(reason)
        self.was_reused = was_reused
        """Whether it was a reused connection and nothing was received: servers close idle connections."""
        self.is_final = is_final
        """Whether a retry is pointless."""
