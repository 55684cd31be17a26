"""Where the time of requests went, by the server's own histograms."""

import re
import urllib.request

Stages = dict[str, tuple[float, float]]

_STAGE = re.compile(r'^elasticrec_serve_stage_seconds_(sum|count)\{.*stage="(\w+)"\} (\S+)$', re.MULTILINE)


def stages_of(address: str) -> Stages:
    """(seconds, count) of each stage so far."""
    with urllib.request.urlopen(f"http://{address}/metrics") as response:
        text = response.read().decode()
    found: dict[str, dict[str, float]] = {}
    for kind, stage, value in _STAGE.findall(text):
        found.setdefault(stage, {})[kind] = float(value)
    return {stage: (values["sum"], values["count"]) for stage, values in found.items()}


def mean_us(before: Stages, after: Stages) -> dict[str, float]:
    """Microseconds a request in each stage between two looks."""
    # all of them wait in the queue, some of them are scored together
    requests = max(after["queue"][1] - before["queue"][1], 1)
    return {stage: round(1e6 * (total - before[stage][0]) / requests, 1) for stage, (total, _) in after.items()}
