"""When to save checkpoints and to evaluate: by steps, by seconds and by epochs."""

from elasticrec.config.train import Train
from elasticrec.training.checkpoint import Progress


class Schedule:
    """Decides what is due. Times are seconds of the training's clock. An interval starts at its last event."""

    def __init__(self, settings: Train, *, has_hours: bool = False) -> None:
        self._settings = settings
        # With hours the last pass is not known in advance.
        self._has_hours = has_hours
        self._saved_s = 0.0
        self._evaluated_s = 0.0

    def start(self) -> None:
        """Start all intervals at a clock of zero."""
        self._saved_s = self._evaluated_s = 0.0

    def note_saved(self, now_s: float) -> None:
        """Note that a checkpoint was saved."""
        self._saved_s = now_s

    def note_evaluated(self, now_s: float) -> None:
        """Note that an evaluation ended."""
        self._evaluated_s = now_s

    def is_checkpoint_due(self, progress: Progress, now_s: float) -> bool:
        """Return whether to save a checkpoint after this batch."""
        settings = self._settings.checkpoint
        if settings.every_steps and progress.steps % settings.every_steps == 0:
            return True
        return now_s - self._saved_s >= settings.every_s

    def is_evaluation_due(self, progress: Progress, now_s: float) -> bool:
        """Return whether to evaluate after this batch; an interrupted evaluation is due again."""
        settings = self._settings.evaluate
        if progress.evaluated == progress.steps:
            return False
        if settings.every_steps and progress.steps % settings.every_steps == 0:
            return True
        return settings.every_s is not None and now_s - self._evaluated_s >= settings.every_s

    def is_epoch_checkpoint_due(self, epoch: int) -> bool:
        """Return whether to save at the end of an epoch, counted from 0; the last one is always saved."""
        settings = self._settings.checkpoint
        is_last = not self._has_hours and epoch + 1 >= self._settings.epochs
        return is_last or (epoch + 1) % settings.every_epochs == 0 or settings.keeps_epoch(epoch)
