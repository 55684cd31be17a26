"""What a training calls between its steps: the seam to whoever publishes from it."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elasticrec.training.loop import Trainer


class Hook(Protocol):
    """Called in the training's own thread, where its state is whole. What it raises ends the training."""

    def begin(self, trainer: "Trainer") -> None:
        """Before the first batch."""

    def between(self, trainer: "Trainer") -> None:
        """Between two batches."""

    def end_pass(self, trainer: "Trainer") -> None:
        """At the end of an epoch or hour, after its evaluation and checkpoint."""

    def end(self, trainer: "Trainer") -> None:
        """After the last pass."""


class NoHook:
    """Nobody publishes."""

    def begin(self, trainer: "Trainer") -> None:
        """Nothing."""

    between = end_pass = end = begin
