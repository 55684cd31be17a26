"""Training: batches through the table and the network, checkpoints, evaluation."""
