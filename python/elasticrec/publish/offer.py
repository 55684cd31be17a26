"""What comes behind a commit: the gate, the offer, and old versions that go."""

import contextlib
from dataclasses import dataclass

from elasticrec.config.publish import Publish
from elasticrec.errors import ElasticRecError
from elasticrec.publish.gate import Judge, rows_of
from elasticrec.repository.collect import collect
from elasticrec.repository.repository import STORE, Repository
from elasticrec.repository.storage import join
from elasticrec.repository.version import Version

HELD = "a rollback holds the model until `models resume`"
LOADING = "servers of the store load it first"


@dataclass(frozen=True)
class Outcome:
    """What became of a version that was committed."""

    is_offered: bool
    refused: tuple[str, ...] = ()
    """Why the gate stopped it."""
    waits: str | None = None
    """Why it is not offered now though nothing is wrong with it."""
    collected: tuple[int, ...] = ()
    problem: str | None = None
    """Why old versions could not be collected."""

    @property
    def words(self) -> str:
        """For people, on one line."""
        if self.is_offered:
            return "offered"
        return f"not offered: {'; '.join(self.refused) or self.waits}"


def offer_version(
    repository: Repository, version: Version, settings: Publish, *, has_store: bool, dense: bytes | None = None
) -> Outcome:
    """Offer a version that was just committed, unless the gate, a rollback or a store is before it.

    With a store, of the job or one that `deliver` wrote down, its roll-out offers the version once servers hold it. Old
    versions go when a base comes: a delta makes nothing old.
    """
    refused = tuple(Judge(settings.gate, repository, _current_rows(repository)).refusals(version, dense))
    is_offered, waits = False, None
    if not refused:
        if has_store:
            waits = LOADING
        elif repository.storage.exists(STORE):
            where = join(repository.place, STORE)
            waits = f"{LOADING}, and `elasticrec deliver` offers it; {where} names them, remove it if there are none"
        else:
            waits = _offer(repository, version.number)
            is_offered = waits is None
    if version.parent is not None:
        return Outcome(is_offered, refused, waits)
    try:
        collected = tuple(collect(repository, settings.keep).removed)
    except (ElasticRecError, OSError) as error:
        return Outcome(is_offered, refused, waits, problem=str(error))
    return Outcome(is_offered, refused, waits, collected)


def _offer(repository: Repository, number: int) -> str | None:
    """Offer a version; why that cannot be, if it cannot."""
    while not repository.offer(number):
        state = repository.state()
        if state is not None and state.is_held:
            return HELD
        if state is not None and state.version >= number:
            # another one who looked at the same repository may have offered this very one
            return None if state.version == number else f"version {state.version}, a newer one, is offered already"
    return None


def _current_rows(repository: Repository) -> int | None:
    """Return the rows of the current version; None too if the repository does not answer: the version is committed."""
    with contextlib.suppress(ElasticRecError, OSError):
        return rows_of(repository, repository.current())
    return None
