"""Decide after a commit whether the version goes live: gate, offer, then removal of old versions."""

from dataclasses import dataclass
from pathlib import Path

from elasticrec.config.publish import Publish
from elasticrec.errors import ElasticRecError
from elasticrec.publish.gate import GateCheck
from elasticrec.repository.collect import collect
from elasticrec.repository.repository import STORE, Repository
from elasticrec.repository.storage import join
from elasticrec.repository.version import Version

HELD_REASON = "a rollback holds the model until `models resume`"
LOADING_REASON = "the store must load it first"


@dataclass(frozen=True)
class OfferResult:
    """The result of offering a committed version."""

    is_offered: bool
    refusals: tuple[str, ...] = ()
    """Reasons why the gate refuses the version."""
    wait_reason: str | None = None
    """Why a version that passed the gate is not offered yet."""
    collected: tuple[int, ...] = ()
    """Old versions that were removed."""
    collect_error: str | None = None
    """Why old versions could not be removed."""
    has_failed: bool = False
    """Whether `wait_reason` is an error, such as a repository that does not answer."""

    @property
    def summary(self) -> str:
        """The result on one line, human-readable."""
        if self.is_offered:
            return "offered"
        return f"not offered: {'; '.join(self.refusals) or self.wait_reason}"


@dataclass(frozen=True)
class PublishResult:
    """A committed version and the result of its offer."""

    model: str
    version: int
    location: str
    """Path or URL of the version."""
    rows: int
    num_bytes: int
    offer: OfferResult

    @property
    def path(self) -> Path:
        """Directory of the version, if the repository is on a local disk."""
        return Path(self.location)


def offer_version(
    repository: Repository, version: Version, settings: Publish, *, has_store: bool, dense: bytes | None = None
) -> OfferResult:
    """Offer a version that was just committed, unless the gate, a rollback or an online store prevents it.

    With a store, configured by the job or recorded by `deliver`, the rollout offers the version once enough replicas
    have loaded it. Old versions are removed after a base only, because a delta makes no version obsolete. An error is
    a reason too: the version is committed, even if its offer fails.
    """
    try:
        return _offer_version(repository, version, settings, has_store=has_store, dense=dense)
    except (ElasticRecError, OSError) as error:
        return OfferResult(False, wait_reason=str(error), has_failed=True)


def _offer_version(
    repository: Repository, version: Version, settings: Publish, *, has_store: bool, dense: bytes | None
) -> OfferResult:
    gate_check = GateCheck.against(settings.gate, repository, repository.current())
    refusals = tuple(gate_check.refusals(version, dense))
    is_offered, wait_reason = False, None
    if not refusals:
        if has_store:
            wait_reason = LOADING_REASON
        elif repository.storage.exists(STORE):
            where = join(repository.location, STORE)
            wait_reason = (
                f"{LOADING_REASON}, then `elasticrec deliver` offers it; remove {where} if the store no longer exists"
            )
        else:
            wait_reason = _offer(repository, version.number)
            is_offered = wait_reason is None
    if version.parent is not None:
        return OfferResult(is_offered, refusals, wait_reason)
    try:
        collected = tuple(collect(repository, settings.keep).removed)
    except (ElasticRecError, OSError) as error:
        return OfferResult(is_offered, refusals, wait_reason, collect_error=str(error))
    return OfferResult(is_offered, refusals, wait_reason, collected)


def _offer(repository: Repository, number: int) -> str | None:
    """Offer a version. Return the reason if it cannot be offered, or None."""
    while not repository.offer(number):
        state = repository.state()
        if state is not None and state.is_held:
            return HELD_REASON
        if state is not None and state.version >= number:
            # A rollout that saw the commit may have offered this version already.
            return None if state.version == number else f"the newer version {state.version} is current"
    return None
