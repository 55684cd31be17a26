"""ElasticREC: click-through models from a click log to a served score.

In a notebook: `run = elasticrec.train("job.yaml")`, `run.history`, `run.publish()`.
In a service: `client = elasticrec.Client("http://127.0.0.1:8500")`, `client.predict([{"user": 17}])`.
Importing the package imports neither torch nor the extension: each command and class loads what it uses.
"""

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticrec.api import PredictionServer, TrainingRun, load_job, load_run, serve, train
    from elasticrec.config import Job
    from elasticrec.errors import ConfigError, ElasticRecError, ModelError, SampleError, UnavailableError
    from elasticrec.publish.offer import PublishResult
    from elasticrec.serving.async_client import AsyncClient
    from elasticrec.serving.client import Client
    from elasticrec.serving.protocol import Answer
    from elasticrec.training.event import Callback, Event
    from elasticrec.training.metrics import Metrics

try:
    __version__ = version("elasticrec")
except PackageNotFoundError:  # run from a checkout that is not installed
    __version__ = "0+unknown"

__all__ = [
    "Answer",
    "AsyncClient",
    "Callback",
    "Client",
    "ConfigError",
    "ElasticRecError",
    "Event",
    "Job",
    "Metrics",
    "ModelError",
    "PredictionServer",
    "PublishResult",
    "SampleError",
    "TrainingRun",
    "UnavailableError",
    "__version__",
    "load_job",
    "load_run",
    "serve",
    "train",
]

# Names that are not in `elasticrec.api`, and their modules.
_MODULES = {
    "Answer": "elasticrec.serving.protocol",
    "AsyncClient": "elasticrec.serving.async_client",
    "Callback": "elasticrec.training.event",
    "Client": "elasticrec.serving.client",
    "ConfigError": "elasticrec.errors",
    "ElasticRecError": "elasticrec.errors",
    "Event": "elasticrec.training.event",
    "Job": "elasticrec.config",
    "Metrics": "elasticrec.training.metrics",
    "ModelError": "elasticrec.errors",
    "PublishResult": "elasticrec.publish.offer",
    "SampleError": "elasticrec.errors",
    "UnavailableError": "elasticrec.errors",
}


# Libraries leave the choice of handlers to the application; commands set theirs up in `net/logs.py`.
logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used."""
    if name in __all__:
        return getattr(import_module(_MODULES.get(name, "elasticrec.api")), name)
    raise AttributeError(f"module `elasticrec` has no `{name}`")


def __dir__() -> list[str]:
    """Return the names for tab completion, those of `__all__` included."""
    return sorted({*globals(), *__all__})
