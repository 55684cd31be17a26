"""Open the rows of a version, with its deltas applied to its base."""

from typing import Any

from elasticrec import _core
from elasticrec.repository.fetch import FetchedVersion


def open_rows(fetched: FetchedVersion) -> Any:
    """Return a view for looking up and listing rows."""
    base, *deltas = [[str(path) for path in fetched.parts(version)] for version in fetched.chain]
    core: Any = _core
    return core.CubeView(base, deltas)
