"""What all tests share, and the closing list of skipped tests."""

import os

import pytest
from hypothesis import HealthCheck, settings

# Threads of torch wait for each other: on a busy machine more of them are slower. Read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A machine that stalls is no failure.
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
