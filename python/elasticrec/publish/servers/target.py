"""The interface between a publish and the repository that it writes to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from elasticrec.errors import ModelError
from elasticrec.net.messages import PublishPart
from elasticrec.publish.content import PublishedVersion


@dataclass(frozen=True)
class ShardDraft:
    """A version that shards are writing."""

    number: int
    path: Path
    """Directory of the parts, for shards that share the disk."""
    name: str = ""
    """Name of the version, under which other shards send their parts to `repository_url`."""
    repository_url: str | None = None
    """URL of the repository; None if it is a directory, which the coordinator serves over HTTP."""

    def cube(self, index: int) -> Path:
        """Return the path of a shard's part file."""
        return self.path / "cube" / f"part-{index:05d}"

    def dense(self, index: int) -> Path:
        """Return the path of a shard's slice of the dense values."""
        return self.path / f".dense-{index:05d}"


@dataclass(frozen=True)
class ShardParts:
    """The parts of a version, written by all shards."""

    publish: str
    parent: PublishedVersion | None
    """None for a base."""
    parts: Mapping[int, PublishPart]
    owned: Mapping[int, range]
    """Partitions of each part."""
    facts: Mapping[str, Any]
    """State of the run when the publish began. Its figures `learned` change with every training step."""


class LostParentError(ModelError):
    """The parent of a delta is no longer in the repository."""


class VersionTarget(Protocol):
    """The repository that versions are written to. Methods are never called from two threads at once."""

    def claim(self) -> PublishedVersion | None:
        """Lock the model for this run. Return the newest version that the run has committed, or None."""

    def begin(self, parent: PublishedVersion | None) -> ShardDraft:
        """Begin a base, or a delta of `parent`."""

    def commit(self, draft: ShardDraft, content: ShardParts) -> PublishedVersion:
        """Commit the version and offer it. After an error the version exists if its manifest is found."""

    def abandon(self, draft: ShardDraft) -> None:
        """Remove the files of a draft."""

    def close(self) -> None:
        """Release the model."""
