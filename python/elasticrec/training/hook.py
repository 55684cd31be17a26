"""The hook that a training calls between steps; publishing uses it."""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from elasticrec.training.loop import Trainer


class Hook(Protocol):
    """Called in the training's thread while its state is consistent. Exceptions end the training."""

    def begin(self, trainer: "Trainer") -> None:
        """Called before the first batch."""

    def between(self, trainer: "Trainer") -> None:
        """Called between two batches."""

    def end_pass(self, trainer: "Trainer") -> None:
        """Called at the end of an epoch or hour, after its evaluation and checkpoint."""

    def end(self, trainer: "Trainer") -> None:
        """Called after the last pass."""


class NoHook:
    """A hook that does nothing."""

    def begin(self, trainer: "Trainer") -> None:
        """Do nothing."""

    between = end_pass = end = begin
