"""This process and its machine: cores, memory, open files, and the signals that stop it."""

import contextlib
import os
import resource
import signal
from collections.abc import Callable

# Enough for 4,096 connections and everything else.
_MANY_FILES = 32_768


def num_cores() -> int:
    """Return the number of cores that this process may use, which in a container may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_bytes() -> int:
    """Return the resident memory of this process, or 0 if unknown."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def allow_many_files() -> None:
    """Raise the limit of open files as far as allowed; the usual 1,024 is too low for a server."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    # Some systems report a limit that they do not allow.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def on_stop_signal(act: Callable[[], object]) -> None:
    """Call `act` on SIGTERM and on Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: act())


def limit_spinning() -> None:
    """Limit how long OpenMP threads spin. Call it before torch is imported, because OpenMP reads the setting then.

    Threads of a torch operation spin while they wait for each other. On a busy machine, spinning threads take the cores
    of the threads they wait for; a short limit is twice as fast there, and equally fast on an idle machine
    (docs/benchmarks.md).
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
