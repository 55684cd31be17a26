"""A delta of a checkpoint's rows, written without the code that tracks changes, for tests and golden files."""

from dataclasses import replace
from typing import Any

import numpy as np

from elasticrec import _core
from elasticrec.audit.part import partition_of
from elasticrec.durable import write_synced
from elasticrec.manifest import FileEntry
from elasticrec.publish.local import VersionSource, version_content
from elasticrec.repository.repository import Repository
from elasticrec.repository.version import DENSE_FILE, Version, part_name
from elasticrec.run import Run
from elasticrec.training.predict import CheckpointModel

_core_with_cubes: Any = _core


def publish_delta(
    repository: Repository, loaded: CheckpointModel, parent: int, signs: set[int], removed: set[int], num_rows: int
) -> Version:
    """Publish a delta that changes some signs and removes others; `num_rows` counts the rows of the whole version."""
    job, table = loaded.job, loaded.state.embedding.table
    columns = [(column.name, column.width) for column in loaded.scorer.model.columns]
    num_partitions = job.sparse.partitions
    with repository.begin_delta(parent) as draft:
        writer = _core_with_cubes.DeltaWriter(
            str(draft.directory / part_name(0)), columns, row_type=job.publish.row_type, num_partitions=num_partitions
        )
        changed, deleted = (np.array(sorted(chosen), np.uint64) for chosen in (signs, removed))
        for partition in range(num_partitions):
            own = changed[partition_of(changed, num_partitions) == partition]
            rows = np.array([row[3] for sign in own if (row := table.get(int(sign)))], np.float32)
            own_deleted = deleted[partition_of(deleted, num_partitions) == partition]
            writer.add(partition, own, rows.reshape(-1, table.width), own_deleted)
        dense = loaded.state.dense.values.numpy().tobytes()
        files = {
            part_name(0): FileEntry(*writer.finish()),
            DENSE_FILE: FileEntry(*write_synced(draft.directory / DENSE_FILE, dense)),
        }
        progress, metrics = loaded.checkpoint.progress, loaded.checkpoint.manifest["metrics"]
        source = VersionSource(job, Run.of(job), loaded.checkpoint.name, loaded.scorer, loaded.state, progress, metrics)
        content = replace(version_content(source), rows=num_rows, changed=len(signs), removed=len(removed))
        return repository.commit(draft, content, files)
