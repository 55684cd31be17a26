"""Detection of Parquet files and JSON lines, whose values have types."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticrec.config.fields import show, show_names
from elasticrec.data.init.columns import Column, time_column
from elasticrec.data.init.detection import NUM_LINES, Detection
from elasticrec.data.init.roles import Feature, assign_roles
from elasticrec.errors import SampleError


def num_rows(files: Sequence[Path]) -> int:
    """Return the number of rows of Parquet files."""
    from elasticrec.data.parquet import open_file

    return sum(open_file(path).metadata.num_rows for path in files)


def describe_parquet(files: Sequence[Path], label: str | None) -> Detection:
    """Describe Parquet files by rows of the first, a middle and the last row group."""
    import pyarrow as pa

    from elasticrec.data.parquet import open_file

    tables = []
    for path in files:
        file = open_file(path)
        if not file.schema_arrow.names:
            raise SampleError(f"{path}: expected columns, got none")
        num_groups = file.metadata.num_row_groups
        groups = sorted({0, num_groups // 2, num_groups - 1}) if num_groups else []
        for group in groups:
            count = -(-NUM_LINES // (len(files) * len(groups)))
            batch = next(file.iter_batches(batch_size=count, row_groups=[group]), None)
            if batch is not None:
                tables.append(pa.Table.from_batches([batch]))
    if not tables:
        raise SampleError(f"{files[0]}: expected samples, got no rows")
    names = tables[0].schema.names
    for path, table in zip(files, tables, strict=False):
        if table.schema.names != names:
            raise SampleError(f"{path}: expected the columns of {files[0]}, got {show_names(table.schema.names)}")
    columns = [_arrow_column(name, [table[name] for table in tables]) for name in names]
    roles = assign_roles(columns, str(files[0]), label, has_lines=False)
    count = sum(len(table) for table in tables)
    return Detection("parquet", "Parquet", count, roles, [roles.label])


def _arrow_column(name: str, chunks: Sequence[Any]) -> Column:
    import pyarrow as pa

    kind = chunks[0].type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        inner = kind.value_type
        if pa.types.is_dictionary(inner):
            inner = inner.value_type
        if not (pa.types.is_integer(inner) or pa.types.is_string(inner) or pa.types.is_large_string(inner)):
            return Column(name, "other", ["list"])
        rows = [value for chunk in chunks for value in chunk.to_pylist() if value]
        return Column(name, "list", [[str(item) for item in value if item is not None] for value in rows])
    everything = [value for chunk in chunks for value in chunk.to_pylist()]
    values = [value for value in everything if value is not None]
    missing = len(everything) - len(values)
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        stamp = pa.array(values, kind).cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).to_pylist()
        return Column(name, "time", [str(value) for value in values], [at / 1e6 for at in stamp], num_missing=missing)
    if pa.types.is_boolean(kind):
        return Column(name, "text", ["true" if value else "false" for value in values], num_missing=missing)
    if pa.types.is_integer(kind):
        texts = [str(value) for value in values]
        return time_column(name, texts, missing) or Column(name, "whole", texts, num_missing=missing)
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        texts = [str(value) for value in values]
        # A value that is not finite makes a record bad.
        odd = [text for text in texts if not math.isfinite(float(text))]
        problem = None
        if odd:
            shown = {"nan": "NaN"}.get(odd[0], odd[0])
            problem = f"has {shown} in {len(odd):,} of {len(everything):,} rows; store null for missing values"
        return Column(name, "real", texts, is_float=True, num_missing=missing, problem=problem)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        texts = [value for value in values if value]
        column = time_column(name, texts, len(everything) - len(texts))
        return column or Column(name, "text", texts, num_missing=missing)
    return Column(name, "other", ["other"])


def flatten(row: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of an object with their paths, such as `user.id`."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def describe_json(lines: Sequence[bytes], where: str, label: str | None) -> Detection:
    """Describe JSON lines by the values of their objects."""
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(dict(flatten(json.loads(line))))
        except (ValueError, AttributeError):
            if number == 1:
                raise SampleError(f"{where}:1: expected a JSON object, got {show(line.decode()[:100])}") from None
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [_json_column(name, [row.get(name) for row in rows]) for name in names]
    roles = assign_roles(columns, where, label)
    # The time of a sample is not a feature, and a reader cannot set it.
    if roles.time is not None:
        roles.left_out.append((roles.time, "a time"))
        roles.time = None
    if roles.weight is not None and roles.weight != "weight":
        roles.left_out.append((roles.weight, "a weight; return it as `weight` in the reader to use it"))
        roles.weight = None
    features = [*roles.slots, *roles.dense]
    paths = {feature.name: (feature.column or feature.name, feature.separator) for feature in features}
    roles.slots = [_drop_source(feature) for feature in roles.slots]
    roles.dense = [_drop_source(feature) for feature in roles.dense]
    return Detection("json", "JSON lines", len(rows), roles, [roles.label], paths=paths)


def _drop_source(feature: Feature) -> Feature:
    """Return a feature without column and separator: the reader finds and splits values itself."""
    return replace(feature, column=None, separator=None)


def _json_column(name: str, values: Sequence[Any]) -> Column:
    present = [value for value in values if value is not None]
    missing = len(values) - len(present)
    if present and all(isinstance(value, list) for value in present):
        items = [item for value in present for item in value if item is not None]
        if all(isinstance(item, str | int) for item in items):
            return Column(name, "list", [[str(item) for item in value if item is not None] for value in present])
        return Column(name, "other", ["list"])
    if present and all(isinstance(value, bool) for value in present):
        return Column(name, "text", ["true" if value else "false" for value in present], num_missing=missing)
    if any(isinstance(value, bool) for value in present):
        return Column(name, "other", ["mixed"])
    if present and all(isinstance(value, int) for value in present):
        texts = [str(value) for value in present]
        return time_column(name, texts, missing) or Column(name, "whole", texts, num_missing=missing)
    if present and all(isinstance(value, int | float) for value in present):
        odd = {str(value) for value in present if not math.isfinite(value)}
        note = f"{' and '.join(sorted(odd))} in it, read as missing" if odd else None
        return Column(name, "real", [str(value) for value in present], is_float=True, num_missing=missing, note=note)
    if all(isinstance(value, str) for value in present):
        texts = [value for value in present if value]
        column = time_column(name, texts, len(values) - len(texts))
        return column or Column(name, "text", texts, num_missing=missing)
    return Column(name, "other", ["mixed"])
