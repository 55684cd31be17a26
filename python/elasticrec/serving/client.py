"""A client of the server: lines or named values in, scores out, over one kept connection."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote, urlsplit

import numpy as np
import numpy.typing as npt

from elasticrec.errors import ConfigError, SampleError, UnavailableError

Scores = npt.NDArray[np.float32]


def _parse(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, 80 if parts.port is None else parts.port
        if parts.scheme == "http" and host and not any(c.isspace() for c in url) and host.encode("idna"):
            return host, port
    except ValueError:
        pass
    raise ConfigError(f"server: expected a URL such as http://127.0.0.1:8500, got `{url}`")


class Client:
    """Asks one model of one server."""

    def __init__(
        self, url: str, model: str | None = None, *, token: str | None = None, timeout_s: float = 30.0
    ) -> None:
        host, port = _parse(url)
        self._where = f"{host}:{port}"
        self._connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._labels: list[str] = []
        try:
            self._model = model or self._only_model()
            with self._expecting_a_server():
                self._labels = [str(label) for label in self._get(self._path())["labels"]]
        except BaseException:
            self.close()
            raise

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._model

    @property
    def labels(self) -> list[str]:
        """Names of the scores of a sample."""
        return self._labels

    def predict_lines(self, text: bytes) -> Scores:
        """Scores `[lines, labels]` of lines in the training format."""
        return self._predict(text, "text/plain")

    def predict(self, instances: list[dict[str, Any]]) -> Scores:
        """Scores `[instances, labels]` of samples given as values by slot and dense name."""
        return self._predict(json.dumps({"instances": instances}).encode(), "application/json")

    def _predict(self, body: bytes, content_type: str) -> Scores:
        answer = self._ask("POST", f"{self._path()}:predict", body, {"Content-Type": content_type})
        with self._expecting_a_server():
            scores = [[float(prediction[label]) for label in self._labels] for prediction in answer["predictions"]]
        return np.array(scores, np.float32).reshape(len(scores), len(self._labels))

    def _path(self) -> str:
        return f"/v1/models/{quote(self._model, safe='')}"

    @contextmanager
    def _expecting_a_server(self) -> Iterator[None]:
        """An answer of another shape comes from something else."""
        try:
            yield
        except (AttributeError, KeyError, TypeError, ValueError):
            raise UnavailableError(
                f"{self._where}: not a prediction server, expected an answer of another form"
            ) from None

    def _only_model(self) -> str:
        with self._expecting_a_server():
            models = [str(model["name"]) for model in self._get("/v1/models")["models"]]
        if len(models) != 1:
            raise ConfigError(f"{self._where}: expected one model, got {', '.join(models) or 'none'}; name one")
        return models[0]

    def _get(self, path: str) -> Any:
        return self._ask("GET", path, None, {})

    def _ask(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Any:
        kept = self._connection.sock is not None
        try:
            status, content = self._send(method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            # a server closes connections that idle; what was asked changes nothing, so it can be asked again
            if kept and not isinstance(error, TimeoutError):
                return self._ask(method, path, body, headers)
            raise UnavailableError(f"{self._where}: did not answer: {error or type(error).__name__}") from None
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            raise UnavailableError(f"{self._where}: expected JSON from {path}, got {content[:60]!r}") from None
        if status == http.client.OK:
            return answer
        reason = answer.get("error") if isinstance(answer, dict) else None
        message = f"{self._where}: {status}: {reason or 'no reason given'}"
        raise SampleError(message) if status == http.client.BAD_REQUEST else UnavailableError(message)

    def _send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        self._connection.request(method, path, body, self._headers | headers)
        response = self._connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
