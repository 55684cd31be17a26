"""Settings of all tests, and a list of the skipped tests at the end."""

import os

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine several torch threads are slower than one. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A stall of the machine is not a failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.section("skipped tests")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        terminalreporter.write_line(f"{report.nodeid}: {reason}")
    if not skipped:
        terminalreporter.write_line("none")
