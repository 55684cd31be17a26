"""ElasticREC: click-through models from a log line to a served score.

In a notebook: `job = elasticrec.load_job("job.yaml")`, `result = elasticrec.train(job)`, `result.history`.
In a service: `client = elasticrec.Client("http://127.0.0.1:8500")`, `client.predict([{"user": 17}])`.
Importing the package imports neither torch nor the extension: each command and class loads what it uses.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticrec.api import Result, load_job, load_run, train
    from elasticrec.errors import ConfigError, ElasticRecError, SampleError, UnavailableError
    from elasticrec.serving.async_client import AsyncClient
    from elasticrec.serving.client import Client

try:
    __version__ = version("elasticrec")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "AsyncClient",
    "Client",
    "ConfigError",
    "ElasticRecError",
    "Result",
    "SampleError",
    "UnavailableError",
    "__version__",
    "load_job",
    "load_run",
    "train",
]

# Where what is offered is found, unless it is in the API.
_PLACES = {
    "AsyncClient": "elasticrec.serving.async_client",
    "Client": "elasticrec.serving.client",
    "ConfigError": "elasticrec.errors",
    "ElasticRecError": "elasticrec.errors",
    "SampleError": "elasticrec.errors",
    "UnavailableError": "elasticrec.errors",
}


def __getattr__(name: str) -> Any:
    """What the API offers, imported when it is first used."""
    if name in __all__:
        return getattr(import_module(_PLACES.get(name, "elasticrec.api")), name)
    raise AttributeError(f"module `elasticrec` has no `{name}`")
