"""The time of requests by stage, from the server's own histograms."""

import re

from elasticrec.bench.processes import request

Stages = dict[str, tuple[float, float]]

_STAGE = re.compile(r'^elasticrec_serve_stage_seconds_(sum|count)\{.*stage="(\w+)"\} (\S+)$', re.MULTILINE)


def stages_of(address: str) -> Stages:
    """Return (seconds, count) of each stage so far."""
    text = request(address, "/metrics").content.decode()
    stages: dict[str, dict[str, float]] = {}
    for kind, stage, value in _STAGE.findall(text):
        stages.setdefault(stage, {})[kind] = float(value)
    return {stage: (values["sum"], values["count"]) for stage, values in stages.items()}


def mean_us(before: Stages, after: Stages) -> dict[str, float]:
    """Return the microseconds per request in each stage between two readings."""
    # Every request waits in the queue, but several are scored together.
    requests = max(after["queue"][1] - before["queue"][1], 1)
    return {stage: round(1e6 * (total - before[stage][0]) / requests, 1) for stage, (total, _) in after.items()}
