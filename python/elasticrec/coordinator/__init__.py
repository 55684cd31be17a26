"""The coordinator: leases units, owns the partition map and commits checkpoints. Its decisions are in a journal."""
