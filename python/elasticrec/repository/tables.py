"""Format models and versions as tables for people and as values for JSON."""

from datetime import UTC, datetime
from typing import Any

from elasticrec.errors import ModelError
from elasticrec.repository.diff import Difference, metrics_of
from elasticrec.repository.repository import Repository
from elasticrec.repository.version import Version
from elasticrec.terminal import align_columns

_SHOWN = 8


def describe_model(repository: Repository) -> dict[str, Any]:
    """Return the current version, the pins, and all versions of a model, newest first."""
    state = repository.state()
    pins = repository.pins()
    versions = []
    for number, directory in sorted(repository.directories().items(), reverse=True):
        try:
            versions.append(_describe_version(repository.read(directory)))
        except (ModelError, FileNotFoundError) as error:
            versions.append({"version": number, "problem": str(error)})
    return {
        "model": repository.name,
        "place": repository.location,
        "current": None if state is None else state.version,
        "generation": None if state is None else state.generation,
        "held": state is not None and state.is_held,
        "wanted": None if state is None else state.wanted,
        "pinned": pins,
        "versions": versions,
    }


def _describe_version(version: Version) -> dict[str, Any]:
    manifest = version.manifest
    metrics = metrics_of(manifest)
    label = manifest["features"]["labels"][0]
    auc = metrics.get(f"eval {label} auc", metrics.get(f"train {label} auc"))
    return {
        "version": version.number,
        "base": manifest["base"],
        "parent": version.parent,
        "created": manifest["created"],
        "run": manifest["run"],
        "rows": version.rows,
        "changed": manifest["table"].get("changed"),
        "removed": manifest["table"].get("removed"),
        "row_type": manifest["table"]["row_type"],
        "bytes": version.num_bytes,
        "auc": auc,
        "samples": manifest["data"].get("samples"),
        "until": manifest["data"].get("until"),
    }


def model_lines(model: dict[str, Any], now: datetime | None = None) -> list[str]:
    """Return the lines of `models list`."""
    now = now or datetime.now(UTC)
    held = ", held by a rollback until `models resume`" if model["held"] else ""
    if model.get("wanted") is not None:
        held = f", a rollback to {model['wanted']} waits for the store{held}"
    current = "none offered yet" if model["current"] is None else f"current {model['current']}{held}"
    lines = [f"{model['place']}: {current}"]
    if not model["versions"]:
        return [*lines, "no versions"]
    rows = [["version", "kind", "", "age", "rows", "changed", "bytes", "auc"]]
    for one in model["versions"]:
        marks = [
            *(["current"] if one["version"] == model["current"] else []),
            *(["wanted"] if one["version"] == model.get("wanted") else []),
            *(["pinned"] if one["version"] in model["pinned"] else []),
        ]
        if "problem" in one:
            rows.append([str(one["version"]), "damaged", " ".join(marks), "", "", "", "", ""])
            continue
        kind = "base" if one["base"] is None else f"delta of {one['parent']}"
        changed = "" if one["changed"] is None else f"{one['changed']:,}, -{one['removed']:,}"
        auc = "-" if one["auc"] is None else f"{one['auc']:.4f}"
        rows.append(
            [
                str(one["version"]),
                kind,
                " ".join(marks),
                age(one["created"], now),
                f"{one['rows']:,}",
                changed,
                f"{one['bytes']:,}",
                auc,
            ]
        )
    lines += align_columns(rows, left=(1, 2))
    lines += [one["problem"] for one in model["versions"] if "problem" in one]
    return lines


def age(created: str, now: datetime) -> str:
    """Return the time since creation, such as `3 min`."""
    try:
        seconds = (now - datetime.fromisoformat(created)).total_seconds()
    except (ValueError, TypeError):
        return "?"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def version_lines(shown: dict[str, Any]) -> list[str]:
    """Return the lines of `models show`."""
    manifest = shown["manifest"]
    table, data = manifest["table"], manifest["data"]
    columns = ", ".join(f"{one['name']} {one['width']}" for one in table["columns"])
    slots = [slot["name"] for slot in manifest["features"]["slots"]]
    more = f" and {len(slots) - _SHOWN} more" if len(slots) > _SHOWN else ""
    base = manifest["base"]
    rows = [
        ["location", shown["place"]],
        ["created", manifest["created"]],
        ["from", f"run {manifest['run']}, {manifest['checkpoint']}"],
        ["kind", "base" if base is None else f"delta on {manifest['parent']} of base {base}"],
        ["chain", " ".join(map(str, shown["chain"]))],
        ["rows", f"{table['rows']:,} of {table['row_type']} in {table['partitions']} partitions: {columns}"],
        ["slots", f"{len(slots)}: {', '.join(slots[:_SHOWN])}{more}"],
        ["outputs", ", ".join(manifest["graph"].get("labels", manifest["features"]["labels"]))],
        ["data", ", ".join(f"{key} {value}" for key, value in data.items() if value is not None)],
        ["bytes", f"{shown['bytes']:,} in {len(manifest['files'])} files"],
    ]
    if "changed" in table:
        rows.insert(6, ["delta", f"{table['changed']:,} rows changed, {table['removed']:,} removed"])
    if marks := [word for word in ("current", "pinned", "held") if shown[word]]:
        rows.insert(1, ["state", " ".join(marks)])
    lines = align_columns(rows, left=(0, 1))
    return lines + [f"{key}: {_number(value)}" for key, value in metrics_of(manifest).items()]


def difference_lines(a: str, b: str, found: Difference) -> list[str]:
    """Return the lines of `models diff`."""
    lines = [f"{a} and {b}"]
    for key, (left, right) in found.keys.items():
        lines.append(f"{key}: {_shorten(left)} → {_shorten(right)}")
    rows = [["", a, b, ""]]
    for name, (before, after) in found.metrics.items():
        change = f"{after - before:+.4f}" if before is not None and after is not None and before != after else ""
        rows.append([name, _number(before), _number(after), change])
    if len(rows) > 1:
        lines += align_columns(rows, left=(0,))
    lines += [f"{name}: {word}" for name, word in found.files.items()]
    if found.rows is not None:
        counts = found.rows
        lines.append(
            f"rows: {counts.added:,} added, {counts.removed:,} removed, {counts.changed:,} changed, "
            f"{counts.equal:,} equal"
        )
    if found.note:
        lines.append(found.note)
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _shorten(value: Any, most: int = 60) -> str:
    text = str(value)
    return text if len(text) <= most else f"{text[: most - 3]}..."
