"""Rollout: replicas of the store load a version, then it is offered; rollback goes the other way."""
