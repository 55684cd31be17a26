"""Training strategies of `train.mode: ps`, one file each.

To add a strategy, add a module with a subclass of `Strategy` here, and its name and rules to `config/strategies.py`.
"""

import importlib
import pkgutil
from functools import cache

from elasticrec.training.strategies.base import Strategy, TrainerContext

__all__ = ["Strategy", "TrainerContext", "find_strategy", "strategies"]


@cache
def strategies() -> dict[str, type[Strategy]]:
    """Return every strategy of this package by its name in `train.strategy`."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {cls.name: cls for cls in classes if issubclass(cls, Strategy) and cls is not Strategy}


def find_strategy(name: str) -> type[Strategy]:
    """Return the strategy that `train.strategy` names."""
    return strategies()[name]
