"""A cube server in a process of its own, so that its CPU seconds can be told from those of who asks.

    python -m elasticrec.bench.cube_process PARTITIONS

Prints its address, then answers each line (a JSON list: the name of a method and its arguments) with what it returned.
"""

import json
import sys

from elasticrec import _core

MODEL = "bench"
METHODS = ("install_base",)


def main(num_partitions: int) -> None:
    """Serve until there are no more lines."""
    server = _core.CubeServer(
        MODEL, address="127.0.0.1:0", token="", partitions=(0, num_partitions), num_partitions=num_partitions
    )
    print(server.address, flush=True)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        assert method in METHODS
        print(json.dumps(getattr(server, method)(*arguments)), flush=True)
    server.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]))
