"""Write the versions of a running job to the repository: draft, commit, offer."""

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from elasticrec.config.publish import Publish
from elasticrec.errors import ModelError
from elasticrec.fail_points import fail_point
from elasticrec.manifest import FileEntry
from elasticrec.publish.content import Changes, Provenance, PublishedVersion, VersionTemplate
from elasticrec.publish.offer import offer_version
from elasticrec.publish.servers.target import LostParentError, ShardDraft, ShardParts
from elasticrec.repository.repository import Draft, Repository
from elasticrec.repository.version import GRAPH_FILE, READER_FILE, Content, Version, part_name

# Newest versions that are searched for one of this run.
_MAX_SEARCHED = 100


@dataclass(frozen=True)
class RunInfo:
    """The run that publishes, and its publish settings."""

    name: str
    run_id: str
    start: Path
    """Directory of the version template and the graph."""
    publish: Publish
    has_store: bool
    """Whether an online store is configured; then its rollout offers versions."""


class RunVersions:
    """The versions of one run in the repository of its model."""

    def __init__(self, repository: Repository, info: RunInfo) -> None:
        self._repository, self._info = repository, info
        self._template = VersionTemplate.read(info.start)
        # The model's lock after `claim`, and the version being written.
        self._lock: contextlib.AbstractContextManager[None] | None = None
        self._draft: Draft | None = None

    def claim(self) -> PublishedVersion | None:
        """Lock the model for this run and return its newest version, or None if the next one must be a base.

        A version that was committed but not offered because of a crash is offered now.
        """
        if self._lock is None:
            lock = self._repository.locked()
            lock.__enter__()
            self._lock = lock
        directories = self._repository.directories()
        for number in sorted(directories, reverse=True)[:_MAX_SEARCHED]:
            try:
                found = self._repository.read(directories[number])
                base = self._repository.chain(number)[0]
            except (ModelError, FileNotFoundError):
                # Damaged, or removed since it was listed: no delta can be based on it.
                continue
            publish = found.manifest["data"].get("publish")
            if isinstance(publish, dict) and publish.get("run") == self._info.run_id:
                is_offered = (self._repository.current() or 0) >= number
                offer = ("offered", False) if is_offered else self._offer(found)
                if not self._fits(found, base):
                    return None
                return PublishedVersion(number, publish["name"], publish["deltas"], *offer)
        return None

    def _fits(self, version: Version, base: Version) -> bool:
        """Return whether this run may add deltas to a version: rows, dense values and graph have the same layout."""
        template, manifest = self._template, version.manifest
        table, graph = manifest["table"], base.files.get(GRAPH_FILE)
        pairs = (
            (table.get("row_type"), self._info.publish.row_type),
            (table.get("partitions"), template.partitions),
            (table.get("columns"), template.columns),
            (manifest["features"], template.features),
            (manifest["graph"].get("inputs"), template.inputs),
            (manifest["graph"].get("labels"), template.labels),
            (manifest["dense"].get("tensors"), template.tensors),
            (graph and graph.sha256, hashlib.sha256((self._info.start / GRAPH_FILE).read_bytes()).hexdigest()),
        )
        return all(found == expected for found, expected in pairs)

    def begin(self, parent: PublishedVersion | None) -> ShardDraft:
        """Begin a base, or a delta of `parent`."""
        try:
            draft = self._repository.begin() if parent is None else self._repository.begin_delta(parent.number)
        except ModelError as error:
            raise error if parent is None else LostParentError(str(error)) from None
        self._draft = draft
        if self._repository.storage.path_of("") is not None:
            return ShardDraft(draft.number, draft.directory, f"{self._repository.name}/{draft.name}")
        return ShardDraft(draft.number, draft.directory, draft.name, self._repository.location)

    def commit(self, draft: ShardDraft, content: ShardParts) -> PublishedVersion:
        """Join the dense values, write the manifest and offer the version."""
        found = self._draft
        assert found is not None, "commit needs a draft"
        dense = self._join(draft, content)
        graph = (self._info.start / GRAPH_FILE).read_bytes()
        reader = None if self._template.reader is None else (self._info.start / READER_FILE).read_bytes()
        files = found.write_network(dense, graph, reader)
        for index, part in content.parts.items():
            assert part.cube is not None, "a written part has a cube file"
            files[part_name(index)] = FileEntry(part.cube.bytes, part.cube.sha256)
            self._repository.storage.delete(f"{found.name}/{draft.dense(index).name}")
            draft.dense(index).unlink(missing_ok=True)
        num_deltas = 0 if content.parent is None else content.parent.num_deltas + 1
        fail_point("version")
        version = self._repository.commit(found, self._content(content, num_deltas), files)
        # The version is committed, whatever happens next.
        fail_point("version-written")
        self._draft = None
        return PublishedVersion(draft.number, content.publish, num_deltas, *self._offer(version, dense))

    def abandon(self, draft: ShardDraft) -> None:
        """Remove the draft's files, unless it was committed."""
        found, self._draft = self._draft, None
        if found is not None:
            self._repository.abandon(found)

    def close(self) -> None:
        """Release the model, so that others may publish it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.__exit__(None, None, None)

    def _content(self, content: ShardParts, num_deltas: int) -> Content:
        parts, facts = content.parts.values(), content.facts
        provenance = Provenance(
            run=self._info.name,
            checkpoint=f"publish {content.publish}",
            rows=sum(part.rows for part in parts),
            metrics={"train": facts["train"], "eval": []},
            samples=content.parts[0].samples,
            epoch=facts["passes"],
            until=facts["until"],
            publish={"run": self._info.run_id, "name": content.publish, "deltas": num_deltas},
        )
        changes = Changes(sum(part.changed for part in parts), sum(part.removed for part in parts))
        ranges = {part_name(index): content.owned[index] for index in content.parts}
        return self._template.content(
            provenance, self._info.publish.row_type, changes, ranges if len(content.parts) > 1 else None
        )

    def _join(self, draft: ShardDraft, content: ShardParts) -> bytes:
        """Return the dense vector, joined from the slices that shards wrote to the disk or sent to the repository."""
        assert self._draft is not None
        slices = []
        for index in sorted(content.parts):
            path, entry = draft.dense(index), content.parts[index].dense
            found = (
                path.read_bytes() if path.exists() else self._repository.storage.read(f"{self._draft.name}/{path.name}")
            )
            if entry is None or len(found) != entry.bytes or hashlib.sha256(found).hexdigest() != entry.sha256:
                raise ModelError(f"{path}: size or sha-256 differs from the report of shard {index}")
            slices.append(found)
        return b"".join(slices)

    def _offer(self, version: Version, dense: bytes | None = None) -> tuple[str, bool]:
        """Offer a version. Return a human-readable result, and whether it needs attention."""
        result = offer_version(
            self._repository, version, self._info.publish, dense=dense, has_store=self._info.has_store
        )
        problem = f"; old versions were not removed: {result.collect_error}" if result.collect_error else ""
        return result.summary + problem, bool(result.refusals) or result.has_failed
