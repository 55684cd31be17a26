"""Threads that send requests to a server whose scores show their version (tests/support/store.py)."""

import contextlib
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator

import numpy as np

from elasticrec.errors import ElasticRecError
from elasticrec.serving.client import Client
from support.store import MODEL, NUM_ROWS, running, wait_until


def score_of(version: int) -> float:
    """Return the score of a sample with a row, if rows and weights are of the same version."""
    return 1001.0 * version


class RequestThreads:
    """Threads that send requests repeatedly and record wrong answers."""

    def __init__(self, url: str, count: int = 4, *, retries: int = 0, model: str = MODEL) -> None:
        self.url, self._model, self._retries = url, model, retries
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(seed,)) for seed in range(count)]
        self.wrong: list[str] = []
        self.answers: Counter[int] = Counter()
        """Number of answers by version."""

    def _ask(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        with Client(self.url, self._model, retries=self._retries, timeout_s=30) as client:
            while not self._stopping.is_set():
                signs = random.integers(1, NUM_ROWS + 1, 5).tolist()
                try:
                    answer = client.ask([{"0": sign} for sign in signs])
                except ElasticRecError as error:
                    self.wrong.append(str(error))
                    continue
                if (answer.scores != score_of(answer.version)).any():
                    self.wrong.append(f"version {answer.version}: {answer.scores.ravel().tolist()}")
                self.answers[answer.version] += 1

    def wait_for(self, version: int, more: int = 6) -> None:
        """Wait for more answers of a version."""
        enough = self.answers[version] + more
        wait_until(lambda: self.answers[version] >= enough, lambda: str((self.answers, self.wrong[:3])))

    @contextlib.contextmanager
    def running(self) -> Iterator["RequestThreads"]:
        """Send requests while the block runs."""
        with running(self._threads, self._stopping):
            yield self


def metrics_of(url: str) -> dict[str, float]:
    """Return the metrics of a server, by name and labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name.removeprefix("elasticrec_serve_"): float(value) for name, _, value in samples}
