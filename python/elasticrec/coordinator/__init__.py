"""The coordinator: hands out units, owns the partition map, commits checkpoints; what it must know survives it."""
