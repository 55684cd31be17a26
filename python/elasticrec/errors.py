"""The errors that every part of the data path raises; the command line exits with 2 on each.

Missing or unreadable files raise `FileNotFoundError` and the other `OSError`s.
"""


class ElasticRecError(Exception):
    """An error that a user can correct; the message says where, what was expected and what was found."""


class ConfigError(ElasticRecError):
    """A job file, an override or a run that cannot be used; the message has one line per problem."""


class SampleError(ElasticRecError, ValueError):
    """A line or a value of the data that cannot be parsed, or too many bad lines."""


class ModelError(ElasticRecError):
    """A model, a checkpoint or a version that cannot be built, loaded or exported."""


class UnavailableError(ElasticRecError, ConnectionError):
    """A server that did not answer, or cannot serve at the moment."""
