"""ElasticREC: click-through models from a log line to a served score.

Importing the package imports neither torch nor the extension: each command and class loads what it uses.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("elasticrec")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
