"""Rollout: replicas of the online store load a version before it becomes current. Rollback restores an earlier one."""
