"""What this process may use of the machine."""

import contextlib
import os
import resource

# Those of 4,096 connections, and more than enough for the rest.
_MANY_FILES = 32_768


def num_cores() -> int:
    """Cores that this process may run on, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def resident_bytes() -> int:
    """Memory that this process has now; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def allow_many_files() -> None:
    """Open files for all connections that a server takes, as far as the system gives them; 1,024 are soon gone."""
    least, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if most == resource.RLIM_INFINITY else min(most, _MANY_FILES)
    # some systems name a number that they do not give
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(least, wanted), most))


def limit_spinning() -> None:
    """Limit how long OpenMP threads spin; call it before torch is imported, which is when OpenMP reads it.

    Threads of one torch operation spin while they wait for each other. On a busy machine the thread they wait for has
    lost its core to a spinning one: a short limit is twice as fast there, and as fast on a quiet machine
    (docs/benchmarks.md).
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
