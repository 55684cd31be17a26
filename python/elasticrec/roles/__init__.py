"""The roles of a training with parameter servers: the processes of the coordinator, the shards and the trainers."""
