"""CPU time of processes."""

import os
from pathlib import Path


def cpu_seconds(process_id: int) -> float:
    """Return the user and system time of a process and all its threads so far."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
