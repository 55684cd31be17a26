"""Publishing from parameter servers: each shard writes its part of a version."""
