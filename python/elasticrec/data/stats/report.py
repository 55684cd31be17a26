"""Statistics as text: a table of slots, a table of dense columns, and warnings."""

from elasticrec.data.stats.collect import QUANTILES
from elasticrec.data.stats.result import Stats
from elasticrec.terminal import align_columns

_MAX_UNUSED = 20


def report_lines(stats: Stats) -> list[str]:
    """Return the report of `elasticrec data stats`."""
    return [
        *_head_lines(stats),
        *_bad_lines(stats),
        "",
        *_slot_lines(stats),
        *(["", *_dense_lines(stats)] if stats.dense else []),
        *_unused_lines(stats),
        *(["", *(f"warning: {line}" for line in stats.warnings)] if stats.warnings else []),
    ]


def _head_lines(stats: Stats) -> list[str]:
    line = f"{stats.source}: {stats.num_train:,} training samples"
    if stats.has_eval:
        line += f", {stats.num_eval:,} evaluation samples"
    if stats.is_sample:
        line += " (a part of the data; raise --samples to read more)"
    lines = [line]
    if not stats.has_eval:
        lines.append("  no evaluation data: AUC is measured on a held-out share of the samples, drift is not measured")
    for name, (train, held_out) in stats.labels.items():
        rates = [f"{_share(train)} in train"] + ([f"{_share(held_out)} in eval"] if stats.has_eval else [])
        lines.append(f"  label `{name}`: {', '.join(rates)}")
    return lines


def _bad_lines(stats: Stats) -> list[str]:
    if stats.num_bad == 0:
        return []
    share = stats.num_bad / stats.num_records
    lines = [f"  bad records: {stats.num_bad:,} of {stats.num_records:,} ({share:.3%}), the first of them:"]
    return [*lines, *(f"    {line}" for line in stats.bad)]


def _slot_lines(stats: Stats) -> list[str]:
    head = ["slot", "coverage", "distinct", "per sample", "click rate", "AUC alone"]
    rows = [
        [
            slot.name,
            f"{slot.coverage:.1%}",
            f"{slot.num_signs:,}",
            f"{slot.mean_signs:.2f}",
            _share(slot.click_rate),
            _number(slot.auc, ".4f"),
            *([_number(slot.drift, ".3f"), _share(slot.unseen)] if stats.has_eval else []),
        ]
        for slot in stats.slots
    ]
    return align_columns([[*head, *(["drift", "unseen"] if stats.has_eval else [])], *rows], left=(0,))


def _dense_lines(stats: Stats) -> list[str]:
    names = [f"{q:.0%}" for q in QUANTILES]
    rows = [
        [
            column.name,
            f"{column.coverage:.1%}",
            _number(column.min, ".4g"),
            *(_number(column.quantiles.get(name), ".4g") for name in names),
            _number(column.max, ".4g"),
            _number(column.mean, ".4g"),
            _number(column.auc, ".4f"),
            *([_number(column.drift, ".3f")] if stats.has_eval else []),
        ]
        for column in stats.dense
    ]
    head = ["dense", "coverage", "min", *names, "max", "mean", "AUC alone", *(["drift"] if stats.has_eval else [])]
    return align_columns([head, *rows], left=(0,))


def _unused_lines(stats: Stats) -> list[str]:
    if not stats.unused:
        return []
    shown = [
        f"{one.name}" + ("" if one.share is None else f" (in {one.share:.1%} of the samples)")
        for one in stats.unused[:_MAX_UNUSED]
    ]
    more = len(stats.unused) - _MAX_UNUSED
    return ["", "not used by the job: " + ", ".join(shown) + (f" and {more:,} more" if more > 0 else "")]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
