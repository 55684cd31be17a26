"""A cube server in its own process, so that its CPU seconds are separate from those of the client.

    python -m elasticrec.bench.cube_process PARTITIONS

Prints its address, then answers each line (a JSON list of a method name and its arguments) with the result.
"""

import json
import sys

from elasticrec import _core

MODEL = "bench"
METHODS = ("install_base",)


def main(num_partitions: int) -> None:
    """Serve until standard input ends."""
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
