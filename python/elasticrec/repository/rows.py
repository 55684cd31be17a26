"""The rows of a version on this machine, its deltas applied to its base."""

from typing import Any

from elasticrec import _core
from elasticrec.repository.fetch import Fetched


def open_rows(fetched: Fetched) -> Any:
    """The rows, to look up and to list; a `_core.CubeView`."""
    base, *deltas = [[str(path) for path in fetched.parts(version)] for version in fetched.chain]
    core: Any = _core
    return core.CubeView(base, deltas)
