"""The errors that every part of the data path raises; the command line exits with 2 on each.

Files that are missing or unreadable raise `FileNotFoundError` and the other `OSError`s as they are.
"""


class ElasticRecError(Exception):
    """Something a user can correct; the message says where, what was expected and what was found."""


class ConfigError(ElasticRecError):
    """A job file, an override or a run that cannot be used; one line of the message for each problem."""


class SampleError(ElasticRecError, ValueError):
    """A line or a value of the data that cannot be parsed, or too many of them."""


class ModelError(ElasticRecError):
    """A model, a checkpoint or a version that cannot be built, loaded or exported."""


class UnavailableError(ElasticRecError, ConnectionError):
    """A server that did not answer, or answered that it cannot serve now."""
