"""Decay counts and evict rows of the table at the end of an epoch, in this order."""

from dataclasses import replace

from elasticrec.config import Job
from elasticrec.training.checkpoint import Progress
from elasticrec.training.embedding import Embedding


def run_upkeep(job: Job, embedding: Embedding, progress: Progress, now: int | None = None) -> Progress:
    """Decay and evict as the job requires, once per epoch. The returned progress records that it was done.

    `now` is the data time; by default the epoch.
    """
    decay, evict = job.sparse.decay, job.sparse.evict
    evicts = evict.min_score is not None or evict.max_age is not None
    epoch = progress.epoch
    if progress.upkept > epoch or not (evicts or decay.show_click < 1):
        return progress
    if decay.show_click < 1:
        embedding.table.decay(decay.show_click, epoch)
    evicted = 0
    if evicts:
        evicted = embedding.table.evict(
            nonclk_coeff=evict.nonclk_coeff,
            click_coeff=evict.click_coeff,
            min_score=evict.min_score,
            now=epoch if now is None else now,
            max_age=evict.max_age,
        )
    return replace(progress, upkept=epoch + 1, evicted=progress.evicted + evicted)
