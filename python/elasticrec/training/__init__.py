"""Training: the loop in one process, checkpoints, metrics and evaluation; `strategies/` trains with servers."""
