"""Publishing: turn trained parameters into a version that is served.

`content`                 what a manifest says, built in one place for all publishers
`export`, `graph`         the network as an ONNX graph, cached by structure
`local`                   publish a checkpoint or a training in one process
`local_versions`, `live`  bases and deltas during a training in one process
`servers/`                publish from parameter servers: each shard writes its part
`gate`                    checks that a version must pass before it may be offered
`offer`                   decides after each commit whether the version goes live at once
`rollout/`                decides when a version goes live where an online store must load it first

A version goes live when `Repository.offer` writes `CURRENT`. Without an online store `offer.py` decides that; with one,
`rollout/decide.py` does.
"""
