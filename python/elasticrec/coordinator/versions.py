"""The repository as a running job sees it: a place for the parts of a version, its commit, its offer."""

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticrec.config.publish import Publish
from elasticrec.coordinator.publishing import Content, Draft, LostParentError, Version
from elasticrec.durable import write_synced
from elasticrec.errors import ElasticRecError, ModelError
from elasticrec.fail_points import fail_point
from elasticrec.manifest import FileEntry
from elasticrec.repository import repository as store
from elasticrec.repository import version as versions
from elasticrec.repository.offer import offer_version
from elasticrec.repository.verify import tensors_not_finite
from elasticrec.repository.version import DENSE_FILE, GRAPH_FILE, READER_FILE, part_name

_ABOUT = "version.json"
# So many versions are looked at for one of this run.
_MAX_LOOKS = 100


@dataclass(frozen=True)
class About:
    """What all versions of a run have in common; written down before the run begins."""

    key: str
    """Of the job that it was made from."""
    features: dict[str, Any]
    partitions: int
    columns: list[dict[str, Any]]
    inputs: list[str]
    tensors: list[dict[str, Any]]
    labels: list[str] | None
    reader: str | None = None
    """File and class of a reader of the user's own."""

    def write(self, directory: Path, graph: bytes, reader: bytes | None = None) -> None:
        """Beside what shards start from, with the file of a reader; what was there before is replaced."""
        about = json.dumps(vars(self)).encode()
        for name, content in ((GRAPH_FILE, graph), (READER_FILE, reader), (_ABOUT, about)):
            (directory / name).unlink(missing_ok=True)
            if content is not None:
                write_synced(directory / name, content)

    @classmethod
    def read(cls, directory: Path) -> "About":
        """What `write` wrote."""
        try:
            return cls(**json.loads((directory / _ABOUT).read_bytes()))
        except (ValueError, TypeError) as error:
            raise ModelError(f"{directory / _ABOUT}: damaged: {error}") from None


@dataclass(frozen=True)
class RunInfo:
    """Whose versions they are, and what is done with them."""

    name: str
    run_id: str
    start: Path
    """Where `About` and the graph lie."""
    publish: Publish
    has_store: bool
    """Whether an online store is configured: it offers versions then."""


class RunVersions:
    """The versions of one run in the repository of its model."""

    def __init__(self, repository: store.Repository, info: RunInfo) -> None:
        self._repository, self._info = repository, info
        self._about = About.read(info.start)
        # The lock of the model, once it is taken, and the version that is being written.
        self._lock: contextlib.AbstractContextManager[None] | None = None
        self._draft: store.Draft | None = None

    def last(self) -> Version | None:
        """Take the model for this run, and find its newest version; it is offered if a crash came before that.

        None if the next one has to be a base.
        """
        if self._lock is None:
            lock = self._repository.locked()
            lock.__enter__()
            self._lock = lock
        directories = self._repository.directories()
        for number in sorted(directories, reverse=True)[:_MAX_LOOKS]:
            try:
                found = self._repository.read(directories[number])
                base = self._repository.chain(number)[0]
            except (ModelError, FileNotFoundError):
                # damaged, or removed meanwhile: nothing to build on
                continue
            publish = found.manifest["data"].get("publish")
            if isinstance(publish, dict) and publish.get("run") == self._info.run_id:
                is_offered = (self._repository.current() or 0) >= number
                offer = ("offered", False) if is_offered else self._offer(found)
                if not self._fits(found, base):
                    return None
                return Version(number, publish["name"], publish["deltas"], *offer)
        return None

    def _fits(self, version: versions.Version, base: versions.Version) -> bool:
        """Whether a delta may be of it: rows, dense values and graph are as this start of the run writes them."""
        about, manifest = self._about, version.manifest
        table, graph = manifest["table"], base.files.get(GRAPH_FILE)
        pairs = (
            (table.get("row_type"), self._info.publish.row_type),
            (table.get("partitions"), about.partitions),
            (table.get("columns"), about.columns),
            (manifest["features"], about.features),
            (manifest["graph"].get("inputs"), about.inputs),
            (manifest["graph"].get("labels"), about.labels),
            (manifest["dense"].get("tensors"), about.tensors),
            (graph and graph.sha256, hashlib.sha256((self._info.start / GRAPH_FILE).read_bytes()).hexdigest()),
        )
        return all(found == wanted for found, wanted in pairs)

    def begin(self, parent: Version | None) -> Draft:
        """A place for a base, or for a delta."""
        try:
            draft = self._repository.begin() if parent is None else self._repository.begin_delta(parent.number)
        except ModelError as error:
            raise error if parent is None else LostParentError(str(error)) from None
        self._draft = draft
        if self._repository.store.path_of("") is not None:
            return Draft(draft.number, draft.directory, f"{self._repository.name}/{draft.name}")
        return Draft(draft.number, draft.directory, draft.name, self._repository.place)

    def commit(self, draft: Draft, content: Content) -> Version:
        """Put the dense values together, and write the manifest last."""
        found = self._draft
        assert found is not None, "a version is begun before it is committed"
        dense = self._join(draft, content)
        files = {DENSE_FILE: FileEntry(*write_synced(draft.path / DENSE_FILE, dense))}
        if content.parent is None:
            graph = (self._info.start / GRAPH_FILE).read_bytes()
            files[GRAPH_FILE] = FileEntry(*write_synced(draft.path / GRAPH_FILE, graph))
        if self._about.reader is not None:
            reader = (self._info.start / READER_FILE).read_bytes()
            files[READER_FILE] = FileEntry(*write_synced(draft.path / READER_FILE, reader))
        for index, part in content.parts.items():
            assert part.cube is not None, "a part that is written says what it is"
            files[part_name(index)] = FileEntry(part.cube.bytes, part.cube.sha256)
            self._repository.store.delete(f"{found.name}/{draft.dense(index).name}")
            draft.dense(index).unlink(missing_ok=True)
        num_deltas = 0 if content.parent is None else content.parent.num_deltas + 1
        fail_point("version")
        version = self._repository.commit(found, self._content(content, num_deltas), files)
        # from here on it is a version, whatever happens
        fail_point("version-written")
        self._draft = None
        return Version(draft.number, content.publish, num_deltas, *self._offer(version, dense))

    def abandon(self, draft: Draft) -> None:
        """Remove what was written, unless it is a version all the same."""
        found, self._draft = self._draft, None
        if found is not None:
            self._repository.abandon(found)

    def close(self) -> None:
        """Let others publish the model."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.__exit__(None, None, None)

    def _content(self, content: Content, num_deltas: int) -> versions.Content:
        about, parts, facts = self._about, content.parts.values(), content.facts
        publish = {"run": self._info.run_id, "name": content.publish, "deltas": num_deltas}
        return versions.Content(
            run=self._info.name,
            checkpoint=f"publish {content.publish}",
            features=about.features,
            partitions=about.partitions,
            columns=about.columns,
            rows=sum(part.rows for part in parts),
            inputs=about.inputs,
            tensors=about.tensors,
            metrics={"train": facts["train"], "eval": []},
            data={
                "samples": content.parts[0].samples,
                "epoch": facts["passes"],
                "until": facts["until"],
                "publish": publish,
                **({} if about.reader is None else {"reader": about.reader}),
            },
            row_type=self._info.publish.row_type,
            labels=None if about.labels is None else tuple(about.labels),
            changed=sum(part.changed for part in parts),
            removed=sum(part.removed for part in parts),
            parts={part_name(index): content.owned[index] for index in content.parts}
            if len(content.parts) > 1
            else None,
        )

    def _join(self, draft: Draft, content: Content) -> bytes:
        """The dense vector, from the slices of the shards: here, or where those that share no disk have sent them."""
        assert self._draft is not None
        slices = []
        for index in sorted(content.parts):
            path, entry = draft.dense(index), content.parts[index].dense
            found = (
                path.read_bytes() if path.exists() else self._repository.store.read(f"{self._draft.name}/{path.name}")
            )
            if entry is None or len(found) != entry.bytes or hashlib.sha256(found).hexdigest() != entry.sha256:
                raise ModelError(f"{path}: not what shard {index} wrote")
            slices.append(found)
        return b"".join(slices)

    def _offer(self, version: versions.Version, dense: bytes | None = None) -> tuple[str, bool]:
        """Offer a version if it is as it has to be; what became of it, in words, and whether something is wrong."""
        try:
            if dense is None:
                dense = self._repository.store.read(f"{version.name}/{DENSE_FILE}")
            outcome = offer_version(
                self._repository,
                version,
                self._info.publish,
                not_finite=tuple(tensors_not_finite(dense, self._about.tensors)),
                has_store=self._info.has_store,
            )
        except (ElasticRecError, OSError) as error:
            # it is a version all the same
            return f"not offered: {error}", True
        problem = f"; old versions stay: {outcome.problem}" if outcome.problem else ""
        return outcome.words + problem, bool(outcome.refused)
