"""Rollout: replicas of the online store load a version before it becomes current. Rollback restores an earlier one.

`decide`                      which version goes live, and what the rollout waits for
`deliver`, `background`       the loop of a rollout, in a process of its own or in the coordinator
`replicas`, `known_store`     the replicas of a store, and the record of them in the repository
`patience`                    how long a rollout waits for late replicas
`rollback`                    return to an earlier version
`commands`                    `elasticrec deliver`, `cube status` and `models rollback`
"""
