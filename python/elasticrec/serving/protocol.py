"""What the clients say to a server and how its answers are read, without a socket: paths, headers, bodies, errors."""

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
# A server takes no more than an hour.
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
class Place:
    """Where a server is."""

    host: str
    port: int
    has_tls: bool
    prefix: str
    """What stands before its paths, if something in between gives it one."""

    @property
    def where(self) -> str:
        """What errors call it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def of(cls, url: str) -> "Place":
        """The place that a URL names."""
        try:
            parts = urlsplit(url)
            usual = _PORTS.get(parts.scheme)
            port = usual if parts.port is None else parts.port
            strange = parts.query or parts.fragment or "@" in parts.netloc or any(c.isspace() for c in url)
            host = (parts.hostname or "").encode("idna").decode()
            if usual and port and host and not strange:
                return cls(host, port, parts.scheme == "https", quote(parts.path.rstrip("/"), safe="/%"))
        except ValueError:
            pass
        raise ConfigError(f"server: expected a URL such as http://127.0.0.1:8500, got `{url}`")


@dataclass(frozen=True)
class Request:
    """What is asked."""

    method: str
    path: str
    headers: Headers
    body: bytes = b""


@dataclass(frozen=True)
class Response:
    """What came back; names of headers are in lower case."""

    status: int
    headers: Headers
    body: bytes

    @property
    def is_busy(self) -> bool:
        """Whether the same request may be answered a little later."""
        return self.status in _BUSY

    @property
    def retry_after_s(self) -> float:
        """How long the server wants to be left alone; a date, which proxies may send, is not read."""
        value = self.headers.get(_RETRY_AFTER, "")
        return float(value) if value.isdecimal() else 0.0


@dataclass(frozen=True, eq=False)
class Answer:
    """The scores of a request and who gave them."""

    scores: Scores
    """`[samples, labels]`."""
    labels: tuple[str, ...]
    model: str
    version: int | None
    """None where a server says nothing of it, as is the variant of a model that has none."""
    variant: str | None


def base_headers(place: Place, token: str | None) -> Headers:
    """What every request to a place carries."""
    headers = {"host": place.where, "accept": "application/json"}
    if token is not None:
        if not token or not all("!" <= character <= "~" for character in token):
            raise ConfigError("token: expected visible ASCII without spaces, got something else")
        headers["authorization"] = f"Bearer {token}"
    return headers


def routing_headers(key: str | int | None, variant: str | None) -> Headers:
    """Which variant of a model is to answer: the one of a key, or one by its name."""
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
    """Tells the server how long somebody waits, so that it drops what nobody waits for."""
    return {TIMEOUT_MS: str(min(max(int(left_s * 1000), 1), _MAX_TIMEOUT_MS))}


def model_path(model: str) -> str:
    """Path of a model."""
    return f"{MODELS_PATH}/{quote(model, safe='')}"


def get(path: str) -> Request:
    """A question without a body."""
    return Request("GET", path, {})


def predict_lines(model: str, *, text: bytes, headers: Headers) -> Request:
    """Ask for the scores of lines in the training format."""
    return _predict(model, text, {"content-type": "text/plain", **headers})


def predict_instances(model: str, *, instances: list[dict[str, Any]], headers: Headers) -> Request:
    """Ask for the scores of samples given as values by slot and dense name."""
    try:
        body = json.dumps({"instances": instances}, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise SampleError(f"instances: cannot be written as JSON: {error}") from None
    return _predict(model, body, {"content-type": "application/json", **headers})


def explain_line(model: str, *, line: bytes, headers: Headers) -> Request:
    """Ask what a model makes of one line."""
    return Request("POST", f"{model_path(model)}:explain", {"content-type": "text/plain", **headers}, line)


def _predict(model: str, body: bytes, headers: Headers) -> Request:
    return Request("POST", f"{model_path(model)}:predict", headers, body)


def _plain(value: object) -> object:
    """Numbers and arrays of numpy as JSON has them."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"got a value of type {type(value).__name__}")


def read_json(where: str, path: str, response: Response) -> Any:
    """The content of a good answer; any other is raised."""
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
    """The error that an answer other than 200 is."""
    kind = SampleError if response.status in _NOT_SAMPLES else UnavailableError
    return kind(f"{where}: {response.status}: {reason_of(response)}")


def reason_of(response: Response) -> str:
    """Why an answer is not 200: as our server says it, or as something in between does."""
    try:
        content = json.loads(response.body)
        reason = content.get("error") if isinstance(content, dict) else None
        return str(reason) if reason else "no reason given"
    except (ValueError, RecursionError):
        pass
    text = " ".join(response.body.decode("utf-8", "replace").split())
    return text[:_SHOWN_CHARACTERS] if text.isprintable() and text else "no reason given"


def not_ours(where: str) -> UnavailableError:
    """The error that an answer of another form is."""
    return UnavailableError(f"{where}: not a prediction server, expected an answer of another form")


def read_models(where: str, response: Response) -> list[dict[str, Any]]:
    """The models of a server, each with its name."""
    content = read_json(where, MODELS_PATH, response)
    models = content.get("models") if isinstance(content, dict) else None
    if not isinstance(models, list) or not all(isinstance(one, dict) and "name" in one for one in models):
        raise not_ours(where)
    return models


def only_model(where: str, models: list[dict[str, Any]]) -> str:
    """The name of the model of a server that has one."""
    # variants of a model have its name
    names = list(dict.fromkeys(str(model["name"]) for model in models))
    if not names:
        raise UnavailableError(f"{where}: no model is ready yet")
    if len(names) > 1:
        raise ConfigError(f"{where}: expected one model, got {', '.join(names)}; name one")
    return names[0]


def read_metadata(where: str, model: str, response: Response) -> dict[str, Any]:
    """What a server says of a model."""
    content = read_json(where, model_path(model), response)
    if not isinstance(content, dict) or not isinstance(content.get("labels"), list):
        raise not_ours(where)
    return content


def read_explanation(where: str, model: str, response: Response) -> dict[str, Any]:
    """What a server says of a sample."""
    content = read_json(where, model_path(model), response)
    if not isinstance(content, dict) or not {"signs", "offsets", "rows", "dense", "scores", "timing_ms"} <= set(
        content
    ):
        raise not_ours(where)
    return content


def read_answer(where: str, model: str, response: Response) -> Answer:
    """The scores of an answer; one without samples has no labels."""
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
        raise not_ours(where) from None


def check_seconds(name: str, value: float) -> float:
    """A time that something may take."""
    if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}: expected a number of seconds above 0, got {value!r}")
    return float(value)


class Exchange:
    """HTTP/1.1 on one connection, one request after the other: bytes to send, and answers from bytes that came."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._response: h11.Response | None = None
        self._body: list[bytes] = []
        self.num_answered = 0
        """Requests that were answered before the one at hand."""
        self.has_heard = False
        """Whether something of the answer at hand has come."""

    def send(self, request: Request) -> bytes:
        """The bytes of a request."""
        headers = [(name.encode(), value.encode()) for name, value in request.headers.items()]
        if request.body or request.method == "POST":
            headers.append((b"content-length", str(len(request.body)).encode()))
        self._response, self._body, self.has_heard = None, [], False
        head = self._http.send(h11.Request(method=request.method, target=request.path, headers=headers))
        body = self._http.send(h11.Data(data=request.body)) if request.body else b""
        return (head or b"") + (body or b"") + (self._http.send(h11.EndOfMessage()) or b"")

    def receive(self, data: bytes) -> Response | None:
        """The answer once it is whole; no bytes mean that the other end has closed. `BrokenError` if it is none."""
        if not self.has_heard:
            self.has_heard = bool(data)
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
                    raise BrokenError(_CLOSED)
        except h11.RemoteProtocolError as error:
            raise BrokenError(f"expected HTTP, got something else: {error}" if data else _CLOSED) from None

    def _finish(self) -> Response:
        assert self._response is not None
        headers = {name.decode().lower(): value.decode("utf-8", "replace") for name, value in self._response.headers}
        response = Response(self._response.status_code, headers, b"".join(self._body))
        self.num_answered += 1
        if self.can_go_on:
            self._http.start_next_cycle()
        return response

    @property
    def can_go_on(self) -> bool:
        """Whether another request may follow on the connection."""
        return self._http.our_state in (h11.DONE, h11.IDLE) and self._http.their_state in (h11.DONE, h11.IDLE)


def _check_start(data: bytes) -> None:
    """Refuse what does not begin as HTTP does, without waiting for more of it."""
    if data.startswith(_TLS_ALERT):
        raise BrokenError("it speaks TLS: expected https://, got http://", is_final=True)
    if not data.startswith(_HTTP[: len(data)]):
        raise BrokenError(f"expected HTTP, got {data[:_SHOWN_CHARACTERS]!r}")


class BrokenError(Exception):
    """A connection that gave no answer."""

    def __init__(self, reason: str, *, was_kept: bool = False, is_final: bool = False) -> None:
        super().__init__(reason)
        self.was_kept = was_kept
        """Whether it had answered before, and nothing came since: servers close connections that idle."""
        self.is_final = is_final
        """Whether another attempt would end like this one."""
