"""ElasticREC: click-through models from a log line to a served score.

Importing the package imports neither torch nor the extension: each command and class loads what it uses.
"""

import os
from importlib.metadata import PackageNotFoundError, version

# Threads of one torch operation spin while they wait for each other; on a busy machine the one that is waited for has
# lost its core to a spinning one. Spinning for a short while only is as fast on a quiet machine, and twice as fast on a
# busy one (docs/benchmarks.md). OpenMP reads it when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

try:
    __version__ = version("elasticrec")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
