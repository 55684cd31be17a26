"""The roles of a training with parameter servers: what runs in the process of a shard and of a trainer."""
