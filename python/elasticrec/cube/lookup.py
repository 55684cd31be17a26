"""`elasticrec cube get`: rows by sign, from the store, or from the files of the repository."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elasticrec import _core
from elasticrec.errors import ModelError
from elasticrec.net.security import Security
from elasticrec.repository.fetch import default_cache, fetch
from elasticrec.repository.repository import Repository

_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Rows:
    """The rows of some signs in one version."""

    version: int
    columns: list[tuple[str, int]]
    signs: list[int]
    values: npt.NDArray[np.float32]
    is_there: npt.NDArray[np.bool_]

    def lines(self) -> Iterator[str]:
        """Yield one line of text per sign."""
        yield f"version {self.version}"
        for sign, values in self._each():
            if values is None:
                yield f"{sign}: no row"
                continue
            columns = (f"{name} {' '.join(f'{value:.6g}' for value in part)}" for name, part in values.items())
            yield f"{sign}: {'  '.join(columns)}"

    def json_lines(self) -> Iterator[str]:
        """Yield one JSON object per sign."""
        for sign, values in self._each():
            yield json.dumps({"version": self.version, "sign": sign, "row": values})

    def _each(self) -> Iterator[tuple[int, dict[str, list[float]] | None]]:
        ends = np.cumsum([0, *(width for _, width in self.columns)])
        for at, sign in enumerate(self.signs):
            if not self.is_there[at]:
                yield sign, None
                continue
            row = self.values[at].tolist()
            yield sign, {name: row[ends[i] : ends[i + 1]] for i, (name, _) in enumerate(self.columns)}


def rows_of(
    repository: Repository,
    signs: list[int],
    version: int | None,
    addresses: Sequence[Sequence[str]],
    security: Security,
) -> Rows:
    """Look up rows of a version; the default is the current version."""
    number = repository.current() if version is None else version
    if number is None:
        raise ModelError(f"{repository.location}: no version is offered yet")
    wanted = np.asarray(signs, np.uint64)
    if addresses:
        client = _core.CubeClient(
            repository.name,
            [list(replicas) for replicas in addresses],
            token=security.token or "",
            deadline_s=_DEADLINE_S,
            tls=security.wire_tls(),
        )
        values, is_there = client.get(number, wanted)
        return Rows(number, client.layout(number)[0], signs, values, is_there)
    fetched = fetch(repository, number, default_cache())
    base, *deltas = ([str(path) for path in fetched.parts(version)] for version in fetched.chain)
    view = _core.CubeView(base, deltas)
    values, is_there = view.lookup(wanted)
    return Rows(number, view.columns, signs, values, is_there)
