"""A role and its process on this machine, from the launcher's point of view."""

import subprocess
from dataclasses import dataclass, field


@dataclass
class Child:
    """A role: its current process, and earlier processes that hang."""

    role: str
    index: int
    arguments: list[str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    num_quick_deaths: int = 0
    """Consecutive processes that ended soon after their start."""
    is_leaving: bool = False
    """Whether the launcher asked the process to end."""
    down_since: float | None = None
    """Time at which the coordinator first reported this shard as down; None while it is up."""
    hung: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Replaced processes that may still be alive, for example suspended ones; they are fenced when they resume."""

    @property
    def name(self) -> str:
        """The name of the process, such as `ps-1`."""
        return self.role if self.role == "coordinator" else f"{self.role}-{self.index}"

    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self.process is not None and self.process.poll() is None

    def exit_code(self) -> int | None:
        """Return the exit code of the process, None while it runs or before it is started."""
        return None if self.process is None else self.process.poll()
