"""The end of an epoch for the table: counts decay, rows that are not worth their memory go, in this order."""

from dataclasses import replace

from elasticrec.config import Job
from elasticrec.training.checkpoint import Progress
from elasticrec.training.embedding import Embedding


def keep_up(job: Job, embedding: Embedding, progress: Progress, now: int | None = None) -> Progress:
    """Do for the epoch at hand what the job asks for, once: a checkpoint between this and the next epoch knows.

    `now` is the data time, that of epochs if not given.
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
