"""Number of cores, also on systems without CPU affinity, and the limit of open files."""

import os
import resource

import pytest

from elasticrec.machine import allow_many_files, num_cores


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "sched_getaffinity"):
        assert num_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert num_cores() == os.cpu_count()
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert num_cores() == 1


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1024, 1 << 20), (32_768, 1 << 20)),
        ((1024, 4096), (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), (32_768, resource.RLIM_INFINITY)),
        ((1 << 20, 1 << 20), (1 << 20, 1 << 20)),
    ],
)
def test_a_server_may_open_many_files(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], expected: tuple[int, int]
) -> None:
    limits_set: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: limits_set.append(wanted))
    allow_many_files()
    assert limits_set == [expected]
